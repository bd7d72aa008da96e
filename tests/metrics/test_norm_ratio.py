"""||h_{l-1}|| / ||h_l - h_{l-1}|| (aligned training, Fig. 11), against plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ortho_group

from fulldepth.metrics import NormRatio, norm_ratio


def ratio(x, y):
    return math.sqrt(math.fsum(a * a for a in x)) / math.sqrt(
        math.fsum((b - a) ** 2 for a, b in zip(x, y, strict=True))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_against_loops(dtype, generator):
    h_in, step = torch.randn(2, 3, 5, 16, generator=generator)
    h_in, h_out = (300 * h_in).to(dtype), (300 * (h_in + step)).to(dtype)
    pairs = zip(h_in.double().flatten(0, 1).tolist(), h_out.double().flatten(0, 1).tolist(), strict=True)
    np.testing.assert_allclose(norm_ratio(h_in, h_out).flatten(), [ratio(x, y) for x, y in pairs], rtol=1e-5)


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_properties(seed, scale):
    rng = np.random.default_rng(seed)
    h_in, step = torch.tensor(rng.normal(size=(2, 4, 6)) + 1)
    value = norm_ratio(h_in, h_in + step)
    rotation = torch.tensor(ortho_group.rvs(6, random_state=rng))
    np.testing.assert_allclose(norm_ratio(scale * h_in, scale * (h_in + step)), value, rtol=1e-9)
    np.testing.assert_allclose(norm_ratio(h_in @ rotation, (h_in + step) @ rotation), value, rtol=1e-9)
    np.testing.assert_allclose(norm_ratio(h_in, h_in + scale * step), value / scale, rtol=1e-6)
    np.testing.assert_allclose(norm_ratio(h_in, (1 + scale) * h_in), 1 / scale, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_loops(world_name, dtype, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    world = world.with_states(residual=world.states["residual"].to(dtype))
    expected = {}
    for view in ("", ":no-first") if world.first_tokens else ("",):
        states = world.tokens(view=view)
        for layer in range(1, len(states)):
            values = [ratio(x, y) for x, y in zip(states[layer - 1], states[layer], strict=True)]
            expected["residual", layer, None, f"mean{view}"] = (np.mean(values), len(values))
    expect(any_split(NormRatio, world), expected)


def test_a_small_step_from_a_large_state_is_measured_right(world, generator):
    steps = torch.randn(4, *world.mask.shape, 6, generator=generator)
    residual = 1000 + 0.01 * steps.cumsum(0)
    world = world.with_states(residual=residual)
    states = world.tokens()
    rows = world.rows(NormRatio)
    for layer in (1, 2, 3):
        values = [ratio(x, y) for x, y in zip(states[layer - 1], states[layer], strict=True)]
        assert rows["residual", layer, None, "mean"].value == pytest.approx(np.mean(values), rel=1e-4)


def test_an_unchanged_token_has_no_ratio_and_does_not_spoil_the_mean(world):
    residual = world.states["residual"].clone()
    residual[2, 3, 5] = residual[1, 3, 5]
    rows = world.with_states(residual=residual).rows(NormRatio)
    total = int(world.mask.sum())
    assert [rows["residual", n, None, "mean"].count for n in (1, 2, 3)] == [total, total - 1, total]
    assert np.isfinite(rows["residual", 2, None, "mean"].value)
