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


def test_closed_forms():
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    newest = torch.eye(6)[5].expand(2, 6)
    assert float(expected_retrieval(newest, shares)) == pytest.approx(5)  # attention without a memory: r - 1
    assert float(expected_retrieval(torch.full((2, 6), 1 / 6), shares)) == pytest.approx(2.5)
    apart = torch.stack([torch.eye(6)[0], torch.eye(6)[5]])  # the first two query heads read the embeddings
    assert float(expected_retrieval(apart, shares)) == pytest.approx(0.7 * 5)


def test_heads_count_by_the_norm_of_their_slice(generator):
    w_o = torch.randn(6, 4 * 3, generator=generator)
    w_o[:, 3:6] *= 7
    norms = [
        math.sqrt(math.fsum(x * x for x in w_o[:, 3 * h : 3 * h + 3].double().flatten().tolist())) for h in range(4)
    ]
    np.testing.assert_allclose(head_shares(w_o, 4), np.array(norms) / math.fsum(norms), rtol=1e-12)
    assert float(head_shares(w_o, 4).sum()) == pytest.approx(1)


def test_refusals():
    with pytest.raises(ValueError, match=r"w_o must be \[D, H d_h\] with H = 5 heads, got shape \(6, 12\)"):
        head_shares(torch.ones(6, 12), 5)
    with pytest.raises(ValueError, match=r"H a multiple of H_kv, got \(2, 3\) and \(5,\)"):
        expected_retrieval(torch.ones(2, 3), torch.ones(5))


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
