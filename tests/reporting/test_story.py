"""The opening paragraph and the strip of layers, against sentences and numbers written down by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fulldepth.reporting import reference
from fulldepth.reporting.profile import profile
from fulldepth.reporting.reference import MEASURES, references, rows_of, unusual
from fulldepth.reporting.story import Facts, numbers, spans, story
from fulldepth.results import tabulate

META = {"model": {"name": "org/m", "task": "causal-lm"}, "data": {"name": "my texts.txt", "kind": "text"}}


def facts(means, errors=None, settled=None, depth=None) -> Facts:
    """Facts of a model with these mean displacements, shares settled so far, and effective depth."""
    layers = len(means)
    rows: list[tuple] = []
    for statistic, values in (("mean", means), ("standard_error", errors or [])):
        rows += [("displacement", "residual", at, None, statistic, v, 9, "1") for at, v in enumerate(values, 1)]
    jump = 100 * max(0.0, means[-1] - means[-2])
    rows.append(("jump_rate", "residual", layers, None, "value", jump, 9, "%"))
    if settled:
        rows += [("saturation", "residual", at, None, "cumulative", v, 9, "1") for at, v in enumerate(settled, 1)]
        median = next(at for at, share in enumerate(settled, 1) if share >= 0.5)
        rows.append(("saturation", "residual", None, None, "median", median, 9, "layers"))
    if depth:
        rows.append(("effective_depth", "residual", None, None, "relative_eps=0.05", depth, 9, "layers"))
    return Facts(tabulate(rows), layers)


def test_the_paragraph_of_a_model_with_a_jump(monkeypatch) -> None:
    known = {"zeta_L": [1.0, 5.0, 20.0], "last_over_median": [1.0, 2.0, 3.0]}
    monkeypatch.setattr(reference, "of_measure", lambda measure, besides="": known.get(measure, []))
    told = story(facts([0.5, 0.01, 0.015, 0.018, 0.03, 0.15], settled=[0, 0, 0.1, 0.3, 0.6, 1.0]), META)
    assert told == {
        "sentences": [
            "3 of 6 layers turn the residual stream by less than 2 %: layers 2 to 4, layer 2 least.",
            "The last layer turns it 8.3 times as far as the median layer (15.0 % against 1.8 %): a large jump of 12.0 "
            "points over the layer before (3 known models: 1.0 to 20.0).",
            "70 % of all predictions still change in the last two layers.",
        ],
        "next": {
            "why": "measure which can go:",
            "command": "fulldepth skip search org/m --data 'my texts.txt' --blocks 1 --output plan/",
        },
    }


def test_nothing_is_said_that_noise_could_be() -> None:
    means = [0.1, 0.019, 0.019, 0.04, 0.04, 0.041]
    sure, unsure = (story(facts(means, errors=[error] * 6), META) for error in (0.0001, 0.001))
    assert sure["sentences"][0].startswith("2 of 6 layers turn")
    assert unsure["sentences"][0] == (
        "No layer turns the residual stream by clearly less than 2 %; layer 2 of 6 turns it least, by 1.9 %."
    )
    for told in (sure, unsure):
        assert any("about as far as the median layer does (4.1 %): no jump." in text for text in told["sentences"])
        assert not any("times" in text for text in told["sentences"])


def test_the_most_unusual_is_said_first(monkeypatch) -> None:
    known = {"last_over_median": [1.0, 1.1, 1.2], "late_share": [0.5, 0.55, 0.6], "effective_depth": [0.9, 0.95, 1.0]}
    monkeypatch.setattr(reference, "of_measure", lambda measure, besides="": known.get(measure, []))
    measured = facts([0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.11], settled=[0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1, 1], depth=2)
    _, first, second = story(measured, META)["sentences"]
    assert first == "Layer 2 already has 95 % of the last layer’s accuracy."  # 0.25 where others have 0.9 to 1
    assert second.startswith("Half of all predictions are final after layer 1; 1 % change")


def test_how_unusual_a_number_is() -> None:
    known = np.array(reference.of_measure("zeta_L"))
    middle = np.median(known)
    expected = abs(30 - middle) / (1.4826 * np.median(np.abs(known - middle)))
    assert unusual("zeta_L", 30.0) == pytest.approx(expected)
    assert unusual("zeta_L", middle) == 0
    assert unusual("nothing known", 1.0) == 0
    own = next(row for row in references() if row.checkpoint and row.measure == "zeta_L")
    assert len(reference.of_measure("zeta_L", own.checkpoint)) == len(known) - 1  # not compared with itself


def test_reference_values_have_their_source() -> None:
    rows = references()
    assert {row.measure for row in rows} <= set(MEASURES)
    assert all(row.source and row.model and math.isfinite(row.value) for row in rows)
    keys = [(row.model, row.measure, row.source) for row in rows]
    assert len(set(keys)) == len(keys)
    published = {(row.model, row.measure): row.value for row in rows if "Table 1" in row.source}
    assert published["Llama-3.2-1B", "zeta_L"] == 20.6
    assert published["Qwen3-32B", "zeta_L-2"] == 9.36
    measured = facts([0.5, 0.01, 0.02, 0.04])
    made = rows_of({"model": {"name": "org/m", "num_layers": 4}, "data": {"name": "d"}}, numbers(measured), "M", "here")
    assert {row["measure"]: row["value"] for row in made} == {
        "zeta_L": 2.0,
        "idle_share": 0.25,
        "last_over_median": 2.0,
    }
    assert all(reference.Reference(**row).checkpoint == "org/m" for row in made)


@pytest.mark.parametrize(
    ("layers", "text"),
    [([3], "layer 3"), ([3, 4], "layers 3 and 4"), ([9, 2, 3, 4, 7], "layers 2 to 4, 7, 9")],
)
def test_layers_in_words(layers, text) -> None:
    assert spans(layers) == text


def test_the_strip_has_a_shade_for_every_number() -> None:
    strip = profile(facts([0.5, 0.005, 0.05, 0.0001], settled=[0, 0.5, 0.96, 1]))
    displacement, settled = strip["rows"]
    assert displacement["shades"] == [10, 0, 5, 0]  # a logarithmic scale from 0.005 to 0.5
    assert settled["shades"] == [0, 5, 10, 10]
    assert displacement["texts"][0] == "displacement 0.500"
    assert strip["idle"] == [2, 4]
    assert profile(Facts(tabulate([("cka", "residual", 1, 1, "biased", 1.0, 3, "1")]), 1)) is None


def test_models_without_blocks_to_search_are_compared() -> None:
    told = story(facts([0.1, 0.2]), {**META, "model": {"name": "m", "task": "representation"}})
    assert told["next"]["command"].startswith("fulldepth compare ")
    assert story(Facts(tabulate([("cka", "residual", 1, 1, "biased", 1.0, 3, "1")]), 1), META) is None
