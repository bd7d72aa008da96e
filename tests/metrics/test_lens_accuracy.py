"""Accuracy of the last layer's classifier on every layer (aligned training, Eq. 2), against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


@given(st.integers(0, 2**32 - 1))
def test_properties(seed):
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(20, 4)))
    targets = torch.tensor(rng.integers(4, size=20))
    value = lens_accuracy(logits, targets)
    assert 0 <= value <= 1
    assert lens_accuracy(3 * logits + torch.tensor(rng.normal(size=(20, 1))), targets) == value
    assert lens_accuracy(logits, logits.argmax(-1)) == 1
    assert lens_accuracy(logits, logits.argmin(-1)) == 0


def test_rows_against_scikit_learn(world, any_split, expect):
    known = world.targets != -100
    expected = {}
    for layer, logits in enumerate(world.logits):
        value = accuracy_score(world.targets[known], logits[known].numpy().argmax(-1))
        expected["residual", layer, None, "mean"] = (value, int(known.sum()))
    expect(any_split(LensAccuracy, world), expected)
