"""Paired differences against loops over documents, simulations of two models on the same text, and what is said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fulldepth.comparison import compare
from fulldepth.comparison.paired import difference_errors, is_paired, step_interval
from fulldepth.results import Results, gathered, groups_entry, tabulate
from fulldepth.uncertainty import deal, quantile, ratio_error, ratio_influence

Array = np.ndarray[Any, Any]


def result(values: Array, weights: Array, documents: Array, measure: str = "displacement", step: int = 1) -> Results:
    """Results whose layer l has the mean of `values[:, l - 1]` over documents, as a measurement stores them.

    Args:
        values: sums of each document, `[C, L]`.
        weights: tokens of each document, `[C]`.
        documents: identity of each.
        measure: with the statistic `mean`.
        step: the smallest layer is this one.
    """
    group = deal(documents)
    count = int(group.max()) + 1
    sums = np.stack([values[group == g].sum(0) for g in range(count)])  # [G, L]
    totals = np.array([[weights[group == g].sum()] for g in range(count)])  # [G, 1]
    means, influence = sums.sum(0) / totals.sum(), ratio_influence(sums, totals)
    statistic = "cumulative" if measure == "saturation" else "mean"
    rows: list[tuple[Any, ...]] = []
    for layer, (mean, error) in enumerate(zip(means, ratio_error(sums, totals), strict=True), start=step):
        rows.append((measure, "residual", layer, None, statistic, mean, 10, "1"))
        rows.append((measure, "residual", layer, None, "standard_error", error, 10, "1"))
    entries = [(measure, "residual", layer, None, statistic, e) for layer, e in enumerate(influence.T, start=step)]
    meta = {
        "kind": "measure",
        "model": {"name": "toy", "num_layers": values.shape[1]},
        "data": {"name": "text", "hash": "sha256:aa"},
        "groups": groups_entry(documents.tolist(), "document"),
        "headline": {},
    }
    return Results(tabulate(rows), meta, gathered(entries, count))


def two_models(rng: np.random.Generator, difference: float, count: int = 120, layers: int = 1) -> tuple[Any, ...]:
    """Two models on the same documents: the difficulty of a document is common, and ten times as large as the rest."""
    weights = rng.integers(20, 400, count).astype(float)
    common = rng.normal(0, 0.1, (count, 1))
    rates = [level + common + rng.normal(0, 0.006, (count, layers)) for level in (0.3, 0.3 + difference)]
    documents = rng.integers(0, 1 << 60, count)
    return (*(rate * weights[:, None] for rate in rates), weights, documents)


def coverage(trials: int) -> tuple[float, float]:
    """Share of 95 % intervals that hold the true difference, over 40 layers with noise of their own in each trial, and
    the paired error relative to the unpaired.
    """
    rng, held, ratios = np.random.default_rng(0), [], []
    for _ in range(trials):
        first, second, weights, documents = two_models(rng, 0.004, layers=40)
        base, other = result(first, weights, documents), result(second, weights, documents)
        values, errors = (
            [one.table["value"].to_numpy()[start::2] for one in (base, other)] for start in (0, 1)
        )  # [40] each
        paired = difference_errors(other, base, "layer")[::2]
        held += list(np.abs(values[1] - values[0] - 0.004) <= quantile(32) * paired)
        ratios += list(paired / np.hypot(*errors))
    return float(np.mean(held)), float(np.median(ratios))


def test_the_paired_interval_holds_the_true_difference_and_is_narrow() -> None:
    share, ratio = coverage(15)
    assert 0.90 <= share <= 0.98
    assert ratio < 0.2


@pytest.mark.thorough
def test_the_paired_interval_over_many_draws() -> None:
    share, _ = coverage(150)
    assert 0.935 <= share <= 0.965


def test_the_paired_error_is_the_cluster_formula_over_documents() -> None:
    """SPEC: sqrt(C / (C - 1) sum_c d_c^2) with d_c the difference of the documents' residuals, one loop in float64."""
    first, second, weights, documents = two_models(np.random.default_rng(1), 0.01, count=20, layers=3)
    other, base = result(second, weights, documents), result(first, weights, documents)
    errors = difference_errors(other, base, "layer")[::2]
    for layer in range(3):
        total = sum(float(w) for w in weights)
        means = [sum(float(s) for s in sums[:, layer]) / total for sums in (first, second)]
        squares = 0.0
        for c in range(20):
            own = (float(second[c, layer]) - means[1] * float(weights[c])) / total
            squares += (own - (float(first[c, layer]) - means[0] * float(weights[c])) / total) ** 2
        assert errors[layer] == pytest.approx(math.sqrt(20 / 19 * squares), rel=1e-5)


