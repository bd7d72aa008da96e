"""Psi = 1 - (1 + cos) / 2 (JREG, Eq. 2), against closed forms, scikit-learn and plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from sklearn.metrics.pairwise import paired_cosine_distances

from fulldepth.metrics import Displacement, displacement

STATISTICS = ("mean", "standard_error", "std", "p05", "p50", "p95")
seeds = st.integers(0, 2**32 - 1)


def psi(h_in, h_out):
    """[N] float64, one token at a time."""
    cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(h_in, h_out, strict=True)]
    return 1 - (1 + np.array(cosines)) / 2


def pairs(world, view):
    """Each site and layer with its displacements, [N] float64."""
    states = world.tokens("residual", view)
    for layer in range(1, len(states)):
        yield "residual", layer, psi(states[layer - 1], states[layer])
    yield "final_normed", len(states) - 1, psi(states[-2], world.tokens("final_normed", view)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_against_scikit_learn_in_every_dtype(dtype, generator):
    h_in, h_out = (100 * torch.randn(2, 4, 50, 96, generator=generator)).to(dtype)
    oracle = paired_cosine_distances(h_in.double().flatten(0, 1), h_out.double().flatten(0, 1)) / 2
    np.testing.assert_allclose(displacement(h_in, h_out).flatten(), oracle, atol=1e-12 if dtype.itemsize == 8 else 1e-6)


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_mean_and_deviation_over_all_tokens(world_name, request, any_split):
    world = request.getfixturevalue(world_name)
    rows = any_split(Displacement, world)
    views = ("", ":no-first") if world.first_tokens else ("",)
    expected = {(s, n, None, f"{k}{v}") for v in views for s, n, _ in pairs(world, v) for k in STATISTICS}
    assert set(rows) == expected
    for view in views:
        for site, layer, values in pairs(world, view):
            mean, deviation = (rows[site, layer, None, f"{k}{view}"] for k in ("mean", "std"))
            assert mean.count == deviation.count == len(values)
            assert mean.value == pytest.approx(values.mean(), abs=1e-6)
            assert deviation.value == pytest.approx(values.std(), abs=1e-6)


@pytest.mark.parametrize("lengths", [(500,) * 40, (2, 2)])
def test_percentiles_come_from_a_fine_histogram(lengths, invented):
    world = invented(lengths=lengths, layers=2, width=4)
    rows = world.rows(Displacement, (1, len(lengths) - 1))
    for view in ("", ":no-first"):
        for site, layer, values in pairs(world, view):
            for name, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
                got = rows[site, layer, None, f"{name}{view}"].value
                assert abs(np.sqrt(got) - np.sqrt(np.quantile(values, share))) < 2e-4
