"""Psi = 1 - (1 + cos) / 2 (JREG, Eq. 2), against closed forms, scikit-learn and plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ortho_group
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


@pytest.mark.parametrize("angle", [0, np.pi / 6, np.pi / 2, 2, np.pi])
def test_a_turn_by_an_angle_is_the_squared_sine_of_its_half(angle, generator):
    plane, _ = torch.linalg.qr(torch.randn(16, 2, generator=generator, dtype=torch.float64))
    turned = np.cos(angle) * plane[:, 0] + np.sin(angle) * plane[:, 1]
    got = displacement(3 * plane[:, 0], 0.2 * turned)
    assert got.item() == pytest.approx(np.sin(angle / 2) ** 2, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_against_scikit_learn_in_every_dtype(dtype, generator):
    h_in, h_out = (100 * torch.randn(2, 4, 50, 96, generator=generator)).to(dtype)
    oracle = paired_cosine_distances(h_in.double().flatten(0, 1), h_out.double().flatten(0, 1)) / 2
    np.testing.assert_allclose(displacement(h_in, h_out).flatten(), oracle, atol=1e-12 if dtype.itemsize == 8 else 1e-6)


def test_large_half_precision_states_do_not_overflow():
    h = torch.full((3, 4096), 60000.0, dtype=torch.float16)
    np.testing.assert_allclose(displacement(h, h), 0, atol=1e-5)
    np.testing.assert_allclose(displacement(h, -h), 1, atol=1e-5)


@given(seeds, st.floats(1e-3, 1e3))
def test_properties(seed, scale):
    rng = np.random.default_rng(seed)
    h_in, h_out = torch.tensor(rng.normal(size=(2, 7, 5)) + 1)
    rotation = torch.tensor(ortho_group.rvs(5, random_state=rng))
    value = displacement(h_in, h_out)
    assert ((value >= 0) & (value <= 1)).all()
    np.testing.assert_allclose(displacement(h_in, h_in), 0, atol=1e-12)
    np.testing.assert_allclose(displacement(h_out, h_in), value, atol=1e-12)
    np.testing.assert_allclose(displacement(h_in, -h_out), 1 - value, atol=1e-12)
    np.testing.assert_allclose(displacement(h_in, scale * h_out), value, atol=1e-12)
    np.testing.assert_allclose(displacement(h_in @ rotation, h_out @ rotation), value, atol=1e-12)
    assert (displacement(h_in + 5, h_out + 5) - value).abs().max() > 1e-3, "a shift is a change of direction"


def test_a_zero_vector_has_no_displacement(generator):
    h = torch.randn(2, 5, generator=generator)
    h[1] = 0
    np.testing.assert_array_equal(displacement(h, torch.ones(2, 5)).isnan(), [False, True])


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


def test_float64_states_keep_their_precision(world):
    states = world.states["residual"].double()
    states[1] = states[0] * 2 + 1e-6 * states[1]
    world = world.with_states(residual=states)
    _, _, values = next(pairs(world, ""))
    assert values.max() < 1e-10
    assert world.rows(Displacement)["residual", 1, None, "mean"].value == pytest.approx(values.mean(), rel=1e-3)


@pytest.mark.parametrize("lengths", [(500,) * 40, (9, 4, 7, 9, 1, 6), (2, 2)])
def test_percentiles_come_from_a_fine_histogram(lengths, invented):
    world = invented(lengths=lengths, layers=2, width=4)
    rows = world.rows(Displacement, (1, len(lengths) - 1))
    for view in ("", ":no-first"):
        for site, layer, values in pairs(world, view):
            for name, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
                got = rows[site, layer, None, f"{name}{view}"].value
                assert abs(np.sqrt(got) - np.sqrt(np.quantile(values, share))) < 2e-4


def test_zero_vectors_are_left_out_and_counted_out(world):
    residual = world.states["residual"].clone()
    residual[1, 3, 5] = 0
    world = world.with_states(residual=residual)
    total = int(world.mask.sum())
    rows = world.rows(Displacement)
    assert [rows["residual", n, None, "mean"].count for n in (1, 2, 3)] == [total - 1, total - 1, total]
    with np.errstate(invalid="ignore"):
        for site, layer, values in pairs(world, ""):
            for name, value in (("mean", np.nanmean(values)), ("std", np.nanstd(values))):
                assert rows[site, layer, None, name].value == pytest.approx(value, abs=1e-6)