def test_a_difference_of_twenty_standard_errors_is_found() -> None:
    """The independent formula, sqrt(s^2 + s_0^2), hides it."""
    first, second, weights, documents = two_models(np.random.default_rng(2), 0.02, layers=4)
    base, other = result(first, weights, documents), result(second, weights, documents)
    found = compare([base, other], names=["a", "b"])
    rows = found.table[(found.table.model == "b") & (found.table.statistic == "mean")]
    errors = found.table[found.table.statistic == "standard_error"].groupby("layer")["value"].agg(np.linalg.norm)
    assert (rows["difference"].abs().to_numpy() < 2 * errors.to_numpy()).all(), "what the old sentence rested on"
    assert (rows["difference"] / rows["difference_error"]).min() > 15
    assert "at 4 of 4 layers" in found.headline["redundancy_change:b"]["sentence"]
    assert [model.get("paired") for model in found.meta["models"]] == [None, True]
    bars = found.figures()["difference_displacement"].data[0].error_y.array
    np.testing.assert_allclose(bars, 2 * rows["difference_error"])


def test_a_model_does_not_differ_from_itself_and_noise_is_not_called_a_difference() -> None:
    first, second, weights, documents = two_models(np.random.default_rng(3), 0.0, layers=4)
    base, other = result(first, weights, documents), result(second, weights, documents)
    same, noise = (compare([base, one], names=["a", "b"]).headline for one in (base, other))
    assert same["redundancy_change:b"]["sentence"] == "Displacement in b and a: no difference at any of 4 layers."
    assert "no measurable difference at any of 4 layers (paired, at most 0." in noise["redundancy_change:b"]["sentence"]
    assert "greatest_redundancy_change:b" not in noise


def test_layers_of_one_sentence_share_its_risk() -> None:
    """Of 40 layers without a difference, two standard errors alone call two different; Holm's gate calls none."""
    called = plain = 0
    for seed in range(10):
        first, second, weights, documents = two_models(np.random.default_rng(seed), 0.0, layers=40)
        base, other = result(first, weights, documents), result(second, weights, documents)
        found = compare([base, other], names=["a", "b"])
        rows = found.table[(found.table.model == "b") & (found.table.statistic == "mean")]
        plain += int((rows["difference"].abs() > 2 * rows["difference_error"]).sum())
        called += "no measurable difference at any" not in found.headline["redundancy_change:b"]["sentence"]
    assert plain > 10
    assert called <= 2


def test_other_text_is_unpaired() -> None:
    first, second, weights, documents = two_models(np.random.default_rng(4), 0.02)
    base, other = result(first, weights, documents), result(second, weights, documents + 1)
    assert not is_paired(other, base)
    error = difference_errors(other, base, "layer")[0]
    assert error == pytest.approx(math.hypot(base.table["value"][1], other.table["value"][1]))
    found = compare([base, other], names=["a", "b"])
    assert "(unpaired, at most" in found.headline["redundancy_change:b"]["sentence"]
    assert found.meta["models"][1]["paired"] is False
    without = Results(base.table, base.meta)
    assert not is_paired(result(second, weights, documents), without), "a folder of an earlier version"


def test_identities_that_are_numbers_belong_to_one_text() -> None:
    assert groups_entry(range(9), "row", "sha256:a") != groups_entry(range(9), "row", "sha256:b")
    assert groups_entry([5, 3, 5, 4], "document") == groups_entry([4, 3, 5], "document")
    assert groups_entry([5, 3], "document")["clusters"] == 2
    assert groups_entry(range(100), "row")["count"] == 32


def test_influences_are_interpolated_like_the_values() -> None:
    """A model of 6 layers against one of 3: the error of what the difference is, document by document."""
    rng = np.random.default_rng(5)
    deep, _, weights, documents = two_models(rng, 0.0, count=24, layers=6)
    shallow = deep[:, 1::2] + rng.normal(0, 1.0, (24, 3))
    found = difference_errors(result(deep, weights, documents), result(shallow, weights, documents), "relative")[::2]
    at = np.clip(np.arange(1, 7) / 2, 1, 3)
    base = np.stack([np.interp(at, [1, 2, 3], row) for row in shallow])
    np.testing.assert_allclose(found, ratio_error(deep - base, weights[:, None]), rtol=1e-5)


