"""Norms up to which displacement, norm ratio and contribution are right, as their documentation states."""

import numpy as np
import pytest
import torch

from fulldepth.metrics import displacement, norm_ratio
from fulldepth.metrics.contribution import contribution


def unit_states(width):
    """A state and an update of norm 1 each for 50 tokens, in float64."""
    generator = torch.Generator().manual_seed(width)
    pair = torch.randn(2, 50, width, generator=generator, dtype=torch.float64)
    return pair / pair.norm(dim=-1, keepdim=True)


def expected(state, update):
    """Displacement, norm ratio, and the relative norm and cosine of an update, by numpy from vectors of norm near 1."""
    after = state + update

    def cosine(x, y):
        return (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)

    ratio = np.linalg.norm(state, axis=-1) / np.linalg.norm(update, axis=-1)
    return (1 - cosine(state, after)) / 2, ratio, 1 / ratio, cosine(update, state)


def computed(state, after):
    """The same by fulldepth, in float64."""
    relative, cosine = contribution(after - state, state)
    return [part.double().numpy() for part in (displacement(state, after), norm_ratio(state, after), relative, cosine)]


@pytest.mark.parametrize("width", [8, 1024, 8192])
@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"),
    [(torch.float32, scale, 2e-5) for scale in (1e-16, 1e-8, 1.0, 1e9, 0.5e18)]
    + [(torch.float64, scale, 1e-9) for scale in (1e-150, 1e-30, 1e25, 1e150)],
)
def test_values_are_right_within_the_norms_that_are_documented(dtype, scale, tolerance, width):
    state, update = unit_states(width)
    scaled = (state * scale).to(dtype), ((state + update) * scale).to(dtype)
    exact = [part.double().numpy() / scale for part in scaled]
    values = expected(exact[0], exact[1] - exact[0])
    for got, value in zip(computed(*scaled), values, strict=True):
        np.testing.assert_allclose(got, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_far_beyond_them_float32_has_no_value(scale):
    state, update = unit_states(64)
    got = displacement((state * scale).float(), ((state + update) * scale).float())
    assert bool(got.isnan().all())
