"""Sample-wise cosine between layers (aligned training, Sec. 2.1, footnote 2), against scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine as scipy_cosine_distance
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