def curves(rng: np.random.Generator, shift: int, count: int = 60, layers: int = 16) -> tuple[Array, Array, Array]:
    """Documents whose accuracy rises to 0.5 at layer 8 + `shift`, by 0.05 a layer."""
    weights = rng.integers(50, 300, count).astype(float)
    rate = np.clip(0.5 - 0.05 * (8 + shift - np.arange(1, layers + 1)), 0, 0.5)
    return rate, weights, rng.integers(0, 1 << 60, count)


def depths(seed: int, shift: int = 2) -> tuple[Results, Results]:
    """Two models on the same documents; layer 8 and layer 8 + `shift` are the first with 95 % of the accuracy."""
    rng = np.random.default_rng(seed)
    rate, weights, documents = curves(rng, 0)
    later, *_ = curves(rng, shift)
    common = rng.normal(0, 0.1, (len(weights), 1)) + rng.normal(0, 0.02, (len(weights), len(rate)))
    noise = [rng.normal(0, 0.01, common.shape) for _ in range(2)]
    own, other = (
        result((one + common + e) * weights[:, None], weights, documents, "lens_accuracy")
        for one, e in zip((rate, later), noise, strict=True)
    )
    return own, other


def test_the_interval_of_a_difference_of_depths() -> None:
    held, wide = 0, []
    for seed in range(30):
        base, other = depths(seed)
        interval = step_interval("effective_depth", other, base)
        assert interval is not None
        assert interval.paired
        held += interval.low <= 2 <= interval.high
        wide.append(interval.high - interval.low)
    assert held >= 27
    assert np.median(wide) <= 2
    base, _ = depths(0)
    assert step_interval("effective_depth", base, base) == (0, 0, True)
    assert step_interval("median_saturation", base, base) is None, "not measured"


def test_depths_of_different_text_have_the_interval_of_independent_ones() -> None:
    def one(value: float, low: float, high: float) -> Results:
        rows = [
            ("effective_depth", "residual", None, None, name, number, 10, "layers")
            for name, number in zip(
                ("relative_eps=0.05", "low_of_relative_eps=0.05", "high_of_relative_eps=0.05"),
                (value, low, high),
                strict=True,
            )
        ]
        headline = {"effective_depth": {"value": value, "unit": "layers", "interval": [low, high]}}
        return Results(tabulate(rows), {"kind": "measure", "model": {"num_layers": 30}, "headline": headline})

    base, other = one(10, 7, 11), one(20, 16, 23)
    assert step_interval("effective_depth", other, base) == (10 - math.hypot(4, 1), 10 + math.hypot(3, 3), False)
    found = compare([base, other], names=["a", "b"]).headline["effective_depth:b"]
    assert found["interval"] == [pytest.approx(10 - math.hypot(4, 1)), pytest.approx(10 + math.hypot(3, 3))]


def test_the_last_layers_predictions_are_compared_too() -> None:
    base, other = depths(1)
    found = compare([base, other], names=["a", "b"]).headline["last_layer_accuracy:b"]
    rows = [one.table[one.table.layer == 16].set_index("statistic")["value"] for one in (other, base)]
    assert found["value"] == pytest.approx(rows[0]["mean"] - rows[1]["mean"])
    assert found["standard_error"] < 0.2 * math.hypot(*(row["standard_error"] for row in rows))
    assert "paired" in found["sentence"]


def test_the_last_step_of_a_series_is_paired(tmp_path: Path) -> None:
    first, second, weights, documents = two_models(np.random.default_rng(6), 0.02)
    base, early, late = (result(sums, weights, documents) for sums in (first, first * 2, second))
    steps = [{"step": step, "model": base.meta["model"], "headline": {}} for step in (10, 20)]
    tables, influences = (
        pd.concat([frame.assign(step=10 * n) for n, frame in enumerate(frames, start=1)], ignore_index=True)
        for frames in ((early.table, late.table), (early.influences, late.influences))
    )
    series = Results(tables, {**base.meta, "steps": steps}, influences)
    series = Results.load(series.save(tmp_path, page=False))
    found = compare([base, series], names=["a", "b"])
    wanted = difference_errors(late, base, "layer")
    np.testing.assert_allclose(found.table.loc[found.table.model == "b", "difference_error"], wanted)
