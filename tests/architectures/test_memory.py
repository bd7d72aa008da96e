"""Routers and routed projections against the pseudocode of LIME, App. E, written out in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding

from fulldepth.architectures.depth_llama import routing_depth_llama
from fulldepth.architectures.depth_llama.memory_depth_llama import (
    DynamicRouter,
    KeyValueRouter,
    StaticRouter,
    normalise,
    route_key_value,
    routed_key_value,
    top_p_mask,
)

EPS = 1e-5
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
KINDS = ("static", "dynamic")


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles of tokens even in tiny tensors, the last one shorter."""
    monkeypatch.setattr(routing_depth_llama, "SMALLEST_TILE", 4)
    monkeypatch.setattr(routing_depth_llama, "CPU_TILE_ELEMENTS", 1)
    monkeypatch.setattr(routing_depth_llama, "DEVICE_TILE_ELEMENTS", 1)


def leaf(generator, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


class Case:
    """Random streams, router, norm gain and projections of one layer."""

    def __init__(self, kind, seed=0, batch=2, time=5, heads=3, width=4, sources=4, hidden=8, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        self.kind, self.heads, self.sources = kind, heads, sources
        self.streams = [leaf(generator, batch, time, hidden, dtype=dtype) for _ in range(sources)]
        shape = (heads, sources) if kind == "static" else (heads * sources, hidden)
        self.router, self.gain = leaf(generator, *shape, dtype=dtype), leaf(generator, hidden, dtype=dtype)
        self.key, self.value = (leaf(generator, heads * width, hidden, dtype=dtype) for _ in range(2))
        self.top = [torch.randn(batch, time, heads * width, generator=generator).to(dtype) for _ in range(2)]
        self.leaves = [*self.streams, self.router, self.gain, self.key, self.value]

    def pseudocode(self, *streams):
        """LIMELayer, Router and LIMEAttentionProjection of App. E; keys and values as `[B, T, H d_h]`."""
        stacked = torch.stack(streams or self.streams)
        past = self.gain * (stacked / (stacked.square().mean(-1, keepdim=True) + EPS).sqrt())
        if self.kind == "static":
            mixtures = torch.einsum("rl,lbtd->brtd", self.router.softmax(-1), past)
        else:
            logits = (past[-1] @ self.router.T).view(*past.shape[1:3], self.heads, self.sources)
            mixtures = torch.einsum("btrl,lbtd->brtd", logits.softmax(-1), past)
        projections = (w.view(1, self.heads, -1, w.shape[1]).transpose(2, 3) for w in (self.key, self.value))
        return [(mixtures @ w).transpose(1, 2).flatten(2) for w in projections]

    def ours(self, *streams, chunk=None):
        return self.read([normalise(x, EPS) for x in streams or self.streams], chunk)

    def read(self, states, chunk=None):
        """Through our router and our projection."""
        if self.kind == "static":
            router, name, arguments = StaticRouter(self.heads, self.sources), "logits", ()
        else:
            router, name = DynamicRouter(self.gain.numel(), self.heads, self.sources), "weight"
            arguments = (states[-1], self.gain)
        weights = torch.func.functional_call(router, {name: self.router}, arguments)
        return routed_key_value(states, weights, self.gain, self.key, self.value, self.heads, chunk)

    def outcome(self, run):
        """Keys, values, and the gradients of a random linear function of them for every leaf."""
        outputs = run(*self.streams)
        return [*outputs, *torch.autograd.grad(outputs, self.leaves, self.top)]


@settings(max_examples=20)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**16),
    st.fixed_dictionaries(
        {
            name: st.integers(1, most)
            for name, most in dict(batch=3, time=7, heads=4, width=5, sources=5, hidden=9).items()
        }
    ),
    st.none() | st.integers(1, 5),
    st.integers(1, 8),
)
def test_outputs_and_gradients_are_the_pseudocodes(kind, seed, sizes, chunk, tile):
    case = Case(kind, seed, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing_depth_llama, "SMALLEST_TILE", tile)
        patch.setattr(routing_depth_llama, "CPU_TILE_ELEMENTS", 1)
        ours = case.outcome(lambda *streams: case.ours(*streams, chunk=chunk))
    torch.testing.assert_close(ours, case.outcome(case.pseudocode), **CLOSE)


