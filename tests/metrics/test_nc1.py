"""NC1 = tr(Sigma_W pinv(Sigma_B)) / K (aligned training, footnote 5), against numpy.linalg.pinv."""

import numpy as np
import pytest
import torch

from fulldepth.metrics import Nc1, nc1


def oracle(features, labels):
    features, labels = np.asarray(features, np.float64), np.asarray(labels)
    dimensions = features.shape[1]
    mean, within, between = features.mean(0), np.zeros((dimensions,) * 2), np.zeros((dimensions,) * 2)
    classes = np.unique(labels)
    for k in classes:
        own = features[labels == k]
        class_mean = own.mean(0)
        for h in own:
            within += np.outer(h - class_mean, h - class_mean) / len(features)
        between += np.outer(class_mean - mean, class_mean - mean) / len(classes)
    return np.trace(within @ np.linalg.pinv(between, rcond=1e-10, hermitian=True)) / len(classes)


def classes(rng, sizes, dimensions, spread=1.0):
    centres = rng.normal(size=(len(sizes), dimensions)) * 2
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return centres[labels] + spread * rng.normal(size=(len(labels), dimensions)), labels


@pytest.mark.parametrize(("sizes", "dimensions"), [((20, 20, 20), 5), ((3, 30, 11, 6), 9), ((8, 5), 40), ((9,) * 8, 3)])
def test_against_numpy(sizes, dimensions):
    features, labels = classes(np.random.default_rng(0), sizes, dimensions)
    got = nc1(torch.tensor(features), torch.tensor(labels))
    assert got.item() == pytest.approx(oracle(features, labels), rel=1e-8)
    for dtype in (torch.float16, torch.float32):
        rounded = torch.tensor(features + 5).to(dtype)
        expected = oracle(rounded.double(), labels)
        assert nc1(rounded, torch.tensor(labels)).item() == pytest.approx(expected, rel=1e-5)


def test_two_classes_on_a_line():
    features = torch.tensor([[-3.0], [-1.0], [1.0], [3.0]])
    labels = torch.tensor([0, 0, 1, 1])
    assert nc1(features, labels).item() == pytest.approx(1 / 4 / 2)  # within 1, between 4, K 2


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_numpy_without_the_unlabelled(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    labels = np.array([world.labels[n].item() for n, _ in world.positions()])
    states, known = world.tokens(), labels >= 0
    expected = {
        ("residual", layer, None, "value"): (oracle(h[known], labels[known]), int(known.sum()))
        for layer, h in enumerate(states)
    }
    expect(any_split(Nc1, world, rtol=1e-5), expected, rtol=1e-4)
