"""E[m|r] (LIME, Eq. 2), in closed form and by loops over query heads, each with the router of its group."""

import math

import numpy as np
import pytest
import torch

from fulldepth.metrics import ExpectedRetrieval, expected_retrieval, head_shares


def by_loops(weights, shares):
    """sum_h p(h) sum_m p(m|h) m of weights [H_kv][r] and shares [H]."""
    group = len(shares) // len(weights)
    return math.fsum(
        share * chance * m for h, share in enumerate(shares) for m, chance in enumerate(weights[h // group])
    )


@pytest.mark.parametrize(("kv_heads", "heads"), [(1, 1), (4, 4), (2, 4), (2, 6), (1, 5)])
def test_against_loops(kv_heads, heads, generator):
    weights = torch.rand(3, kv_heads, 5, generator=generator, dtype=torch.float64).softmax(-1)
    shares = torch.rand(heads, generator=generator, dtype=torch.float64).softmax(0)
    found = expected_retrieval(weights, shares)
    np.testing.assert_allclose(found, [by_loops(w, shares.tolist()) for w in weights.tolist()], rtol=1e-12)


def test_heads_count_by_the_norm_of_their_slice(generator):
    w_o = torch.randn(6, 4 * 3, generator=generator)
    w_o[:, 3:6] *= 7
    norms = [
        math.sqrt(math.fsum(x * x for x in w_o[:, 3 * h : 3 * h + 3].double().flatten().tolist())) for h in range(4)
    ]
    np.testing.assert_allclose(head_shares(w_o, 4), np.array(norms) / math.fsum(norms), rtol=1e-12)
    assert float(head_shares(w_o, 4).sum()) == pytest.approx(1)


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_loops(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    positions, expected = list(world.positions()), {}
    for layer, routing in world.coefficients["routing"].items():
        shares = world.setup().head_shares[layer - 1]
        if routing.ndim == 4:
            tokens = [routing[n, t].double().numpy() for n, t in positions]
        else:
            tokens = [np.abs(routing.double().numpy()).sum(-1)]
        values = [by_loops((token / token.sum(-1, keepdims=True)).tolist(), shares) for token in tokens]
        expected["routing", layer, None, "value"] = (np.mean(values), len(positions))
    expect(any_split(ExpectedRetrieval, world), expected)
