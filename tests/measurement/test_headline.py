"""Sentences of the headline, over grids of values: true for nothing, for what rounds to nothing, and at each border."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fulldepth.measurement.headline import Clusters, headline
from fulldepth.results import tabulate

COHERENCE = "coherence", "mean_corrected_of_layers", None


JUMP = {"value": 0.21, "standard_error": 0.78}
"""A jump rate that could be 0, in per cent."""


def said(*entries, layers=4, clusters=None):
    """The headline of a table of entries (measure, statistic, layer, value)."""
    rows = [(name, "residual", layer, None, what, value, 100, "1") for name, what, layer, value in entries]
    return headline(tabulate(rows), layers, clusters or Clusters(8, 8))


def test_a_jump_within_its_error_is_told_once():
    rows = [("jump_rate", name, layer, number) for layer in (3, 4) for name, number in JUMP.items()]
    found = said(*rows)
    assert found["zeta_L"].sentence == (
        "The last layer displaces no more than the one before by any measurable amount (jump rate 0.21 ± 0.78 %)."
    )
    assert found["zeta_L-1"].sentence == (
        "From layer 3 on, no layer displaces more than the one before by any measurable amount "
        "(jump rate 0.21 ± 0.78 %)."
    )


@pytest.mark.parametrize(
    ("factor", "end"),
    [
        (0.1, "; layer 3 is the first with 95 % of that."),
        (0.0, ")."),
    ],
)
def test_no_layer_is_the_first_to_detect_nothing(factor, end):
    reached = (0.1, 0.2, 0.97, 1.0)
    found = said(
        *(("average_precision", "ap50", layer, factor * share) for layer, share in enumerate(reached, start=1)),
        ("average_precision", "ap", 4, factor / 2),
    )
    assert found["average_precision"].sentence.endswith(end)


def test_equal_lenses_are_equal():
    gain = (
        ("linear_lens_accuracy", "gain_of_early_layers", None, 0.0),
        ("linear_lens_accuracy", "standard_error_of_gain_of_early_layers", None, 0.0),
    )
    found = said(*gain)["linear_lens_gain"]
    assert found.sentence == "Linear and plain lens are equally accurate in early layers (1 to 2), in all of the data."
    assert found.standard_error is None
    assert "differ by the same" in found.no_standard_error


@pytest.mark.parametrize("value", [-3.0, 0.0, 0.049, 0.051, 9.94, 9.951, 55.5])
def test_jumps_are_told_as_they_are(value):
    found = said(*(("jump_rate", "value", layer, value) for layer in (3, 4)))
    for name in ("zeta_L", "zeta_L-1"):
        sentence = found[name].sentence
        assert " 0.0 " not in sentence, "0.0 more is not more"
        assert "-" not in sentence
        assert ("displaces no more than" in sentence or "no layer displaces more than" in sentence) is (value <= 0)
        if value > 0.1:
            printed = [float(number) for number in re.findall(r"\d+\.\d+", sentence)]
            assert printed == [pytest.approx(value / 100, abs=0.0005), pytest.approx(value, abs=0.05)]
            assert ("a large jump" in sentence) is (printed[1] >= 10), "the verdict fits the number that is printed"
        else:
            assert "a large jump" not in sentence


@pytest.mark.parametrize(("error", "verdict"), [(0.2, ": a large jump."), (0.44, ", from which a jump is large.")])
def test_a_jump_is_called_large_only_beyond_its_error(error, verdict):
    found = said(("jump_rate", "value", 4, 10.8), ("jump_rate", "standard_error", 4, error))["zeta_L"]
    assert found.sentence.endswith(verdict)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(0.304, "little is kept"), (0.306, "effective work"), (0.694, "effective work"), (0.696, "mostly copies")],
)
def test_coherence_is_judged_by_the_corrected_mean(value, verdict):
    """Of two texts: a raw mean of 0.73 is a corrected one of 0.557, which copies nothing."""
    raw = "coherence", "mean", 1, 0.73
    entry = said(raw, (*COHERENCE, value), clusters=Clusters(2, 2))["mean_coherence"]
    assert entry.value == value
    assert verdict in entry.sentence
    assert "bias of 2 sequences" in entry.sentence
    assert "mean_coherence" not in said(raw), "a raw mean alone is no verdict"


def test_standard_errors_or_why_there_is_none():
    found = said(("displacement", "mean", 4, 0.25), ("displacement", "standard_error", 4, 0.01))
    entry = found["last_layer_displacement"]
    assert (entry.standard_error, entry.no_standard_error) == (0.01, None)
    for clusters, words in (
        (Clusters(9, 1, "row"), "3 rows or more, there is 1"),
        (Clusters(9, 2, "block of 4,096 tokens"), "3 blocks of 4,096 tokens or more, there are 2"),
        (Clusters(9, 5, "image"), "without one group"),
        (Clusters(9, 9, "document", "one document"), "one document"),
    ):
        assert words in said((*COHERENCE, 0.4), clusters=clusters)["mean_coherence"].no_standard_error


def test_layers_have_intervals():
    ends = {"": 27, "low_of_": 24, "high_of_": 29}
    found = said(
        *(("effective_depth", f"{kind}relative_eps=0.05", None, layer) for kind, layer in ends.items()),
        *(("saturation", f"{kind}median", None, layer) for kind, layer in ends.items()),
        layers=30,
    )
    for name in ("effective_depth", "median_saturation"):
        assert (found[name].value, found[name].interval, found[name].standard_error) == (27, (24, 29), None)
        assert "ayer 27 of 30" in found[name].sentence
        assert "(95 % interval 24 to 29)" in found[name].sentence


def test_the_first_detecting_layer_is_the_first_with_95_percent():
    reached = (0.1, 0.9, 0.949, 0.96, 1.0)
    rows = [
        ("average_precision", "residual", layer, None, "ap50", share, 9, "1")
        for layer, share in enumerate(reached, start=1)
    ]
    found = headline(
        tabulate([*rows, ("average_precision", "residual", 5, None, "ap", 0.5, 9, "1")]), 5, Clusters(8, 8)
    )
    assert found["average_precision"].sentence.endswith("; layer 4 is the first with 95 % of that.")


def test_the_last_displacement_is_set_beside_the_median_of_the_layers_before_it():
    means = (0.1, 0.2, 0.3, 0.9)
    rows = [
        ("displacement", "residual", layer, None, "mean", mean, 9, "1") for layer, mean in enumerate(means, start=1)
    ]
    found = headline(tabulate(rows), 4, Clusters(8, 8))["last_layer_displacement"]
    assert found.sentence.endswith("the layers before it have a median of 0.200.")


@pytest.mark.parametrize(("independent", "measurable"), [(np.inf, True), (3.0, False)])
def test_sentences_of_a_measurement_take_students_t_of_its_documents(independent, measurable):
    """3 standard errors are beyond 2, and within the 4.5 that three documents ask for."""
    numbers = (("jump_rate", "value", 4, 3.0), ("jump_rate", "standard_error", 4, 1.0))
    gain = "gain_of_early_layers"
    numbers += (
        ("linear_lens_accuracy", gain, None, 0.03),
        ("linear_lens_accuracy", f"standard_error_of_{gain}", None, 0.01),
    )
    rows = [(name, "residual", layer, None, what, value, 100, "1") for name, what, layer, value in numbers]
    found = headline(tabulate(rows), 4, Clusters(8, 8, independent=independent))
    assert ("by any measurable amount" not in found["zeta_L"].sentence) is measurable
    assert ("Early layers (1 to 2) know more" in found["linear_lens_gain"].sentence) is measurable
