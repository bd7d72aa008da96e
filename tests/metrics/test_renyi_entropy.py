"""Matrix-based Renyi entropy (LIME, Sec. 5.3), against numpy.linalg.eigvalsh and closed forms."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.stats import entropy as shannon

from fulldepth.metrics import RenyiEntropy, renyi_entropy


def oracle(z, alpha):
    """One sequence: z [T, D], from the T x T Gram."""
    z = np.asarray(z, np.float64)
    p = np.linalg.eigvalsh(z @ z.T).clip(min=0)
    p = p / p.sum()
    p = p[p > 1e-14]
    return shannon(p) if alpha == 1 else math.log(np.sum(p**alpha)) / (1 - alpha)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (1, 5)])
def test_against_numpy_whichever_side_is_longer(shape, alpha, generator):
    z = torch.randn(2, 3, *shape, generator=generator)
    expected = [[oracle(each, alpha) for each in row] for row in z]
    np.testing.assert_allclose(renyi_entropy(z.double(), alpha), expected, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float32):
        rounded = z.to(dtype)
        expected = [[oracle(each, alpha) for each in row] for row in rounded.double()]
        np.testing.assert_allclose(renyi_entropy(rounded, alpha), expected, atol=1e-5)


def test_rows_against_numpy_per_sequence(world, any_split):
    rows = any_split(RenyiEntropy, world, rtol=1e-5, atol=1e-6)
    plain = {key: row for key, row in rows.items() if key[3].startswith("mean:plain:")}
    alphas = {key[3].split(":")[2] for key in plain}
    assert "1" in alphas
    count = {"residual": world.layers + 1, "value": world.layers}
    lengths = world.mask.sum(1).tolist()
    seen = set()
    for (site, layer, other, statistic), row in plain.items():
        states = world.states[site]
        h = states[layer if site == "residual" else layer - 1]
        alpha = float(statistic.split(":")[2])
        expected = np.mean([oracle(h[n, :length], alpha) for n, length in enumerate(lengths)])
        assert row.value == pytest.approx(expected, abs=1e-5), (site, layer, statistic)
        assert (other, row.count, row.unit) == (None, 12, "nats")
        seen.add((site, layer, statistic.split(":")[2]))
    first = {"residual": 0, "value": 1}
    assert seen == {(s, first[s] + n, a) for s in count for n in range(count[s]) for a in alphas}


def test_a_cap_takes_the_same_sequences_whatever_the_batching(world, same_rows):
    world = world.replace(options={"entropy_sequences": 5})
    expected = world.rows(RenyiEntropy)
    assert {row.count for row in expected.values()} == {5}
    same_rows(world.rows(RenyiEntropy, (1,) * 12), expected, rtol=1e-5, atol=1e-6)
    same_rows(world.rows(RenyiEntropy, (5, 1, 4, 2), order=range(11, -1, -1)), expected, rtol=1e-5, atol=1e-6)
    other = world.rows(RenyiEntropy, options={"seed": 3})
    assert any(other[key].value != row.value for key, row in expected.items())


def test_standard_error_over_the_sampled_sequences(invented):
    """Twenty sequences, or a sample of five, each its own cluster: the error of a mean."""
    world = invented(lengths=(7,) * 20)
    for options in ({}, {"entropy_sequences": 5}):
        rows = world.replace(options=options).rows(RenyiEntropy, (3, 1, 9, 7))
        chosen = RenyiEntropy(world.setup(**options)).chosen.tolist()
        assert len(chosen) == options.get("entropy_sequences", 20)
        for alpha in (0.5, 1.0, 2.0):
            values = [oracle(world.states["residual"][2, n], alpha) for n in chosen]
            expected = scipy.stats.sem(values)
            row = rows["residual", 2, None, f"standard_error:plain:{alpha:g}"]
            assert (row.value, row.count) == (pytest.approx(expected, rel=1e-4), len(values))
