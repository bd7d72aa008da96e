"""Linear CKA (aligned training, Eq. 3) and its unbiased form, against the textbook estimators."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ortho_group

from fulldepth.metrics import Cka, cka_matrix, linear_cka


def hsic_1(k, n):
    """Unbiased HSIC of two Gram matrices with zeroed diagonals (Song et al., 2012), as written."""
    k_bar, l_bar = k
    one = np.ones(n)
    cross = np.trace(k_bar @ l_bar)
    product = (one @ k_bar @ one) * (one @ l_bar @ one) / ((n - 1) * (n - 2))
    return (cross + product - 2 / (n - 2) * (one @ k_bar @ l_bar @ one)) / (n * (n - 3))


def oracle(x, y, debiased):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not debiased:
        x, y = x - x.mean(0), y - y.mean(0)
        return np.sum((y.T @ x) ** 2) / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    grams = [g - np.diag(np.diag(g)) for g in (x @ x.T, y @ y.T)]
    xy, xx, yy = (hsic_1((grams[i], grams[j]), len(x)) for i, j in ((0, 1), (0, 0), (1, 1)))
    return xy / np.sqrt(xx * yy)


@pytest.mark.parametrize("debiased", [True, False])
@pytest.mark.parametrize(("n", "d", "e"), [(40, 6, 9), (12, 30, 5)])
def test_against_the_textbook(n, d, e, debiased, generator):
    x = torch.randn(n, d, generator=generator)
    y = x @ torch.randn(d, e, generator=generator) + torch.randn(n, e, generator=generator)
    assert float(linear_cka(x, y, debiased=debiased)) == pytest.approx(oracle(x, y, debiased), rel=1e-9)
    for dtype in (torch.float16, torch.bfloat16):
        a, b = x.to(dtype), y.to(dtype)
        expected = oracle(a.double(), b.double(), debiased)
        assert float(linear_cka(a, b, debiased=debiased)) == pytest.approx(expected, rel=1e-9)


def test_independent_features_are_unlike_only_for_the_debiased_estimate(generator):
    for n, biased in ((64, 0.92), (1024, 0.43)):
        x, y = torch.randn(2, n, 768, generator=generator)
        assert float(linear_cka(x, y)) == pytest.approx(biased, abs=0.01)
        assert abs(float(linear_cka(x, y, debiased=True))) < 0.05


@pytest.mark.parametrize("debiased", [True, False])
def test_a_large_common_mean_does_not_break_float32(debiased, generator):
    x = torch.randn(128, 256, generator=generator)
    y = x + 0.5 * torch.randn(128, 256, generator=generator)
    expected = oracle(x, y, debiased)
    assert float(linear_cka(x + 20, y + 20, debiased=debiased)) == pytest.approx(expected, abs=1e-5)
    features = torch.stack([x, y]) + 20
    assert float(cka_matrix(features, debiased=debiased)[0, 1]) == pytest.approx(expected, abs=1e-5)


@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(1e-2, 1e2))
def test_properties(seed, debiased, scale):
    rng = np.random.default_rng(seed)
    x = torch.tensor(rng.normal(size=(25, 4)))
    y = x @ torch.tensor(rng.normal(size=(4, 6))) + torch.tensor(rng.normal(size=(25, 6)))
    rotation = torch.tensor(ortho_group.rvs(6, random_state=rng))
    value = float(linear_cka(x, y, debiased=debiased))
    assert value <= 1 + 1e-9
    assert debiased or value >= 0
    assert float(linear_cka(x, x, debiased=debiased)) == pytest.approx(1, abs=1e-9)
    assert float(linear_cka(y, x, debiased=debiased)) == pytest.approx(value, abs=1e-9)
    assert float(linear_cka(x, scale * y @ rotation + 3, debiased=debiased)) == pytest.approx(value, abs=1e-9)
    stretched = y * torch.tensor([100.0, 1, 1, 1, 1, 1])
    assert abs(float(linear_cka(x, stretched, debiased=debiased)) - value) > 1e-6, "not free of every linear map"


@pytest.mark.parametrize("debiased", [True, False])
def test_the_matrix_is_every_pair(debiased, generator):
    features = torch.randn(5, 30, 7, generator=generator).cumsum(0)
    got = cka_matrix(features, debiased=debiased)
    expected = [[oracle(a, b, debiased) for b in features.numpy()] for a in features.numpy()]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_constant_layer_has_no_similarity(generator):
    features = torch.randn(2, 30, 7, generator=generator)
    features[1] = 0.1
    for debiased in (True, False):
        value = cka_matrix(features, debiased=debiased)
        assert value[0, 0].item() == pytest.approx(1)
        assert value[0, 1].isnan()


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_the_textbook(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    expected, layers = {}, range(world.layers + 1)
    for view in ("", ":no-first") if world.first_tokens else ("",):
        states = world.tokens(view=view)
        for a in layers:
            for b in layers:
                for name, debiased in (("debiased", True), ("biased", False)):
                    value = oracle(states[a], states[b], debiased)
                    expected["residual", a, b, f"{name}{view}"] = (value, states.shape[1])
    expect(any_split(Cka, world), expected)
