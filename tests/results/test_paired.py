"""Paired differences against loops over documents, simulations of two models on the same text, and what is said."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from fulldepth.core.uncertainty import Difference, deal, quantile, ratio_error, ratio_influence
from fulldepth.results import Results, difference_in_words, gathered, groups_entry, tabulate
from fulldepth.results.differences import difference_errors, is_paired, step_interval
from marks import thorough
from metrics.oracle import of_ratio
from reporting.synthetic import row, versus


def result(values, weights, documents, measure="displacement", step=1):
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
    rows = []
    for layer, (mean, error) in enumerate(zip(means, ratio_error(sums, totals), strict=True), start=step):
        rows.append(row(measure, layer, mean, statistic))
        rows.append(row(measure, layer, error, "standard_error"))
    entries = [(measure, "residual", layer, None, statistic, e) for layer, e in enumerate(influence.T, start=step)]
    meta = {
        "kind": "measure",
        "model": {"name": "toy", "num_layers": values.shape[1]},
        "data": {"name": "text", "hash": "sha256:aa"},
        "groups": groups_entry(documents.tolist(), "document"),
        "headline": {},
    }
    return Results(tabulate(rows), meta, gathered(entries, count))


def two_models(seed, difference, count=120, layers=1):
    """Two models on the same documents: the difficulty of a document is common, and ten times as large as the rest.

    Returns:
        Their results, the sums of documents, the weights and the identities of documents.
    """
    rng = np.random.default_rng(seed)
    weights = rng.integers(20, 400, count).astype(float)
    common = rng.normal(0, 0.1, (count, 1))
    rates = [level + common + rng.normal(0, 0.006, (count, layers)) for level in (0.3, 0.3 + difference)]
    documents = rng.integers(0, 1 << 60, count)
    sums = [rate * weights[:, None] for rate in rates]
    return *(result(one, weights, documents) for one in sums), sums, weights, documents


@pytest.mark.parametrize(("trials", "least", "most"), [(15, 0.90, 0.98), thorough(150, 0.935, 0.965)])
def test_the_paired_interval_holds_the_true_difference_and_is_narrow(trials, least, most):
    """Over 40 layers with noise of their own in each trial."""
    held, ratios = [], []
    for seed in range(trials):
        base, other, *_ = two_models(seed, 0.004, layers=40)
        (first, s), (second, t) = (one.table["value"].to_numpy().reshape(-1, 2).T for one in (base, other))  # [40] each
        paired = difference_errors(other, base, "layer")[::2]
        held += list(np.abs(second - first - 0.004) <= quantile(32) * paired)
        ratios += list(paired / np.hypot(s, t))
    assert least <= np.mean(held) <= most
    assert np.median(ratios) < 0.2


def test_the_paired_error_is_the_cluster_formula_over_documents():
    """SPEC: sqrt(C / (C - 1) sum_c d_c^2) with d_c the difference of the documents' residuals, one loop in float64."""
    base, other, (first, second), weights, documents = two_models(1, 0.01, count=20, layers=3)
    expected = [of_ratio(documents, difference, weights) for difference in (second - first).T]
    assert_allclose(difference_errors(other, base, "layer")[::2], expected, rtol=1e-5)


def test_a_difference_of_twenty_standard_errors_is_found():
    """The independent formula, sqrt(s^2 + s_0^2), hides it."""
    base, other, *_ = two_models(2, 0.02, layers=4)
    found = versus(base, other)
    rows = found.table.query("model == 'b' and statistic == 'mean'")
    errors = found.table[found.table.statistic == "standard_error"].groupby("layer")["value"].agg(np.linalg.norm)
    assert (rows["difference"].abs().to_numpy() < 2 * errors.to_numpy()).all(), "what the old sentence rested on"
    assert (rows["difference"] / rows["difference_error"]).min() > 15
    assert "at 4 of 4 layers" in found.headline["redundancy_change:b"]["sentence"]
    assert [model.get("paired") for model in found.meta["models"]] == [None, True]
    bars = found.figures()["difference_displacement"].data[0].error_y.array
    assert_allclose(bars, 2 * rows["difference_error"])


def test_layers_of_one_sentence_share_its_risk():
    """Of 40 layers without a difference, two standard errors alone call two different; Holm's gate calls none."""
    called = plain = 0
    for seed in range(10):
        base, other, *_ = two_models(seed, 0.0, layers=40)
        found = versus(base, other)
        rows = found.table.query("model == 'b' and statistic == 'mean'")
        plain += int((rows["difference"].abs() > 2 * rows["difference_error"]).sum())
        called += "no measurable difference at any" not in found.headline["redundancy_change:b"]["sentence"]
    assert plain > 10
    assert called <= 2


