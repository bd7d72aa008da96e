"""Squared maximum mean discrepancy with an RBF kernel (Hopscotch, analysis), against scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from sklearn.metrics.pairwise import rbf_kernel

from fulldepth.metrics import Mmd, mmd


def oracle(x, y, bandwidth=None):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    s = bandwidth or np.median(pdist(np.concatenate([x, y])))
    gamma = 1 / (2 * s * s)
    return (
        rbf_kernel(x, gamma=gamma).mean() + rbf_kernel(y, gamma=gamma).mean() - 2 * rbf_kernel(x, y, gamma=gamma).mean()
    )


@pytest.mark.parametrize("bandwidth", [None, 0.7])
@pytest.mark.parametrize(("n", "m"), [(9, 15), (3, 1)])
def test_against_scikit_learn(n, m, bandwidth, generator):
    x = torch.randn(n, 5, generator=generator)
    y = 1.5 * torch.randn(m, 5, generator=generator) + 1
    for dtype in (torch.float16, torch.float32, torch.float64):
        a, b = x.to(dtype), y.to(dtype)
        got = mmd(a, b, bandwidth=bandwidth).item()
        assert got == pytest.approx(oracle(a.double(), b.double(), bandwidth), abs=1e-9)


def test_a_large_common_mean_does_not_break_float32(generator):
    x, y = torch.randn(2, 30, 8, generator=generator)
    x, y = x + 1000, y + 1001
    assert mmd(x, y).item() == pytest.approx(oracle(x.double(), y.double()), abs=1e-8)


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_scikit_learn(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    states, reference = world.tokens(), world.tokens("reference")
    expected = {
        ("residual", layer, None, "value"): (oracle(states[layer], reference[layer]), states.shape[1])
        for layer in range(len(states))
    }
    expect(any_split(Mmd, world), expected)
