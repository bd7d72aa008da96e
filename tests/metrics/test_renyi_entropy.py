"""Matrix-based Renyi entropy (LIME, Sec. 5.3), against numpy.linalg.eigvalsh and closed forms."""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy as shannon
from scipy.stats import ortho_group

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


@pytest.mark.parametrize("alpha", [0.5, 1, 2])
def test_closed_forms(alpha, generator):
    orthogonal = torch.linalg.qr(torch.randn(8, 5, generator=generator, dtype=torch.float64))[0]
    assert renyi_entropy(orthogonal.T, alpha).item() == pytest.approx(math.log(5), abs=1e-9)
    line = torch.outer(torch.arange(1.0, 7), torch.randn(4, generator=generator)).double()
    assert renyi_entropy(line, alpha).item() == pytest.approx(0, abs=1e-6)
    unequal = torch.diag(torch.tensor([3.0, 1.0, 0.0])).sqrt()
    p = np.array([0.75, 0.25])
    expected = shannon(p) if alpha == 1 else math.log((p**alpha).sum()) / (1 - alpha)
    assert renyi_entropy(unequal, alpha).item() == pytest.approx(expected, abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 7), st.floats(1e-3, 1e3))
def test_properties(seed, length, width, scale):
    rng = np.random.default_rng(seed)
    z = torch.tensor(rng.normal(size=(length, width)) + 1)
    rotation = torch.tensor(ortho_group.rvs(width, random_state=rng)) if width > 1 else -torch.ones(1, 1).double()
    by_alpha = [renyi_entropy(z, alpha).item() for alpha in (0.5, 0.999999, 1, 1.000001, 2)]
    assert by_alpha[-1] >= -1e-9
    assert by_alpha[0] <= math.log(min(length, width)) + 1e-6
    assert all(a >= b - 1e-7 for a, b in pairwise(by_alpha)), "never rises with alpha"
    assert by_alpha[1] == pytest.approx(by_alpha[3], abs=1e-4), "alpha = 1 is the limit"
    assert renyi_entropy(scale * z @ rotation).item() == pytest.approx(by_alpha[2], abs=1e-7)
    order = torch.tensor(rng.permutation(length))
    assert renyi_entropy(z[order]).item() == pytest.approx(by_alpha[2], abs=1e-7)


def test_a_shift_collapses_the_plain_form(generator):
    z = torch.randn(9, 4, generator=generator)
    assert renyi_entropy(z + 50).item() < 0.1 * renyi_entropy(z).item()


def test_an_unknown_preset_is_refused(generator):
    with pytest.raises(ValueError, match="plain"):
        renyi_entropy(torch.randn(4, 3, generator=generator), preset="plein")


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


def test_a_model_without_value_states_has_its_residual_rows(world):
    without = world.replace(states={k: v for k, v in world.states.items() if k != "value"})
    rows, whole = without.rows(RenyiEntropy), world.rows(RenyiEntropy)
    assert rows == {key: row for key, row in whole.items() if key[0] == "residual"}


def test_a_cap_takes_the_same_sequences_whatever_the_batching(world, same_rows):
    world = world.replace(options={"entropy_sequences": 5})
    expected = world.rows(RenyiEntropy)
    assert {row.count for row in expected.values()} == {5}
    same_rows(world.rows(RenyiEntropy, (1,) * 12), expected, rtol=1e-5, atol=1e-6)
    same_rows(world.rows(RenyiEntropy, (5, 1, 4, 2), order=range(11, -1, -1)), expected, rtol=1e-5, atol=1e-6)
    other = world.rows(RenyiEntropy, options={"seed": 3})
    assert any(other[key].value != row.value for key, row in expected.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64, 40), (40, 64), (1, 40), (64, 1)])
def test_order_two_without_eigenvalues(shape, dtype, generator):
    """-log sum p^2 of the eigenvalues, with an outlier of 165 times the norm, a zero token, and tiny or huge states."""
    z = torch.randn(shape, generator=generator)
    z[0] *= 165
    z[-1] = 0 if len(z) > 1 else z[-1]
    for scale in (1e-18, 1, 1e18):
        rounded = (scale * z).to(dtype)
        p = np.linalg.svd(rounded.double().numpy(), compute_uv=False) ** 2
        expected = -math.log(np.sum((p / p.sum()) ** 2))
        assert renyi_entropy(rounded, 2).item() == pytest.approx(expected, abs=4e-15)
    assert renyi_entropy(torch.zeros(shape), 2).isnan()
    assert renyi_entropy(z * torch.nan, 2).isnan()


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