def test_other_text_is_unpaired():
    base, _, sums, weights, documents = two_models(4, 0.02)
    other = result(sums[1], weights, documents + 1)
    error = difference_errors(other, base, "layer")[0]
    assert error == pytest.approx(math.hypot(base.table["value"][1], other.table["value"][1]))
    found = versus(base, other)
    assert "(unpaired, at most" in found.headline["redundancy_change:b"]["sentence"]
    assert found.meta["models"][1]["paired"] is False
    without = Results(base.table, base.meta)
    assert not is_paired(result(sums[1], weights, documents), without), "a folder of an earlier version"


def test_identities_that_are_numbers_belong_to_one_text():
    assert groups_entry(range(9), "row", "sha256:a") != groups_entry(range(9), "row", "sha256:b")
    assert groups_entry([5, 3, 5, 4], "document") == groups_entry([4, 3, 5], "document")
    assert [groups_entry(range(100), "row")[name] for name in ("count", "clusters")] == [32, 100]


def test_influences_are_interpolated_like_the_values():
    """A model of 6 layers against one of 3: the error of what the difference is, document by document."""
    six, _, (deep, _), weights, documents = two_models(5, 0.0, count=24, layers=6)
    shallow = deep[:, 1::2] + np.random.default_rng(5).normal(0, 1.0, (24, 3))
    found = difference_errors(six, result(shallow, weights, documents), "relative")[::2]
    at = np.clip(np.arange(1, 7) / 2, 1, 3)
    base = np.stack([np.interp(at, [1, 2, 3], row) for row in shallow])
    assert_allclose(found, ratio_error(deep - base, weights[:, None]), rtol=1e-5)


@pytest.mark.parametrize("depth", ["layer", "relative"])
def test_the_error_of_last_layers_is_that_of_last_layers(depth):
    """A model of 4 layers against one of 6: its layer 4 is compared with layer 6, and not with layer 4."""
    six, _, (deep, _), weights, documents = two_models(6, 0.0, count=24, layers=6)
    shallow = deep[:, [0, 2, 3, 5]] + np.random.default_rng(6).normal(0, 1.0, (24, 4))
    found = versus(six, result(shallow, weights, documents), depth=depth).headline["last_layer_displacement:b"]
    assert found["value"] == pytest.approx((shallow[:, 3] - deep[:, 5]).sum() / weights.sum())
    assert found["standard_error"] == pytest.approx(of_ratio(documents, shallow[:, 3] - deep[:, 5], weights), rel=1e-5)


def depths(seed, shift=2):
    """Two models on the same 60 documents; their accuracy rises to 0.5 at layer 8 and layer 8 + `shift`."""
    rng = np.random.default_rng(seed)
    weights, documents = rng.integers(50, 300, 60).astype(float), rng.integers(0, 1 << 60, 60)
    common = rng.normal(0, 0.1, (60, 1)) + rng.normal(0, 0.02, (60, 16))
    own, other = (
        np.clip(0.5 - 0.05 * (first - np.arange(1, 17)), 0, 0.5) + common + rng.normal(0, 0.01, (60, 16))
        for first in (8, 8 + shift)
    )
    base, later = (result(rate * weights[:, None], weights, documents, "lens_accuracy") for rate in (own, other))
    return base, later


def test_the_interval_of_a_difference_of_depths():
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


def test_depths_of_different_text_have_the_interval_of_independent_ones():
    def one(value, low, high):
        stated = {"": value, "low_of_": low, "high_of_": high}
        rows = [
            row("effective_depth", None, number, f"{kind}relative_eps=0.05", unit="layers")
            for kind, number in stated.items()
        ]
        headline = {"effective_depth": {"value": value, "unit": "layers", "interval": [low, high]}}
        return Results(tabulate(rows), {"kind": "measure", "model": {"num_layers": 30}, "headline": headline})

    base, other = one(10, 7, 11), one(20, 16, 23)
    assert step_interval("effective_depth", other, base) == (10 - math.hypot(4, 1), 10 + math.hypot(3, 3), False)
    found = versus(base, other).headline["effective_depth:b"]
    assert found["interval"] == [pytest.approx(10 - math.hypot(4, 1)), pytest.approx(10 + math.hypot(3, 3))]


def test_the_last_layers_predictions_are_compared_too():
    base, other = depths(1)
    found = versus(base, other).headline["last_layer_accuracy:b"]
    rows = [one.table[one.table.layer == 16].set_index("statistic")["value"] for one in (other, base)]
    assert found["value"] == pytest.approx(rows[0]["mean"] - rows[1]["mean"])
    assert found["standard_error"] < 0.2 * math.hypot(*(row["standard_error"] for row in rows))
    assert "paired" in found["sentence"]


