"""The maps of the linear lens against scikit-learn's ridge regression, whatever the order and the split of the data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.linear_model import Ridge

from fulldepth.metrics import METRICS, LinearMaps, MapSums, linear_map
from fulldepth.metrics.linear_lens import STRENGTHS, Moments, choose_strength
from metrics.conftest import invent
from metrics.oracle import of_ratio
from tiny_models import seeded

LAYERS, WIDTH, POSITIONS = 3, 7, 90


@pytest.fixture(scope="module")
def states():
    """[K+1, N, D] of which the last is a noisy function of the others, with a channel of outlying norm."""
    rng = np.random.default_rng(0)
    layers = rng.normal(size=(LAYERS, POSITIONS, WIDTH)) * [1, 2, 3, 0.1, 1, 1, 300] + 5
    last = np.tanh(layers.mean(0)) @ rng.normal(size=(WIDTH, WIDTH)) + rng.normal(size=(POSITIONS, WIDTH))
    return np.concatenate([layers, last[None]])


@pytest.fixture(scope="module")
def held_out():
    return np.arange(POSITIONS) % 4 == 1


def ridge(x, y, strength):
    """scikit-learn's ridge regression with the penalty of a strength."""
    alpha = strength * np.square(x - x.mean(0)).sum() / WIDTH
    return alpha, Ridge(alpha, solver="svd").fit(x, y)


def expected(x, y, held_out):
    """Strength, penalty, model fitted on all, and the share of the held-out squares that the chosen one leaves."""
    mean = y[~held_out].mean(0)
    total = np.square(y[held_out] - mean).sum()
    shares = []
    for strength in STRENGTHS:
        _, model = ridge(x[~held_out], y[~held_out], strength)
        shares.append(np.square(y[held_out] - model.predict(x[held_out])).sum() / total)
    best = int(np.argmin(shares))
    return STRENGTHS[best], *ridge(x, y, STRENGTHS[best]), shares[best]


def test_map_is_scikit_learns(states):
    x, y = states[0], states[-1]
    for strength in STRENGTHS:
        weight, offset, penalty = linear_map(Moments.of(torch.from_numpy(x), torch.from_numpy(y)), strength)
        alpha, model = ridge(x, y, strength)
        assert_allclose(penalty, alpha, rtol=1e-12)
        assert_allclose(weight, model.coef_.T, rtol=1e-8, atol=1e-10)
        assert_allclose(offset, model.intercept_, rtol=1e-8)


@pytest.mark.parametrize("step", [1, 17, POSITIONS])
def test_sums_give_the_same_maps_whatever_the_batches(states, held_out, step):
    sums = MapSums(LAYERS, WIDTH)
    for start in np.random.default_rng(step).permutation(range(0, POSITIONS, step)):
        part = torch.from_numpy(states[:, start : start + step])
        sums.update(list(part[:-1]), part[-1], torch.from_numpy(held_out[start : start + step]))
    maps = sums.compute()
    for layer in range(LAYERS):
        strength, alpha, model, left = expected(states[layer], states[-1], held_out)
        assert maps.strengths[layer] == strength
        assert_allclose([maps.ridges[layer], maps.unexplained[layer]], [alpha, left], rtol=1e-8)
        mapped = maps(torch.from_numpy(states))[layer]
        assert_allclose(mapped, model.predict(states[layer]), rtol=1e-8, atol=1e-9)
    halves = [LinearMaps(maps.weights[n:m], maps.offsets[n:m], *([0.0] * (m - n),) * 3) for n, m in ((0, 1), (1, 3))]
    joined = LinearMaps.joined(halves)(torch.from_numpy(states))
    assert torch.equal(joined, maps(torch.from_numpy(states)))
    assert torch.equal(joined[-1], torch.from_numpy(states[-1]))  # the last layer is read as it is


def test_the_map_of_a_layer_to_itself_is_the_identity(states, held_out):
    x = torch.from_numpy(states[-1])
    first, other = (Moments.of(x[part], x[part]) for part in (~held_out, held_out))
    strength, left = choose_strength(first, other)
    weight, offset, _ = linear_map(Moments.of(x, x), strength)
    assert strength == min(STRENGTHS)
    assert left < 1e-12
    assert_allclose(weight, np.eye(WIDTH), atol=1e-6)
    assert_allclose(x @ weight + offset, x, atol=1e-6)


def test_half_precision_is_mapped_in_full_precision(states):
    x = torch.from_numpy(states).bfloat16()
    weights, offsets = torch.rand(LAYERS, WIDTH, WIDTH), torch.rand(LAYERS, WIDTH)
    mapped = LinearMaps(weights, offsets, [], [], [])(x)
    assert torch.equal(mapped[1], (x[1].float() @ weights[1] + offsets[1]).bfloat16())


@pytest.mark.parametrize(("name", "sign"), [("linear_lens_accuracy", 1), ("linear_lens_loss", -1)])
def test_gains_of_the_linear_lens_have_paired_errors(name, sign):
    """The cluster formula on the differences of both lenses at each position."""
    documents = (3, 3, 3, 3, 8, 8, 1, 7, 7, 7, 7, 7, 2, 4, 4, 5, 6, 6, 9, 9)
    world = invent(seeded(5), lengths=(9, 4, 7, 9, 2, 6, 9, 3, 8, 5) * 2, layers=4).replace(
        options={"clusters": documents}
    )
    known = world.targets != -100
    targets = world.targets.clamp(min=0)

    def values(logits):
        if sign > 0:
            return (logits.argmax(-1) == targets).double()
        return -logits.double().log_softmax(-1).gather(-1, targets.expand(len(logits), -1, -1)[..., None])[..., 0]

    gain = sign * (values(world.linear_logits) - values(world.logits)) * known  # [L+1, N, T]
    gain, counts = gain.sum(-1).numpy(), known.sum(1).numpy()
    rows = world.rows(METRICS[name], (20,))
    for layer in range(4):
        stated = rows["residual", layer, None, "standard_error_of_gain"].value
        assert stated == pytest.approx(of_ratio(documents, gain[layer], counts), rel=1e-4)
    stated = rows["residual", None, None, "standard_error_of_gain_of_early_layers"].value
    assert stated == pytest.approx(of_ratio(documents, gain[1:3].mean(0), counts), rel=1e-4)
