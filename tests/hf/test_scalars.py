"""Scalars against the formulas written again in float64, and against other numbers than those they hold."""

import copy
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import tiny_models as tm
from fulldepth.errors import FulldepthError
from fulldepth.execution import capture, verify
from fulldepth.hf import GRANULARITIES, Scalars, Switches, anatomy_candidates, skipping

NAMES = ("b_att", "s_att", "b_mlp", "s_mlp")


def anatomy_of(model):
    candidates = anatomy_candidates(model)
    return candidates[0] if len(candidates) == 1 else verify(candidates, tm.inputs(model)).anatomy


def random_scalars(skipped=(), granularity="attention", width=None, seed=0, num_layers=3):
    generator = torch.Generator().manual_seed(seed)
    scalars = Scalars(num_layers, skipped, granularity, width)
    with torch.no_grad():
        for factor in scalars.parameters():
            factor.uniform_(0.5, 1.5, generator=generator)
    return scalars


# The forward pass, written again.


def rotated(x, base=10000.0):
    """Rotary embedding of [B, H, T, d] over all of d, halves paired."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attended(q, k, v):
    """Causal attention over [B, H, T, d]."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v
    return out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1)


def heads_of(x, d):
    return x.reshape(*x.shape[:2], -1, d).swapaxes(1, 2)


