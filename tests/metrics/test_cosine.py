"""Sample-wise cosine between layers (aligned training, Sec. 2.1, footnote 2), against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cosine as scipy_cosine_distance
from scipy.stats import ortho_group
from sklearn.metrics.pairwise import paired_cosine_distances

from fulldepth.metrics import Cosine, cosine_matrix


def per_token(states, a, b, center):
    """[N] float64 cosines of layers `a` and `b`."""
    x, y = states[a], states[b]
    if center:
        x, y = x - x.mean(0), y - y.mean(0)
    return 1 - paired_cosine_distances(x, y)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_against_scipy(center, dtype, generator):
    features = (torch.randn(4, 20, 8, generator=generator).cumsum(0) + 20).to(dtype)
    x = features.double().numpy()
    if center:
        x = x - x.mean(1, keepdims=True)
    expected = [[np.mean([1 - scipy_cosine_distance(*uv) for uv in zip(a, b, strict=True)]) for b in x] for a in x]
    np.testing.assert_allclose(cosine_matrix(features, center=center), expected, atol=2e-6)


@given(st.integers(0, 2**32 - 1), st.floats(1e-2, 1e2))
def test_properties(seed, scale):
    rng = np.random.default_rng(seed)
    features = torch.tensor(rng.normal(size=(3, 9, 4)).cumsum(0) + 1)
    scales = torch.tensor([1.0, scale, 2.0])[:, None, None]
    offsets = torch.tensor(rng.normal(size=(3, 1, 4)))
    rotation = torch.tensor(ortho_group.rvs(4, random_state=rng))
    for center in (True, False):
        value = cosine_matrix(features, center=center)
        assert (value.abs() <= 1 + 1e-12).all()
        np.testing.assert_allclose(value.diagonal(), 1, atol=1e-9)
        np.testing.assert_allclose(value, value.T, atol=1e-12)
        np.testing.assert_allclose(cosine_matrix(scales * features, center=center), value, atol=1e-9)
        np.testing.assert_allclose(cosine_matrix(features @ rotation, center=center), value, atol=1e-9)
    np.testing.assert_allclose(cosine_matrix(features + offsets), cosine_matrix(features), atol=1e-9)
    moved = cosine_matrix(features + offsets, center=False) - cosine_matrix(features, center=False)
    assert moved.abs().max() > 1e-6, "only the centred form is free of shifts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_scikit_learn(world_name, dtype, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    world = world.with_states(residual=world.states["residual"].to(dtype))
    expected, last = {}, world.layers
    for view in ("", ":no-first") if world.first_tokens else ("",):
        states = world.tokens(view=view)
        count = states.shape[1]
        for a in range(last + 1):
            for b in range(last + 1):
                centred = per_token(states, a, b, center=True)
                expected["residual", a, b, f"mean{view}"] = (centred.mean(), count)
                expected["residual", a, b, f"mean_raw{view}"] = (per_token(states, a, b, center=False).mean(), count)
                for share in (5, 25, 50, 75, 95) if b == last else ():
                    expected["residual", a, b, f"p{share:02}{view}"] = (np.percentile(centred, share), count)
    expect(any_split(Cosine, world, rtol=1e-5, atol=1e-6), expected, atol=2e-6)


def test_a_zero_vector_has_no_raw_cosine(world):
    residual = world.states["residual"].clone()
    residual[1, 3, 5] = 0
    world = world.with_states(residual=residual)
    rows = world.rows(Cosine, (5, 7))
    states = world.tokens()
    total = states.shape[1]
    has_direction = np.linalg.norm(states[1], axis=1) > 0
    expected = per_token(states[:, has_direction], 1, 2, center=False).mean()
    assert rows["residual", 1, 2, "mean_raw"].value == pytest.approx(expected, abs=1e-6)
    assert rows["residual", 1, 2, "mean_raw"].count == total - 1
    assert rows["residual", 2, 3, "mean_raw"].count == total
    assert rows["residual", 1, 2, "mean"].value == pytest.approx(per_token(states, 1, 2, center=True).mean(), abs=1e-6)


def test_beyond_the_reservoir_the_count_says_how_many_tokens_entered(world, same_rows):
    world = world.replace(options={"reservoir_tokens": 30})
    states = world.tokens()
    rows = world.rows(Cosine)
    same_rows(world.rows(Cosine, (1,) * 12, order=range(11, -1, -1)), rows, rtol=1e-5, atol=1e-6)
    raw = rows["residual", 0, 3, "mean_raw"]
    if raw.count == states.shape[1]:
        assert raw.value == pytest.approx(per_token(states, 0, 3, center=False).mean(), abs=1e-6)
    else:
        assert raw.count == 30
    centred = rows["residual", 0, 3, "mean"]
    values = per_token(states, 0, 3, center=True)
    assert centred.count == 30
    assert abs(centred.value - values.mean()) < 4 * values.std() / np.sqrt(30)
