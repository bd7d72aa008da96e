"""Squared maximum mean discrepancy with an RBF kernel (Hopscotch, analysis), against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from scipy.stats import ortho_group
from sklearn.metrics.pairwise import rbf_kernel

from fulldepth.metrics import Mmd, mmd


def oracle(x, y, bandwidth=None):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    s = bandwidth or np.median(pdist(np.concatenate([x, y])))
    gamma = 1 / (2 * s * s)
    return (
        rbf_kernel(x, gamma=gamma).mean() + rbf_kernel(y, gamma=gamma).mean() - 2 * rbf_kernel(x, y, gamma=gamma).mean()
    )


@pytest.mark.parametrize("bandwidth", [None, 0.7, 5.0])
@pytest.mark.parametrize(("n", "m"), [(20, 20), (9, 15), (3, 1)])
def test_against_scikit_learn(n, m, bandwidth, generator):
    x = torch.randn(n, 5, generator=generator)
    y = 1.5 * torch.randn(m, 5, generator=generator) + 1
    for dtype in (torch.float16, torch.float32, torch.float64):
        a, b = x.to(dtype), y.to(dtype)
        got = mmd(a, b, bandwidth=bandwidth).item()
        assert got == pytest.approx(oracle(a.double(), b.double(), bandwidth), abs=1e-9)


def test_two_points_in_closed_form():
    x, y = torch.zeros(1, 3), torch.tensor([[2.0, 0, 0]])
    assert mmd(x, y).item() == pytest.approx(2 - 2 * np.exp(-0.5))  # the median distance is the only one
    assert mmd(x, y, bandwidth=1.0).item() == pytest.approx(2 - 2 * np.exp(-2))


def test_a_large_common_mean_does_not_break_float32(generator):
    x, y = torch.randn(2, 30, 8, generator=generator)
    x, y = x + 1000, y + 1001
    assert mmd(x, y).item() == pytest.approx(oracle(x.double(), y.double()), abs=1e-8)


@given(st.integers(0, 2**32 - 1), st.floats(1e-2, 1e2))
def test_properties(seed, scale):
    rng = np.random.default_rng(seed)
    x, y = torch.tensor(rng.normal(size=(8, 3))), torch.tensor(rng.normal(size=(5, 3)) + 1)
    rotation = torch.tensor(ortho_group.rvs(3, random_state=rng))
    value = mmd(x, y).item()
    assert -1e-12 <= value <= 2
    assert mmd(y, x).item() == pytest.approx(value, abs=1e-12)
    assert mmd(x, x[torch.tensor(rng.permutation(8))]).item() == pytest.approx(0, abs=1e-12)
    assert mmd(scale * x @ rotation + 4, scale * y @ rotation + 4).item() == pytest.approx(value, abs=1e-9)
    fixed = mmd(x, y, bandwidth=1.0).item()
    assert mmd(x @ rotation + 4, y @ rotation + 4, bandwidth=1.0).item() == pytest.approx(fixed, abs=1e-9)


def test_points_that_are_all_the_same_do_not_differ():
    assert mmd(torch.ones(4, 3), torch.ones(5, 3)).item() == 0


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_scikit_learn(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    states, reference = world.tokens(), world.tokens("reference")
    expected = {
        ("residual", layer, None, "value"): (oracle(states[layer], reference[layer]), states.shape[1])
        for layer in range(len(states))
    }
    expect(any_split(Mmd, world), expected)


def test_the_same_model_does_not_differ_from_itself(world):
    world = world.with_states(reference=world.states["residual"])
    assert all(abs(row.value) < 1e-12 for row in world.rows(Mmd, (5, 7)).values())
