"""Cross-entropy of the last layer's classifier on every layer, in nats, against scikit-learn and SciPy."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from sklearn.metrics import log_loss

from fulldepth.metrics import LensLoss, lens_loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_against_scikit_learn(dtype, generator):
    logits = torch.randn(3, 40, 7, generator=generator).to(dtype)
    targets = torch.randint(7, (3, 40), generator=generator)
    targets[0, :9] = -100
    known = targets != -100
    expected = log_loss(targets[known], softmax(logits[known].double().numpy(), axis=-1), labels=range(7))
    assert lens_loss(logits, targets).item() == pytest.approx(expected, rel=1e-6)


def test_a_hopeless_target_costs_its_logit_and_not_infinity():
    logits = torch.tensor([[300.0, 0, 0], [0, 0, 500.0]])
    assert lens_loss(logits, torch.tensor([1, 0])).item() == pytest.approx(400)


def test_rows_against_scipy(world, any_split, expect):
    known = world.targets != -100
    expected = {}
    for layer, logits in enumerate(world.logits):
        scores = log_softmax(logits[known].double().numpy(), axis=-1)
        losses = -np.take_along_axis(scores, world.targets[known].numpy()[:, None], axis=-1)
        expected["residual", layer, None, "mean"] = (losses.mean(), int(known.sum()))
    rows = any_split(LensLoss, world)
    expect(rows, expected)
    assert all(row.unit == "nats" for row in rows.values())