def test_a_series_enters_with_its_last_step_which_is_paired(tmp_path):
    base, late, (first, _), weights, documents = two_models(6, 0.02)
    early = result(2 * first, weights, documents)
    models = [{**base.meta["model"], "name": f"checkpoint-{step}"} for step in (10, 20)]
    steps = [{"step": 10 * n, "model": model, "headline": {}} for n, model in enumerate(models, start=1)]
    tables, influences = (
        pd.concat([frame.assign(step=10 * n) for n, frame in enumerate(frames, start=1)], ignore_index=True)
        for frames in ((early.table, late.table), (early.influences, late.influences))
    )
    series = Results(tables, {**base.meta, "steps": steps}, influences)
    found = versus(base, Results.load(series.save(tmp_path, page=False)))
    rows = found.table[found.table.model == "b"]
    assert_allclose(rows["difference_error"], difference_errors(late, base, "layer"))
    assert rows["difference"].iloc[0] == pytest.approx(late.table["value"][0] - base.table["value"][0])
    assert "step" not in found.table
    assert found.meta["models"][1]["model"]["name"] == "checkpoint-20"
    assert any("step 20" in line for line in found.meta["warnings"])


@pytest.mark.parametrize(
    ("mean", "error", "documents", "measurable"),
    [
        (-0.0199, 0.01, 10_000, False),
        (-0.0201, 0.01, 10_000, True),
        (0.0330, 0.01, 4, False),  # Student's t of three degrees: 3.307 errors
        (0.0331, 0.01, 4, True),
        (0.0242, 0.01, 8, False),  # of seven degrees: 2.429 errors
        (0.0243, 0.01, 8, True),
        (0.0, 0.0, 30, False),
        (0.04, math.inf, 2, False),
    ],
)
def test_the_verdict_is_gated_by_errors_of_students_t(mean, error, documents, measurable):
    gap = Difference(mean, 0.0, error, 2 * documents, documents, 0.0)
    assert gap.measurable is measurable
    words = difference_in_words(gap, "original", "rows")
    assert "documents" not in words
    assert measurable is ("standard error" in words)
    assert (words == "no difference from original, in none of 30 rows") is (mean == error)


def test_a_number_without_influences_is_compared_unpaired():
    """Its errors are known of each model alone; they are of independent numbers, and the sentence says so."""
    base, other, *_ = two_models(6, 0.02)
    mean = "mean_corrected_of_layers"
    for results, value, error in ((base, 0.5, 0.03), (other, 0.7, 0.04)):
        rows = [row("coherence", None, value, mean), row("coherence", None, error, f"standard_error_of_{mean}")]
        results.table = pd.concat([results.table, tabulate(rows)], ignore_index=True)
    compared = versus(base, other)
    finding = compared.headline["mean_coherence:b"]
    assert finding["standard_error"] == pytest.approx(0.05)
    assert "unpaired difference +0.2 ± 0.05" in finding["sentence"]
    assert compared.headline["last_layer_displacement:b"]["standard_error"] < 0.2 * base.table["value"][1], "paired"


def test_a_paired_score_is_measurable_by_its_groups_not_by_its_examples():
    """Its error is of 32 groups, so that Student's t asks for 2.08 of them; of 1,000 examples it would be 2.00."""
    rng = np.random.default_rng(7)
    examples = np.arange(1000)
    group = deal(examples)
    base_scores, noise = rng.integers(0, 2, 1000).astype(float), rng.normal(0, 1, 1000)
    per_group = np.bincount(group).astype(float)

    def scored(values, label):
        sums = np.bincount(group, values)
        score = row("task_score", 1, values.mean(), "acc", "arc", count=1000)
        error = row("task_score", 1, float(ratio_error(sums, per_group)), "acc_stderr", "arc", count=1000)
        influences = [("task_score", "arc", 1, None, "acc", ratio_influence(sums, per_group))]
        meta = {
            "kind": "evaluation",
            "model": {"name": label, "num_layers": 1, "hash": f"sha256:{label}"},
            "tasks": {"arc": {"metric": "acc", "count": 1000, "examples": "sha256:e"}},
            "groups": groups_entry(examples.tolist(), "example"),
            "headline": {},
        }
        return Results(tabulate([score, error]), meta, gathered(influences, 32))

    error = float(ratio_error(np.bincount(group, noise), per_group))
    for size, is_measurable in ((2.05, False), (2.12, True)):
        gap = noise - noise.mean() + size * error
        finding = versus(scored(base_scores, "a"), scored(base_scores + gap, "b")).headline["score arc:b"]
        assert finding["standard_error"] == pytest.approx(error, rel=1e-4)
        assert ("no measurable difference (paired" in finding["sentence"]) is not is_measurable
