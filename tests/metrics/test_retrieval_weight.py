"""Retrieval weights (LIME, Eq. 1, Fig. 2 and 3), against plain loops over tokens, heads and sources."""

import math

import numpy as np
import pytest
import torch

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
