"""What is said of a task that the original and the healed model were asked."""

from __future__ import annotations

import math

import pytest
import scipy.stats

from fulldepth.skip.tasks import TaskReading


def reading(original, healed, error, examples):
    return TaskReading("quiz", "acc", examples, original, healed, error)


def test_equal_scores_do_not_say_that_the_models_agree_everywhere():
    """One example in 200 on which they differ would move the score by 0.005, and two errors of that are 0.01."""
    same = reading(0.5, 0.5, 0.0, 200)
    assert "no measurable difference, at most 0.010; 200 examples" in same.sentence
    assert "at most 0.667; 3 examples" in reading(1.0, 1.0, 0.0, 3).sentence
    assert same.finding().standard_error is None
    assert reading(0.5, 0.42, 0.02, 200).finding().standard_error == 0.02


@pytest.mark.parametrize(("error", "measurable"), [(0.02, True), (0.05, False)])
def test_a_difference_is_stated_beyond_two_errors(error, measurable):
    sentence = reading(0.5, 0.42, error, 1000).sentence
    assert ("difference -0.080 ± 0.020" in sentence) is measurable
    reach = math.hypot(scipy.stats.t.ppf(scipy.stats.norm.cdf(2), 999) * error, 2 * 0.001)
    assert (f"at most {0.08 + reach:.3f}" in sentence) is not measurable
