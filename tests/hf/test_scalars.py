"""Scalars against the formulas written again in float64, and against other numbers than those they hold."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tiny_models as tm
from fulldepth.errors import FulldepthError
from fulldepth.execution import verify
from fulldepth.hf import GRANULARITIES, Scalars, Switches, anatomy_candidates, skipping

NAMES = ("b_att", "s_att", "b_mlp", "s_mlp")


def anatomy_of(model):
    candidates = anatomy_candidates(model)
    return candidates[0] if len(candidates) == 1 else verify(candidates, tm.inputs(model)).anatomy


def random_scalars(skipped=(), granularity="attention", seed=0, num_layers=3):
    generator = torch.Generator().manual_seed(seed)
    scalars = Scalars(num_layers, skipped, granularity)
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


@pytest.mark.parametrize("skipped", [set(), {1}, {2, 3}])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_model_with_scalars_is_the_formula(name, skipped):
    model, ids = tm.build(name), tm.inputs(tm.build("llama"))["input_ids"]
    scalars = random_scalars(skipped)
    with skipping(anatomy_of(model), skipped, scalars=scalars), torch.no_grad():
        got = model(input_ids=ids).logits
    expected = FORMULAS[name](model, ids.numpy(), numbers(scalars), skipped)
    torch.testing.assert_close(got.double(), torch.from_numpy(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_reach_the_scalars(name):
    """The gradient of the cross-entropy, against finite differences of the formula."""
    skipped = {2}
    model, ids = tm.build(name), tm.inputs(tm.build("llama"))["input_ids"]
    model.requires_grad_(False)
    scalars = random_scalars(skipped)
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
            step = 1e-5
            values = [numbers(scalars) for _ in range(2)]
            values[0][layer][factor] += step
            values[1][layer][factor] -= step
            slope = (formula(values[0]) - formula(values[1])) / (2 * step)
            assert parameter.grad.item() == pytest.approx(slope, rel=2e-3, abs=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "granite", "opt", "falcon"])
def test_factors_of_one_change_no_bit(name, dtype):
    model = tm.build(name, dtype=dtype)
    with torch.no_grad():
        plain = model(**tm.inputs(model)).logits
        for granularity in GRANULARITIES:
            with skipping(anatomy_of(model), [], granularity, Scalars(3, (), granularity)):
                assert torch.equal(model(**tm.inputs(model)).logits, plain)
            with skipping(anatomy_of(model), [2], granularity):
                skipped = model(**tm.inputs(model)).logits
            with skipping(anatomy_of(model), [2], granularity, Scalars(3, [2], granularity)):
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


@pytest.mark.parametrize(("name", "reentrant"), [("llama", True), ("gpt_neox", False)])
def test_gradient_checkpointing_changes_nothing(name, reentrant):
    model = tm.build(name)
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


def test_scalars_for_another_set_are_refused():
    """When the model runs, since skipped layers and scalars are set one after the other; of another shape at once."""
    model = tm.build("llama")
    with Switches(anatomy_of(model)) as switches:
        switches.scalars = Scalars(3, [2])
        for skipped, works in (((), False), ([2], True), ([3], False)):
            switches.skip(skipped)
            if works:
                model(**tm.inputs(model))
            else:
                with pytest.raises(FulldepthError, match="Layer 2"):
                    model(**tm.inputs(model))
        switches.scalars = None
        model(**tm.inputs(model))
        for scalars in (Scalars(4), Scalars(3, granularity="mlp")):
            with pytest.raises(FulldepthError, match="Scalars of"):
                switches.scalars = scalars


# The numbers by themselves.


@pytest.mark.parametrize(("granularity", "left"), [("attention", NAMES[2:]), ("mlp", NAMES[:2]), ("layer", ())])
def test_a_dictionary_gives_the_same_scalars_back(granularity, left):
    scalars = random_scalars({2}, granularity)
    assert (tuple(scalars.get(1)), tuple(scalars.get(2))) == (NAMES, left)
    assert {factor.dtype for factor in scalars.parameters()} == {torch.float32}
    again = Scalars.from_dict(scalars.as_dict(), 3, granularity)
    assert (again.as_dict(), again.skipped) == (scalars.as_dict(), {2})


@pytest.mark.parametrize(
    "second",
    [
        None,
        {},
        {"b_att": 1.0, "s_att": 1.0},
        {"b": 1.0},
        3.0,
        *({"s_att": value} for value in (np.nan, "1", [], [1.0])),
    ],
)
def test_a_dictionary_of_nonsense_is_refused(second):
    whole = dict.fromkeys(NAMES, 1.0)
    added = isinstance(second, dict) and len(second) == 1
    mapping = {"1": whole} | ({} if second is None else {"2": whole | second if added else second})
    for wrong, layers in ((mapping, 2), ([], 2), ({"1": whole, "2": whole}, 1)):
        with pytest.raises(FulldepthError):
            Scalars.from_dict(wrong, layers)
