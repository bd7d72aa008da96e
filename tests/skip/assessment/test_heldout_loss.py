"""Differences of held-out losses: their error by document, and the gate of the verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from fulldepth.skip.assessment.heldout_loss import AddedLoss, HeldoutLosses


def losses(gaps, tokens, documents) -> HeldoutLosses:
    sums = {"original": np.zeros(len(gaps)), "other": np.asarray(gaps, dtype=float)}
    return HeldoutLosses(sums, np.asarray(tokens, dtype=float), np.asarray(documents))


def test_one_number_a_document_gives_the_error_of_their_mean() -> None:
    rng = np.random.default_rng(0)
    effects = rng.normal(0.3, 1, 20)  # every window of a document has its document's loss
    made = losses(np.repeat(effects, 5) * 7, [7] * 100, np.repeat(np.arange(20), 5)).added("other")
    assert made.mean == pytest.approx(effects.mean())
    assert made.error == pytest.approx(scipy.stats.sem(effects))
    assert made.documents == 20


@pytest.mark.parametrize("documents", [1, 2])
def test_fewer_than_three_documents_have_no_error_and_no_verdict(documents) -> None:
    made = losses([1.0, 2.0, 3.0, 4.0], [5] * 4, np.arange(4) % documents).added("other")
    assert math.isnan(made.error)
    assert made.text("original").startswith("+0.5000 against original (an error takes 3 documents")


def test_the_verdict_is_gated_by_two_errors() -> None:
    assert (
        AddedLoss(0.0201, 0.01, 30).text("original") == "+0.0201 against original (standard error 0.0100, 30 documents)"
    )
    none = "no measurable difference from original (at most 0.0399 nats)"
    assert AddedLoss(0.0199, 0.01, 30).text("original") == none
    assert AddedLoss(-0.0199, 0.01, 30).text("original") == none
    few = AddedLoss(0.03, 0.01, 4)  # Student's t of three degrees: 3.18 errors
    assert few.text("original") == f"no measurable difference from original (at most {0.03 + 0.01 * 3.18245:.4f} nats)"
    assert "measurable from 3.2 standard errors" in AddedLoss(0.04, 0.01, 4).text("original")
    assert "no measurable difference" in AddedLoss(0.0, 0.0, 30).text("original")