def llama_logits(model, ids, scalars, skipped=()):
    """Logits of a Llama with x' = b_att A + s_att x, y = b_mlp M + s_mlp x'; `scalars[layer][name]` are numbers."""
    w = {name: value.double().numpy() for name, value in model.state_dict().items()}
    eps, d = model.config.rms_norm_eps, model.config.head_dim

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[name]

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(1, model.config.num_hidden_layers + 1):
        at, f = f"model.layers.{layer - 1}", scalars[layer]
        if layer not in skipped:
            n = norm(x, f"{at}.input_layernorm.weight")
            q, k, v = (heads_of(n @ w[f"{at}.self_attn.{p}_proj.weight"].T, d) for p in "qkv")
            k, v = (np.repeat(t, q.shape[1] // t.shape[1], axis=1) for t in (rotated(k), v))
            attention = attended(rotated(q), k, v) @ w[f"{at}.self_attn.o_proj.weight"].T
            x = f["b_att"] * attention + f["s_att"] * x
        n = norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (n @ w[f"{at}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        mlp = (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
        x = f["b_mlp"] * mlp + f["s_mlp"] * x
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def neox_logits(model, ids, scalars, skipped=()):
    """Logits of a parallel GPT-NeoX: y = s_mlp (b_att A + s_att x) + b_mlp M(Norm(x))."""
    w = {name: value.double().numpy() for name, value in model.state_dict().items()}
    heads, eps = model.config.num_attention_heads, model.config.layer_norm_eps

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        centred /= np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        return centred * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["gpt_neox.embed_in.weight"][ids]
    rotary = int(x.shape[-1] // heads * model.config.rope_parameters["partial_rotary_factor"])
    for layer in range(1, model.config.num_hidden_layers + 1):
        at, f = f"gpt_neox.layers.{layer - 1}", scalars[layer]
        hidden = linear(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp.dense_h_to_4h")
        hidden = F.gelu(torch.from_numpy(hidden)).numpy()
        after = x
        if layer not in skipped:
            qkv = linear(norm(x, f"{at}.input_layernorm"), f"{at}.attention.query_key_value")
            q, k, v = np.split(heads_of(qkv, 3 * x.shape[-1] // heads), 3, axis=-1)
            q, k = (np.concatenate([rotated(t[..., :rotary]), t[..., rotary:]], -1) for t in (q, k))
            after = f["b_att"] * linear(attended(q, k, v), f"{at}.attention.dense") + f["s_att"] * x
        x = f["s_mlp"] * after + f["b_mlp"] * linear(hidden, f"{at}.mlp.dense_4h_to_h")
    return norm(x, "gpt_neox.final_layer_norm") @ w["lm_head.weight"].T


FORMULAS = {"llama": llama_logits, "gpt_neox": neox_logits}


def numbers(scalars):
    return {int(layer): {n: np.array(v) for n, v in values.items()} for layer, values in scalars.as_dict().items()}


@pytest.mark.parametrize("width", [None, tm.WIDTH])
@pytest.mark.parametrize("skipped", [set(), {1}, {2, 3}])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_model_with_scalars_is_the_formula(name, skipped, width):
    model, ids = tm.build(name), tm.inputs(tm.build("llama"))["input_ids"]
    scalars = random_scalars(skipped, width=width)
    with skipping(anatomy_of(model), skipped, scalars=scalars), torch.no_grad():
        got = model(input_ids=ids).logits
    expected = FORMULAS[name](model, ids.numpy(), numbers(scalars), skipped)
    torch.testing.assert_close(got.double(), torch.from_numpy(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [None, tm.WIDTH])
@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_reach_the_scalars(name, width):
    """The gradient of the cross-entropy, against finite differences of the formula."""
    skipped = {2}
    model, ids = tm.build(name), tm.inputs(tm.build("llama"))["input_ids"]
    model.requires_grad_(False)
    scalars = random_scalars(skipped, width=width)
    with skipping(anatomy_of(model), skipped, scalars=scalars):
        loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())

    def formula(values):
        logits = torch.from_numpy(FORMULAS[name](model, ids.numpy(), values, skipped))
        return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))

    assert abs(formula(numbers(scalars)) - float(loss.detach())) < 1e-4
    for layer in (1, 2, 3):
        for factor, parameter in scalars.get(layer).items():
            at = () if width is None else (5,)
            step = 1e-5
            values = [numbers(scalars) for _ in range(2)]
            values[0][layer][factor][at] += step
            values[1][layer][factor][at] -= step
            slope = (formula(values[0]) - formula(values[1])) / (2 * step)
            assert parameter.grad[at].item() == pytest.approx(slope, rel=2e-3, abs=2e-5)


GEMMA = ("input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", ["mlp"])
LLAMA = ("input_layernorm", "self_attn", None, "post_attention_layernorm", ["mlp"])
NEOX = ("input_layernorm", "attention", None, "post_attention_layernorm", ["mlp"])
ROWS = {
    **dict.fromkeys(["llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "depth_llama"], LLAMA),
    **dict.fromkeys(["gemma2", "gemma3"], (*GEMMA[:4], ["mlp", "post_feedforward_layernorm"])),
    "olmo2": (None, "self_attn", "post_attention_layernorm", None, ["mlp", "post_feedforward_layernorm"]),
    "gpt2": ("ln_1", "attn", None, "ln_2", ["mlp"]),
    "gpt_neox": NEOX,
    "gpt_neox-serial": NEOX,
    "opt": ("self_attn_layer_norm", "self_attn", None, "final_layer_norm", ["fc1", "activation_fn", "fc2"]),
    "cohere": ("input_layernorm", "self_attn", None, "input_layernorm", ["mlp"]),
}
"""Family -> its block in words: norm, attention and the norm on its output, norm, and what makes up the MLP."""
PARALLEL = ("gpt_neox", "cohere")


def rewritten(model, name, scalars, skipped, granularity):
    """A copy whose blocks are written anew out of their own modules, with the scalars where the formula has them."""
    other = copy.deepcopy(model)
    before_attention, attention, after_attention, before_mlp, mlp = ROWS[name]
    scale = getattr(model.config, "residual_multiplier", 1.0)
    for layer, block in enumerate(anatomy_of(other).blocks, start=1):
        signature = inspect.signature(type(block).forward)
        f = {**dict.fromkeys(NAMES, torch.tensor(1.0)), **scalars.get(layer)}
        left = () if layer not in skipped else {"attention": ("mlp",), "mlp": ("attention",), "layer": ()}[granularity]
        left = ("attention", "mlp") if layer not in skipped else left

        def forward(*args, block=block, signature=signature, f=f, left=left, **kwargs):
            given = dict(signature.bind(block, *args, **kwargs).arguments)
            given.update(given.pop("kwargs", {}))
            x = given.pop("hidden_states")
            given.pop("self"), given.pop("memory", None), given.pop("ancestor", None)

            def through(state, names):
                for module in names:
                    state = state if module is None else block.get_submodule(module)(state)
                return state

            a = m = 0
            if "attention" in left:
                a = block.get_submodule(attention)(through(x, [before_attention]), **given)[0]
                a = f["b_att"].double() * scale * through(a, [after_attention])
            after = a + (f["s_att"].double() * x if "attention" in left else x)
            if "mlp" in left:
                m = f["b_mlp"].double() * scale * through(x if name in PARALLEL else after, [before_mlp, *mlp])
            return m + (f["s_mlp"].double() * after if "mlp" in left else after)

        block.forward = forward
    return other


@pytest.mark.parametrize("name", ROWS)
def test_every_family_is_its_block_written_anew(name):
    model = tm.build(name, dtype=torch.float64)
    inputs = tm.inputs(model)
    with torch.no_grad():
        for granularity in GRANULARITIES:
            with Switches(anatomy_of(model), granularity) as switches:
                for skipped in (set(), {1}, {1, 2, 3}):
                    scalars = random_scalars(skipped, granularity, width=tm.WIDTH)
                    switches.scalars = scalars
                    switches.skip(skipped)
                    got = model(**inputs).logits
                    stock = tm.build(name, dtype=torch.float64)
                    expected = rewritten(stock, name, scalars, skipped, granularity)(**inputs).logits
                    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*ROWS, "falcon"])
def test_factors_of_one_change_no_bit(name, dtype):
    model = tm.build(name, dtype=dtype)
    with torch.no_grad():
        plain = model(**tm.inputs(model)).logits
        for width in (None, tm.WIDTH):
            for granularity in GRANULARITIES:
                with skipping(anatomy_of(model), [], granularity, Scalars(3, (), granularity, width)):
                    assert torch.equal(model(**tm.inputs(model)).logits, plain)
                with skipping(anatomy_of(model), [2], granularity):
                    skipped = model(**tm.inputs(model)).logits
                with skipping(anatomy_of(model), [2], granularity, Scalars(3, [2], granularity, width)):
                    assert torch.equal(model(**tm.inputs(model)).logits, skipped)


def test_float32_factors_heal_a_bfloat16_model_from_above():
    """A bfloat16 factor cannot rise from 1 at Adam's step of 0.003: half an ulp above 1 is 0.004."""
    model = tm.build("llama", dtype=torch.bfloat16).requires_grad_(False)
    scalars = Scalars(3, [2])
    before = scalars.as_dict()
    optimiser = torch.optim.Adam(scalars.parameters(), lr=3e-3)
    inputs = tm.inputs(model)
    with skipping(anatomy_of(model), [2], scalars=scalars):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimiser.step()
    moved = [value - 1 for factors in scalars.as_dict().values() for value in factors.values()]
    assert before["1"]["b_att"] == 1.0
    assert max(moved) == pytest.approx(3e-3, rel=1e-3)
    assert min(moved) == pytest.approx(-3e-3, rel=1e-3)


def test_factors_are_not_rounded_to_the_models_dtype():
    """In bfloat16 1.003 would be 1: what the first layer adds is `b A + (s - 1) x`, rounded once."""
    model = tm.build("llama", dtype=torch.bfloat16)
    anatomy, scalars = anatomy_of(model), Scalars(3)
    b, s = 1.003, 0.9985
    with torch.no_grad(), capture(anatomy, ["attention_input", "attention_branch"]) as activations:
        model(**tm.inputs(model))
        x, branch = (activations[site][0].double() for site in ("attention_input", "attention_branch"))
        scalars.get(1)["b_att"].fill_(b)
        scalars.get(1)["s_att"].fill_(s)
        with skipping(anatomy, [], scalars=scalars):
            model(**tm.inputs(model))
        got = activations["attention_branch"][0]
    assert got.dtype == torch.bfloat16
    expected = (b * branch + (s - 1) * x).bfloat16()
    assert (got == expected).double().mean() > 0.99
    assert (got == branch).double().mean() < 0.9


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_gradient_checkpointing_changes_nothing(name, reentrant):
    model = tm.build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        scalars = random_scalars([2])
        with skipping(anatomy_of(model), [2], scalars=scalars):
            inputs = tm.inputs(model)
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        gradients.append([factor.grad for factor in scalars.parameters()])
    torch.testing.assert_close(*gradients)


def test_dropout_of_the_branches_and_scalars_exclude_each_other():
    model = tm.build("opt")
    anatomy = anatomy_of(model)
    model.train()
    with Switches(anatomy) as switches:
        switches.skip([1])
        model(**tm.inputs(model))
        switches.scalars = Scalars(3, [1])
        with pytest.raises(FulldepthError, match="evaluation mode"):
            model(**tm.inputs(model))
        model.eval()(**tm.inputs(model))


def test_scalars_for_another_set_are_refused_when_the_model_runs():
    model = tm.build("llama")
    with Switches(anatomy_of(model)) as switches:
        switches.scalars = Scalars(3, [2])
        with pytest.raises(FulldepthError, match="Layer 2 is not skipped, but its scalars are b_mlp, s_mlp"):
            model(**tm.inputs(model))
        switches.skip([2])
        model(**tm.inputs(model))
        switches.skip([3])
        with pytest.raises(FulldepthError, match="Layer 2 is not skipped"):
            model(**tm.inputs(model))
        switches.scalars = None
        model(**tm.inputs(model))
        for scalars, message in (
            (Scalars(4), "Scalars of 4 layers for a model of 3"),
            (Scalars(3, granularity="mlp"), "granularity mlp, switches of attention"),
            (Scalars(3, width=16), "16 channels for a model of 32"),
        ):
            with pytest.raises(FulldepthError, match=message):
                switches.scalars = scalars
        assert switches.scalars is None


# The numbers by themselves.


def test_only_what_is_left_has_parameters():
    for granularity, left in {"attention": NAMES[2:], "mlp": NAMES[:2], "layer": ()}.items():
        scalars = Scalars(3, [2], granularity)
        assert tuple(scalars.get(1)) == NAMES
        assert tuple(scalars.get(2)) == left
        assert len(list(scalars.parameters())) == 8 + len(left)
        assert all(factor.dtype == torch.float32 and factor == 1 for factor in scalars.parameters())
        assert list(scalars.as_dict()) == (["1", "3"] if granularity == "layer" else ["1", "2", "3"])
    channels = Scalars(2, width=5)
    assert {tuple(factor.shape) for factor in channels.parameters()} == {(5,)}
    assert channels.as_dict()["2"]["s_mlp"] == [1.0] * 5


@given(
    num_layers=st.integers(1, 5),
    granularity=st.sampled_from(GRANULARITIES),
    width=st.sampled_from([None, 1, 3]),
    data=st.data(),
)
def test_a_dictionary_gives_the_same_scalars_back(num_layers, granularity, width, data):
    skipped = data.draw(st.sets(st.integers(1, num_layers)))
    scalars = random_scalars(skipped, granularity, width, num_layers=num_layers)
    mapping = scalars.as_dict()
    again = Scalars.from_dict(mapping, num_layers, granularity)
    assert again.as_dict() == mapping
    assert again.skipped == skipped
    assert again.granularity == granularity
    assert again.width == (width if mapping else None)
    state = scalars.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


WHOLE = dict.fromkeys(NAMES, 1.0)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ([], "are a list"),
        ({"1": WHOLE}, "Layer 2 has the scalars none; expected b_att, s_att, b_mlp, s_mlp, or b_mlp, s_mlp where"),
        ({"1": WHOLE, "2": WHOLE, "3": WHOLE}, "layer '3'; this model has the layers 1 to 2"),
        ({"1": WHOLE, "0": WHOLE}, "layer '0'"),
        ({"1": WHOLE, "2": {"b_att": 1.0, "s_att": 1.0}}, "Layer 2 has the scalars b_att, s_att; expected"),
        ({"1": WHOLE, "2": {**WHOLE, "b": 1.0}}, "Layer 2 has the scalars"),
        ({"1": WHOLE, "2": 3.0}, "Layer 2 has the scalars 3.0"),
        ({"1": WHOLE, "2": {**WHOLE, "s_att": float("nan")}}, "s_att of layer 2 is nan; expected a finite"),
        ({"1": WHOLE, "2": {**WHOLE, "s_att": 1e300}}, "expected a finite"),
        ({"1": WHOLE, "2": {**WHOLE, "s_att": 10**400}}, "expected a finite"),
        ({"1": WHOLE, "2": {**WHOLE, "s_att": "1"}}, "is '1'; expected a number"),
        ({"1": WHOLE, "2": {**WHOLE, "s_att": True}}, "is True; expected a number"),
        ({"1": WHOLE, "2": {**WHOLE, "s_att": []}}, "expected a number"),
        ({"1": WHOLE, "2": {**WHOLE, "s_att": [1.0, 2.0]}}, "different shapes"),
    ],
)
def test_a_dictionary_of_nonsense_is_refused(mapping, message):
    with pytest.raises(FulldepthError, match=message):
        Scalars.from_dict(mapping, 2)


def test_nonsense_is_refused():
    for arguments, message in (
        ((0,), "number of layers is 0"),
        ((3, [4]), "no layer 4"),
        ((3, [], "attn"), "Unknown granularity 'attn'"),
        ((3, [], "mlp", 0), "width is 0"),
        ((3, "12"), "Layers are '12'"),
    ):
        with pytest.raises(FulldepthError, match=message):
            Scalars(*arguments)
    with pytest.raises(FulldepthError, match="no layer 4"):
        Scalars(3).get(4)
