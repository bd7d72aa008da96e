"""Readings of predictions against float64 over all logits at once, and the budget that they keep to."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import log_softmax

from execution.test_lens import Fake
from fulldepth.execution import predictions, top_tokens
from fulldepth.execution.predictions import losses, read_predictions
from fulldepth.execution.scoring import AGREEMENT, DIVERGENCE, LOSS, kept, predicted
from tiny_models import seeded

KINDS = (AGREEMENT, LOSS, DIVERGENCE)
VOCABULARY = 11


def within(rows, itemsize=4):
    """A budget of `rows` rows of logits."""
    return patch.object(predictions, "CPU_BYTES", rows * VOCABULARY * itemsize + itemsize)


@given(
    count=st.integers(0, 40),
    rows=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    by_head=st.booleans(),
    seed=st.integers(0, 999),
)
def test_losses_divergence_and_agreement_are_those_of_all_logits_at_once(count, rows, dtype, by_head, seed):
    generator = seeded(seed)
    weight = torch.randn(VOCABULARY, 6, generator=generator)
    states, base = torch.randn(2, count, 6, generator=generator)
    targets = torch.randint(VOCABULARY, (count,), generator=generator)
    head = Fake(weight, dtype)
    logits, base_logits = head.tokens(states), head.tokens(base)
    head.largest = 0
    if not by_head:  # logits of a model's own forward pass
        head, states, base = None, logits, base_logits
    with within(rows, max(4, dtype.itemsize) if not by_head else 4):
        columns = read_predictions(head, states, targets, kept(KINDS, predicted(head, base)))
        (alone,) = read_predictions(head, states, targets, lambda logits, targets: [losses(logits, targets)])
    own, reference = (log_softmax(each.double().numpy(), axis=-1) for each in (logits, base_logits))
    expected = {
        LOSS: -np.take_along_axis(own, targets.numpy()[:, None], -1)[:, 0],
        DIVERGENCE: (np.exp(reference) * (reference - own)).sum(-1),
        AGREEMENT: own.argmax(-1) == reference.argmax(-1),
    }
    for kind, values in zip(KINDS, columns, strict=True):
        assert_allclose(values.double().numpy(), expected[kind], rtol=1e-5, atol=1e-5, err_msg=kind)
    assert torch.equal(alone, columns[KINDS.index(LOSS)])
    assert head is None or head.largest <= rows


@pytest.mark.parametrize("k", [1, 3])
def test_the_most_probable_tokens_of_many_positions_keep_to_the_budget(k, generator):
    head = Fake(torch.randn(VOCABULARY, 6, generator=generator))
    states = torch.randn(3, 2, 50, 6, generator=generator)
    shown = torch.rand(2, 50, generator=generator) < 0.7
    with within(4):
        top = top_tokens(head, states, shown, k)
    assert head.largest <= 4
    log_p = log_softmax(states[:, shown].double().numpy() @ head.weight.double().numpy().T, axis=-1)
    assert_array_equal(top.token.numpy(), np.argsort(-log_p, axis=-1)[..., :k])
    assert_allclose(top.probability.numpy(), -np.sort(-np.exp(log_p), axis=-1)[..., :k], rtol=1e-5)
