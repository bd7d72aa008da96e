"""Aligned loss (Eq. 5) and its gradients against all logits at once in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from torch import nn
from torch.testing import assert_close

from fulldepth.losses.aligned_loss import aligned_loss
from losses.trained_step import kept, leaves

LAYERS, WIDTH, CLASSES = 3, 6, 11
WEIGHTS = {"linear": [1 / 6, 2 / 6, 3 / 6], "uniform": [1 / 3] * 3, (0.5, 0.0, 2.0): [0.5, 0.0, 2.0]}


@pytest.fixture
def states(generator):
    """h_1..h_3."""
    return list(torch.randn(LAYERS, 4, 5, WIDTH, generator=generator, dtype=torch.float64).cumsum(0))


@pytest.fixture
def labels(generator):
    """A whole sequence, whole chunks and single positions are ignored."""
    labels = torch.randint(CLASSES, (4, 5), generator=generator)
    labels[1] = labels[0, 2] = labels[3, 3:] = -100
    return labels


@pytest.fixture
def head(generator):
    """Norm with a gain, then projection with a bias."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(1 + 0.3 * torch.randn(WIDTH, generator=generator, dtype=torch.float64))
            self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64))
            self.bias = nn.Parameter(torch.randn(CLASSES, generator=generator, dtype=torch.float64))
            self.rows = []

        def forward(self, x):
            self.rows.append(len(x))
            return F.linear(F.rms_norm(x, (WIDTH,), self.gain, 1e-6), self.weight, self.bias)

    return Head()


def everything(states, head, labels, weights):
    """All logits at once, in float64."""
    parts = [F.cross_entropy(head(h.double().flatten(0, -2)), labels.flatten()) for h in states]
    return sum(weight * part for weight, part in zip(weights, parts, strict=True))


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_value_and_gradients_are_those_of_all_logits_at_once(states, head, labels, dtype, tolerance, weights, chunk):
    theirs, ours = leaves(states), leaves(states, dtype)
    expected = everything(theirs, head, labels, WEIGHTS[weights])
    expected.backward()
    slopes = [h.grad for h in theirs] + [p.grad for p in head.parameters()]
    head.zero_grad()
    value = aligned_loss(ours, head.to(dtype), labels, weights, chunk=chunk)
    value.backward()
    assert value.dtype == dtype
    assert value.item() == pytest.approx(expected.item(), rel=max(tolerance, 1e-10))
    for mine, other in zip([h.grad for h in ours] + [p.grad for p in head.parameters()], slopes, strict=True):
        mine = torch.zeros_like(other) if mine is None else mine.double()  # of a layer without weight
        assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_half_precision_sums_in_float32(states, head, labels):
    states, head = [state.bfloat16() for state in states], head.bfloat16()
    logits = [head(state.flatten(0, -2)) for state in states]  # the head's own rounding is not ours to mend
    parts = [F.cross_entropy(x.double(), labels.flatten()).item() for x in logits]
    value = aligned_loss(states, head, labels, chunk=1000)
    assert value.dtype == torch.float32
    assert_allclose(value.item(), np.dot(WEIGHTS["linear"], parts), rtol=1e-6)


def test_ignored_positions_have_no_effect(states, head, labels):
    clean, dirty = leaves(states), leaves(states)
    with torch.no_grad():
        for state in dirty:
            state[labels == -100] = float("nan")
    results = []
    for inputs in (clean, dirty):
        head.zero_grad()
        value = aligned_loss(inputs, head, labels, chunk=4)
        value.backward()
        results.append([value.detach(), *(h.grad for h in inputs), *(p.grad.clone() for p in head.parameters())])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
    assert not any(state.grad[labels == -100].any() for state in dirty)


def test_nothing_counts(states, head, labels):
    inputs = leaves([state.masked_fill(torch.tensor(True), float("nan")) for state in states])
    value = aligned_loss(inputs, head, torch.full_like(labels, -100))
    value.backward()
    assert value == 0
    assert not any(state.grad.any() for state in inputs)
    assert not head.rows


def test_logits_exist_a_chunk_at_a_time(states, head, labels):
    value, saved = kept(lambda: aligned_loss(leaves(states), head, labels, chunk=4))
    once = list(head.rows)
    assert max(once) <= 4
    assert sum(once) == LAYERS * int((labels != -100).sum())
    assert all(x.numel() <= 4 * WIDTH for x in saved)
    value.backward()
    assert sum(head.rows) == 2 * sum(once)


def test_sampled_positions_are_unbiased(states, head, labels):
    theirs = leaves(states)
    exact_value = everything(theirs, head, labels, WEIGHTS["linear"])
    exact_value.backward()
    expected = [h.grad for h in theirs] + [p.grad.clone() for p in head.parameters()]
    draws = 400
    head.zero_grad()
    values, gradients = [], []
    torch.manual_seed(3)
    for _ in range(draws):
        ours = leaves(states)
        head.zero_grad()
        value = aligned_loss(ours, head, labels, chunk=4, positions=0.3)
        value.backward()
        values.append(value.item())
        gradients.append([h.grad for h in ours] + [p.grad.clone() for p in head.parameters()])
    error = np.std(values) / np.sqrt(draws)
    assert abs(np.mean(values) - exact_value.item()) < 4 * error
    assert error > 0
    for drawn, exact in zip(zip(*gradients, strict=True), expected, strict=True):
        deviation, mean = torch.std_mean(torch.stack(drawn), 0)
        assert ((mean - exact).abs() <= 4 * deviation / draws**0.5 + 1e-12).all()
        sizes = torch.stack([(gradient * exact).sum() for gradient in drawn]) / exact.square().sum()
        assert abs(sizes.mean() - 1) < 4 * sizes.std() / draws**0.5 < 0.09, "a gradient of another size is found"


def test_sampled_positions_are_those_that_are_read(states, head, labels):
    counted = int((labels != -100).sum())
    inputs = leaves(states)
    aligned_loss(inputs, head, labels, chunk=1000, positions=0.3).backward()
    each = int(np.ceil(0.3 * counted))
    assert head.rows == [each] * (2 * LAYERS)
    assert [int(state.grad.any(-1).sum()) for state in inputs] == [each] * LAYERS
    assert not any(state.grad[labels == -100].any() for state in inputs)
