"""Retrieval weights (LIME, Eq. 1, Fig. 2 and 3), against plain loops over tokens, heads and sources."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulldepth.metrics import RetrievalWeight, retrieval_share, retrieval_weight


def by_loops(tokens):
    """(mass, share), each [H][r], of a list of tokens' weights: [H][r] or, between heads, [H][r][H]."""
    heads, sources = len(tokens[0]), len(tokens[0][0])
    mass = [[0.0] * sources for _ in range(heads)]
    share = [[0.0] * sources for _ in range(heads)]
    for token in tokens:
        for h in range(heads):
            parts = [token[h][m] if isinstance(token[h][m], list) else [token[h][m]] for m in range(sources)]
            whole = math.fsum(abs(value) for part in parts for value in part)
            for m in range(sources):
                mass[h][m] += math.fsum(parts[m]) / len(tokens)
                share[h][m] += math.fsum(map(abs, parts[m])) / whole / len(tokens)
    return np.array(mass), np.array(share)


SHAPES = {"static": (3, 4), "dynamic": (2, 5, 3, 4), "kv": (3, 4, 3)}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_against_loops(kind, dtype, generator):
    routing = torch.randn(SHAPES[kind], generator=generator).to(dtype)
    plain = routing.double()
    tokens = plain.flatten(0, 1).tolist() if kind == "dynamic" else [plain.tolist()]
    mass, share = by_loops(tokens)
    np.testing.assert_allclose(retrieval_weight(routing), mass, rtol=1e-12)
    np.testing.assert_allclose(retrieval_share(routing), share, rtol=1e-12)
    np.testing.assert_allclose(retrieval_share(routing).sum(-1), 1, rtol=1e-12)


def test_only_counted_tokens_are_averaged(generator):
    routing = torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64)
    counted = torch.tensor([[True, False, True, False, False], [False, True, False, False, False]])
    mass, share = by_loops([routing[b, t].tolist() for b, t in ((0, 0), (0, 2), (1, 1))])
    np.testing.assert_allclose(retrieval_weight(routing, counted), mass, rtol=1e-12)
    np.testing.assert_allclose(retrieval_share(routing, counted), share, rtol=1e-12)


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_properties(seed, scale):
    rng = np.random.default_rng(seed)
    weights = torch.tensor(rng.normal(size=(3, 4, 3)))
    np.testing.assert_allclose(retrieval_share(-scale * weights), retrieval_share(weights), rtol=1e-9)
    np.testing.assert_allclose(retrieval_weight(scale * weights), scale * retrieval_weight(weights), rtol=1e-9)
    mixture = weights[..., 0].softmax(-1)
    np.testing.assert_allclose(retrieval_share(mixture), retrieval_weight(mixture), rtol=1e-12)


@pytest.mark.parametrize(
    ("routing", "counted", "message"),
    [
        (torch.ones(3), None, r"routing must be .* got shape \(3,\)"),
        (torch.ones(1, 1, 1, 1, 1), None, "routing must be"),
        (torch.ones(2, 5, 3, 4), torch.ones(2, 4, dtype=torch.bool), r"counted must be \(2, 5\), got \(2, 4\)"),
    ],
)
def test_refusals(routing, counted, message):
    with pytest.raises(ValueError, match=message):
        retrieval_weight(routing, counted)


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_loops(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    expected = {}
    positions = list(world.positions())
    for layer, routing in world.coefficients["routing"].items():
        plain = routing.double()
        tokens = [plain[n, t].tolist() for n, t in positions] if routing.ndim == 4 else [plain.tolist()]
        for statistic, heads in zip(("mean", "share"), by_loops(tokens), strict=True):
            for source in range(layer):
                expected["routing", layer, source, statistic] = (heads[:, source].mean(), len(positions))
            for head in range(2):
                expected[f"head_{head}", layer, layer - 1, statistic] = (heads[head, layer - 1], len(positions))
    assert {routing.ndim for routing in world.coefficients["routing"].values()} == {3, 4}
    expect(any_split(RetrievalWeight, world), expected)


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (2, 4, 2), (12, 9, 2, 2)])
def test_a_router_of_other_sources_or_heads_is_refused(world, shape):
    world = world.replace(coefficients={"routing": {3: torch.ones(shape)}})
    with pytest.raises(ValueError, match=r"the router of layer 3 gives \d heads and \d sources, expected 2 and 3"):
        world.rows(RetrievalWeight)
