"""Sentences of the headline, over grids of values: true for nothing, for what rounds to nothing, and at each border."""

from __future__ import annotations

import re

import pytest

from fulldepth.measurement.headline import Clusters, headline
from fulldepth.metrics.jump_rate import describe_jump
from fulldepth.results import tabulate

RATES = (-3.0, -0.01, 0.0, 1e-12, 0.03, 0.049, 0.051, 0.94, 9.94, 9.951, 10.0, 55.5)


def numbers(sentence):
    return [float(found) for found in re.findall(r"\d+\.\d+", sentence)]


def said(layers=4, sequences=8, clusters=0, of="sequence", **statistics):
    """The headline of a table of `measure__statistic=value` at the last layer (or at none)."""
    rows = []
    for name, (layer, value, unit) in statistics.items():
        measure, statistic = name.split("__")
        rows.append((measure, "residual", layer, None, statistic.replace("_EQ_", "="), value, 100, unit))
    return headline(tabulate(rows), layers, Clusters(sequences, clusters or sequences, of))


@pytest.mark.parametrize("value", RATES)
def test_jumps_are_told_as_they_are(value):
    last = said(jump_rate__value=(4, value, "%"))["zeta_L"]
    before = said(jump_rate__value=(3, value, "%"))["zeta_L-1"]
    assert last.sentence == describe_jump(value)
    for entry in (last, before):
        sentence = entry.sentence
        assert " 0.0 " not in sentence, "0.0 more is not more"
        assert "-" not in sentence
        grows = value > 0
        assert ("no more than" in sentence or "no layer displaces more" in sentence) is not grows
        if grows and "less than" not in sentence:
            printed = [n for n in numbers(sentence) if n > 0]
            assert printed == [pytest.approx(value / 100, abs=0.0005), pytest.approx(value, abs=0.05)]
            assert ("a large jump" in sentence) is (printed[1] >= 10), "the verdict fits the number that is printed"
        else:
            assert value < 0.15
            assert "large jump" not in sentence or "no large jump" in sentence


@pytest.mark.parametrize(("error", "verdict"), [(0.2, ": a large jump."), (0.44, ", from which a jump is large.")])
def test_a_jump_is_called_large_only_beyond_its_error(error, verdict):
    found = said(jump_rate__value=(4, 10.8, "%"), jump_rate__standard_error=(4, error, "%"))["zeta_L"]
    assert found.sentence.endswith(verdict)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(0.0, "little is kept"), (0.304, "little is kept"), (0.306, "effective work"), (0.557, "effective work"),
     (0.694, "effective work"), (0.696, "mostly copies"), (1.0, "mostly copies")],
)  # fmt: skip
def test_coherence_is_judged_by_the_corrected_mean(value, verdict):
    """Of two texts: a raw mean of 0.73 is a corrected one of 0.557, which copies nothing."""
    raw = {"coherence__mean": (1, 0.73, "1")}
    entry = said(sequences=2, **raw, coherence__mean_corrected_of_layers=(None, value, "1"))["mean_coherence"]
    assert entry.value == value
    assert verdict in entry.sentence
    assert "bias of 2 sequences" in entry.sentence
    assert "mean_coherence" not in said(**raw), "a raw mean alone is no verdict"


def test_standard_errors_or_why_there_is_none():
    found = said(displacement__mean=(4, 0.25, "1"), displacement__standard_error=(4, 0.01, "1"))
    assert found["last_layer_displacement"].standard_error == 0.01
    assert found["last_layer_displacement"].no_standard_error is None
    coherence = {"coherence__mean_corrected_of_layers": (None, 0.4, "1")}
    reasons = [
        said(sequences=9, clusters=n, of=unit, **coherence)["mean_coherence"].no_standard_error
        for n, unit in ((1, "row"), (2, "block of 4,096 tokens"), (5, "image"))
    ]
    assert reasons == [
        "it takes 3 rows or more, there is 1",
        "it takes 3 blocks of 4,096 tokens or more, there are 2",
        "without one group of the data the number is not defined",
    ]
    stated = Clusters(40, 40, "document", "the data are one document of 900 tokens").no_standard_error
    assert stated == "the data are one document of 900 tokens"


def test_layers_have_intervals_and_the_first_layer_beyond_its_error():
    def step(value, low, high, name="effective_depth__relative_eps_EQ_0.05"):
        measure, statistic = name.split("__")
        rows = {name: value, f"{measure}__low_of_{statistic}": low, f"{measure}__high_of_{statistic}": high}
        return said(30, **{key: (None, float(layer), "layers") for key, layer in rows.items()})[headlines[measure]]

    headlines = {"effective_depth": "effective_depth", "saturation": "median_saturation"}
    depth = step(27, 24, 29)
    assert (depth.value, depth.interval, depth.standard_error) == (27, (24, 29), None)
    assert depth.sentence == (
        "Layer 27 of 30 already reaches 95 % of the last layer's accuracy (95 % interval 24 to 29); "
        "layer 29 is the first above it by more than the error."
    )
    assert "none before the last is above it by more than the error" in step(27, 24, 30).sentence
    assert step(30, 28, 30).sentence == (
        "No layer before the last (layer 30) reaches 95 % of its accuracy (95 % interval 28 to 30)."
    )
    settled = step(12, 11, 14, "saturation__median")
    assert settled.interval == (11, 14)
    assert settled.sentence == "Half of the predictions are settled by layer 12 of 30 (95 % interval 11 to 14)."


@pytest.mark.parametrize(
    ("relative", "absolute", "beginning", "end"),
    [
        (2, 3, "Layer 2 of 4 already reaches 95 %", "; an accuracy of 95 % is reached at layer 3."),
        (2, 4, "Layer 2 of 4 already reaches 95 %", "; none before the last reaches an accuracy of 95 %."),
        (4, 4, "No layer before the last (layer 4) reaches 95 %", " of its accuracy."),
    ],
)
def test_effective_depth_says_whether_a_layer_before_the_last_is_enough(relative, absolute, beginning, end):
    rows = [
        ("effective_depth", "residual", None, None, statistic, float(value), 10, "layers")
        for statistic, value in (("relative_eps=0.05", relative), ("eps=0.05", absolute))
    ]
    sentence = headline(tabulate(rows), 4, Clusters(8, 8))["effective_depth"].sentence
    assert sentence.startswith(beginning)
    assert sentence.endswith(end)