@pytest.mark.parametrize("time", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_the_gain_scales_what_is_smaller(kind, time):
    """2 x `time` tokens of 2 x 3 channels a head: below 6 tokens mixtures are scaled, from 6 on projections."""
    case = Case(kind, time=time, heads=3, width=3, sources=4, hidden=8)
    scaled = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._opname == "mul" and args[0].dim() == 3 and args[1].shape == case.gain.shape:
                scaled.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():
        found = case.ours(chunk=1)
    torch.testing.assert_close(list(found), case.pseudocode(), **CLOSE)
    torch.testing.assert_close(list(found), list(case.ours(chunk=1)), **CLOSE)  # as with gradients
    assert scaled == [min(2 * time * 3 * 8, 2 * 3 * 3 * 8)]


@settings(max_examples=20)
@given(
    st.integers(0, 2**16),
    st.tuples(*(st.integers(1, most) for most in (4, 3, 7, 4, 5))),
    st.integers(1, 8),
)
def test_routed_heads_are_the_plain_sum(seed, sizes, tile):
    sources, batch, time, heads, width = sizes
    generator = torch.Generator().manual_seed(seed)
    weights = leaf(generator, heads, sources, heads)
    keys, values = ([leaf(generator, batch, time, heads * width) for _ in range(sources)] for _ in range(2))
    plain = [
        torch.einsum("hms,mbtsd->bthd", weights, torch.stack(layers).unflatten(-1, (heads, width))).flatten(2)
        for layers in (keys, values)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing_depth_llama, "SMALLEST_TILE", tile)
        patch.setattr(routing_depth_llama, "CPU_TILE_ELEMENTS", 1)
        ours = route_key_value(keys, values, weights)
        with torch.no_grad():
            torch.testing.assert_close(list(route_key_value(keys, values, weights)), plain, **CLOSE)
        top = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in plain]
        gradients = torch.autograd.grad(ours, [weights, *keys, *values], top)
    torch.testing.assert_close(list(ours), plain, **CLOSE)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, [weights, *keys, *values], top), **CLOSE)


