"""Accuracy of the last layer's classifier on every layer (aligned training, Eq. 2), against scikit-learn."""

import pytest
import torch
from sklearn.metrics import accuracy_score

from fulldepth.metrics import LensAccuracy, lens_accuracy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_against_scikit_learn(dtype, generator):
    logits = torch.randn(3, 40, 7, generator=generator).to(dtype)
    targets = torch.randint(7, (3, 40), generator=generator)
    targets[0, :9] = -100
    known = targets != -100
    expected = accuracy_score(targets[known], logits[known].double().numpy().argmax(-1))
    assert lens_accuracy(logits, targets).item() == pytest.approx(expected)


def test_rows_against_scikit_learn(world, any_split, expect):
    known = world.targets != -100
    expected = {}
    for layer, logits in enumerate(world.logits):
        value = accuracy_score(world.targets[known], logits[known].numpy().argmax(-1))
        expected["residual", layer, None, "mean"] = (value, int(known.sum()))
    expect(any_split(LensAccuracy, world), expected)
