"""Routers and routed projections against the pseudocode of LIME, App. E, written out in float64."""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fulldepth.architectures.depth_llama import memory_depth_llama
from fulldepth.architectures.depth_llama.memory_depth_llama import (
    DynamicRouter,
    StaticRouter,
    normalise,
    route_key_value,
    routed_key_value,
    top_p_mask,
)
from tiny_models import seeded

EPS = 1e-5
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
KINDS = ("static", "dynamic")


def leaf(generator, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


class Case:
    """Random streams, router, norm gain and projections of one layer."""

    def __init__(self, kind, seed=0, batch=2, time=5, heads=3, width=4, sources=4, hidden=8, dtype=torch.float64):
        generator = seeded(seed)
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

    def ours(self, *streams):
        return self.read([normalise(x, EPS) for x in streams or self.streams])

    def read(self, states):
        """Through our router and our projection."""
        if self.kind == "static":
            router, name, arguments = StaticRouter(self.heads, self.sources), "logits", ()
        else:
            router, name = DynamicRouter(self.gain.numel(), self.heads, self.sources), "weight"
            arguments = (states[-1], self.gain)
        weights = torch.func.functional_call(router, {name: self.router}, arguments)
        return routed_key_value(states, weights, self.gain, self.key, self.value, self.heads)

    def outcome(self, run):
        """Keys, values, and the gradients of a random linear function of them for every leaf."""
        outputs = run(*self.streams)
        return [*outputs, *torch.autograd.grad(outputs, self.leaves, self.top)]


@contextmanager
def tiles(size):
    """The smallest tiles, however little memory they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_depth_llama, "SMALLEST_TILE", size)
        patch.setattr(memory_depth_llama, "CPU_TILE_ELEMENTS", 1)
        yield


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
    st.integers(1, 8),
)
def test_outputs_and_gradients_are_the_pseudocodes(kind, seed, sizes, tile):
    case = Case(kind, seed, **sizes)
    with tiles(tile):
        ours = case.outcome(case.ours)
    assert_close(ours, case.outcome(case.pseudocode), **CLOSE)


@settings(max_examples=20)
@given(
    st.integers(0, 2**16),
    st.tuples(*(st.integers(1, most) for most in (4, 3, 7, 4, 5))),
    st.integers(1, 8),
)
def test_routed_heads_are_the_plain_sum(seed, sizes, tile):
    sources, batch, time, heads, width = sizes
    generator = seeded(seed)
    weights = leaf(generator, heads, sources, heads)
    keys, values = ([leaf(generator, batch, time, heads * width) for _ in range(sources)] for _ in range(2))
    plain = [
        torch.einsum("hms,mbtsd->bthd", weights, torch.stack(layers).unflatten(-1, (heads, width))).flatten(2)
        for layers in (keys, values)
    ]
    with tiles(tile):
        ours = route_key_value(keys, values, weights)
        with torch.no_grad():
            assert_close(list(route_key_value(keys, values, weights)), plain, **CLOSE)
        top = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in plain]
        gradients = torch.autograd.grad(ours, [weights, *keys, *values], top)
    assert_close(list(ours), plain, **CLOSE)
    assert_close(gradients, torch.autograd.grad(plain, [weights, *keys, *values], top), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_normalise_is_llamas_norm_without_gain(dtype, generator):
    x = (3 * torch.randn(4, 33, generator=generator)).to(dtype).requires_grad_()
    top = torch.randn(4, 33, generator=generator).to(dtype)
    reference = x.detach().double().requires_grad_()
    expected = reference / (reference.square().mean(-1, keepdim=True) + EPS).sqrt()
    (slope,) = torch.autograd.grad(expected, reference, top.double())
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    found = normalise(x, EPS)
    assert_close(found.double(), expected.detach(), **tolerance)
    assert_close(torch.autograd.grad(found, x, top)[0].double(), slope, **tolerance)
    assert found.dtype == dtype
    assert_close(found, LlamaRMSNorm(33, eps=EPS).to(dtype)(x), **tolerance)


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


def test_a_pruned_static_router_stays_pruned_and_trains_on():
    torch.manual_seed(0)
    router = StaticRouter(5, 6)
    router.logits.data.mul_(20)
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