def test_a_bias_is_added_once():
    case, generator = Case("static"), torch.Generator().manual_seed(1)
    biases = [leaf(generator, 12) for _ in range(2)]
    states, weights = [normalise(x, EPS) for x in case.streams], case.router.softmax(-1)
    bare = routed_key_value(states, weights, case.gain, case.key, case.value, 3)
    ours = routed_key_value(states, weights, case.gain, case.key, case.value, 3, None, *biases)
    for found, plain, bias in zip(ours, bare, biases, strict=True):
        torch.testing.assert_close(found, plain + bias, **CLOSE)
        gradient = torch.autograd.grad(found.sum(), bias, retain_graph=True)[0]
        torch.testing.assert_close(gradient, torch.full_like(bias, 10.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalise_is_llamas_norm_without_gain(dtype, generator):
    x = (3 * torch.randn(4, 33, generator=generator)).to(dtype).requires_grad_()
    top = torch.randn(4, 33, generator=generator).to(dtype)
    reference = x.detach().double().requires_grad_()
    expected = reference / (reference.square().mean(-1, keepdim=True) + EPS).sqrt()
    (slope,) = torch.autograd.grad(expected, reference, top.double())
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    found = normalise(x, EPS)
    torch.testing.assert_close(found.double(), expected.detach(), **tolerance)
    torch.testing.assert_close(torch.autograd.grad(found, x, top)[0].double(), slope, **tolerance)
    assert found.dtype == dtype
    torch.testing.assert_close(found, LlamaRMSNorm(33, eps=EPS).to(dtype)(x), **tolerance)


def errors(found, exact):
    """Of each tensor, relative to its norm."""
    return [
        float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_as_good_as_the_pseudocodes(kind, way, small_tiles):
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    sizes = {"time": 24, "heads": 4, "width": 8, "sources": 5, "hidden": 32, "dtype": dtype}
    case, exact = Case(kind, **sizes), Case(kind, **sizes)
    for mine, theirs in zip(exact.leaves, case.leaves, strict=True):
        mine.data = theirs.data.double()
    exact.top = [x.double() for x in case.top]
    case.top = [x.bfloat16() for x in case.top]
    truth = exact.outcome(exact.pseudocode)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        ours, plain = case.outcome(lambda *x: case.ours(*x, chunk=1)), case.outcome(case.pseudocode)
        with torch.no_grad():
            few = case.ours(*(x[:, :4] for x in case.streams))  # 8 tokens, 8 channels a head
    assert [x.dtype for x in ours] == [torch.bfloat16] * 2 + [dtype] * len(case.leaves)
    assert [x.dtype for x in few] == [torch.bfloat16] * 2
    for found, theirs in zip(errors(ours, truth), errors(plain, truth), strict=True):
        assert found < 1.5 * theirs + 2**-9
    start = [[x[:, :4] for x in pair[:2]] for pair in (truth, plain)]
    for found, theirs in zip(errors(few, start[0]), errors(start[1], start[0]), strict=True):
        assert found < 1.5 * theirs + 2**-9


def test_autocast_keeps_float64_and_a_linear_maps_types():
    case = Case("static")
    with torch.autocast("cpu", torch.bfloat16):
        assert [x.dtype for x in case.outcome(case.ours)] == [torch.float64] * (2 + len(case.leaves))
        heads = [torch.ones(1, 2, 4, requires_grad=True)]
        keys, values = route_key_value(heads, heads, torch.ones(2, 1, 2))
        assert keys.dtype == values.dtype == torch.bfloat16
        assert normalise(heads[0], EPS).dtype == torch.bfloat16
        with torch.no_grad():
            assert [x.dtype for x in case.ours()] == [torch.float64] * 2
            assert [x.dtype for x in route_key_value(heads, heads, torch.ones(2, 1, 2))] == [torch.bfloat16] * 2
            assert normalise(heads[0], EPS).dtype == torch.bfloat16


@pytest.mark.parametrize(("grouped", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_identity_is_llamas_attention_to_the_bit(grouped, dtype, generator):
    heads = 4 // grouped
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=heads, attn_implementation="eager")
    attention = LlamaAttention(config, layer_idx=0).to(dtype)
    x = torch.randn(2, 7, 32, generator=generator).to(dtype)
    rotary = LlamaRotaryEmbedding(config)(x, torch.arange(7)[None])
    expected, _ = attention(x, rotary)
    router = KeyValueRouter(heads, 3).to(dtype)
    older = [torch.randn(2, 2, 7, heads * 8, generator=generator).to(dtype) for _ in range(2)]
    keys, values = route_key_value([*older[0], attention.k_proj(x)], [*older[1], attention.v_proj(x)], router())
    for projection, routed in ((attention.k_proj, keys), (attention.v_proj, values)):
        projection.register_forward_hook(lambda _module, _args, _output, routed=routed: routed)
    found, _ = attention(x, rotary)
    assert torch.equal(found, expected)


def saved_bytes(run, parameters=()):
    """Bytes of all storages but the parameters' that a forward pass keeps for backward, each counted once."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor  # keeps the storage, so that its address stays its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run()
    assert outputs
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in held.items() if place not in known)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_for_backward_is_a_tenth_of_the_pseudocodes(kind):
    layers, tokens, hidden = 16, 2 * 128, 256
    sizes = {"batch": 2, "time": 128, "heads": layers, "width": 16, "hidden": hidden, "dtype": torch.float32}
    cases = [Case(kind, sources=r, **sizes) for r in range(2, layers + 1)]
    streams = cases[-1].streams
    parameters = [leaf for case in cases for leaf in case.leaves[case.sources :]]

    # Squares, so that keys and values are kept too, as attention keeps them.
    def ours():
        states = [normalise(x, EPS) for x in streams]
        return [output.square() for case in cases for output in case.read(states[: case.sources])]

    def plain():
        return [output.square() for case in cases for output in case.pseudocode(*streams[: case.sources])]

    kept = saved_bytes(ours, parameters)
    assert kept < saved_bytes(plain, parameters) / 10
    # The normalised states once, keys and values of every layer, what does not grow with B T D: nothing else.
    mixtures = sum(layers * r * (tokens if kind == "dynamic" else 1) for r in range(2, layers + 1))
    routers = sum(layers * r * hidden for r in range(2, layers + 1)) if kind == "dynamic" else 0
    assert kept <= 4 * ((layers + 2 * (layers - 1)) * tokens * hidden + layers * tokens + mixtures + routers)


@pytest.mark.parametrize("layers", [4, 8])
def test_routed_heads_keep_memory_linear_in_the_depth(layers):
    def run():
        generator = torch.Generator().manual_seed(0)
        keys, values = ([leaf(generator, 2, 16, 32) for _ in range(layers)] for _ in range(2))
        routed = [route_key_value(keys[:r], values[:r], leaf(generator, 4, r, 4)) for r in range(2, layers + 1)]
        return routed, keys, values

    unit, weights = 2 * 16 * 32 * 8, sum(8 * 16 * r for r in range(2, layers + 1))
    assert saved_bytes(run) <= 2 * layers * unit + weights


def smallest_sets(weights, p):
    """All smallest subsets of one head's weights whose sum exceeds p, by trying every subset."""
    for size in range(1, len(weights) + 1):
        found = [
            kept
            for kept in itertools.combinations(range(len(weights)), size)
            if math.fsum(weights[i] for i in kept) > p
        ]
        if found:
            # Of the subsets of one size the paper's takes the largest weights.
            best = max(math.fsum(weights[i] for i in kept) for kept in found)
            return [set(kept) for kept in found if math.fsum(weights[i] for i in kept) >= best - 1e-12]
    return [set(range(len(weights)))]


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=7, max_size=7).filter(any), min_size=1, max_size=3),
    st.sampled_from([0.1, 0.35, 0.501, 0.75, 0.9, 0.999]),
)
def test_top_p_is_the_best_of_all_subsets(counts, p):
    weights = torch.tensor(counts, dtype=torch.float64)
    weights = weights / weights.sum(-1, keepdim=True)
    for row, mask in zip(weights.tolist(), top_p_mask(weights, p), strict=True):
        if min(abs(sum(sorted(row)[-k:]) - p) for k in range(1, 8)) > 1e-9:  # no tie with p itself
            assert set(mask.nonzero().flatten().tolist()) in smallest_sets(row, p)


def test_exactly_p_does_not_exceed_it_and_equal_weights_keep_the_earlier():
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert top_p_mask(weights, 0.5).tolist() == [[True, True, False], [True, False, True], [False, True, False]]
    assert top_p_mask(weights, 1.0).all()


def test_a_pruned_static_router_stays_pruned_and_trains_on(tmp_path):
    torch.manual_seed(0)
    router = StaticRouter(5, 6)
    with torch.no_grad():
        router.logits.mul_(20)
    share = router.prune(0.8)
    after = router().detach()
    assert 0 < share < 1
    assert share == pytest.approx(float((after == 0).double().mean()))
    zeros, optimiser = after == 0, torch.optim.AdamW(router.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        (router() * torch.arange(6.0)).sum().backward()
        nn.utils.clip_grad_norm_(router.parameters(), 1.0)
        optimiser.step()
    assert torch.equal(router() == 0, zeros)
    assert not torch.allclose(router(), after)
    assert router.prune(1.0) == pytest.approx(share), "p = 1 prunes nothing more"
    torch.save(router.state_dict(), tmp_path / "router.pt")
    other = StaticRouter(5, 6)
    other.load_state_dict(torch.load(tmp_path / "router.pt", weights_only=True))
    assert torch.equal(other(), router())


def test_starts():
    torch.manual_seed(0)
    static, dynamic = StaticRouter(64, 200), DynamicRouter(100, 8, 20)
    assert float(static.logits.detach().std()) == pytest.approx(0.1, rel=0.03)
    dynamic.reset_parameters(0.05)
    assert float(dynamic.weight.detach().std()) == pytest.approx(0.05, rel=0.03)
    public, bound = KeyValueRouter(16, 9, init="public").weight.detach(), math.sqrt(3 / (9 * 16))
    assert torch.equal(public[:, -1], torch.eye(16))
    older = public[:, :-1]
    assert 0.99 * bound < float(older.max()) <= bound
    assert -bound <= float(older.min()) < -0.99 * bound
    assert float(older.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
    # What a checkpoint brought is not drawn again.
    for router in (static, dynamic, KeyValueRouter(2, 3, init="public")):
        (parameter,) = router.parameters()
        before, parameter._is_hf_initialized = parameter.detach().clone(), True
        router.reset_parameters(0.02)
        assert torch.equal(parameter, before)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: StaticRouter(2, 3).prune(0.0), "top-p"),
        (lambda: DynamicRouter(4, 2, 3).prune(1.1), "top-p"),
        (lambda: DynamicRouter(4, 2, 3, top_p=math.nan), "top-p"),
        (lambda: KeyValueRouter(2, 3).prune(0.9), "linear"),
        (lambda: KeyValueRouter(2, 3, init="ones"), "public"),
    ],
)
def test_what_routers_refuse(make, word):
    with pytest.raises(ValueError, match=word):
        make()
