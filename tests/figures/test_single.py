"""The figures of one model: what is drawn are the table's numbers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from fulldepth import figures
from fulldepth.results import tabulate


@pytest.fixture(scope="module")
def results(synthetic):
    return synthetic.language_model()


@pytest.fixture(scope="module")
def drawn(results):
    return results.figures()


def traces(figure):
    return {trace.name: trace for trace in figure.data}


def column(table, measure, statistic, site="residual", other=None):
    rows = table[(table.measure == measure) & (table.statistic == statistic) & (table.site == site)]
    if other is not None:
        rows = rows[rows.other == other]
    return rows.sort_values("layer")


def test_the_reading_order(drawn):
    expected = [
        "displacement", "jump_rate", "cosine", "cka", "cosine_to_last", "cosine_spread", "cosine_against_cka",
        "lens_accuracy", "lens_loss", "saturation", "effective_depth",
        "coherence", "coherence_effective", "coherence_bins", "norm_ratio", "renyi_entropy",
        "spectral_norm", "separability",
    ]  # fmt: skip
    assert [name for name in drawn if ":" not in name] == expected


@pytest.mark.parametrize(
    ("figure", "trace", "measure", "statistic", "site", "other"),
    [
        ("displacement", "Mean", "displacement", "mean", "residual", None),
        ("displacement:log", "Mean without first token", "displacement", "mean:no-first", "residual", None),
        ("displacement:log", "Last layer after the final norm", "displacement", "mean", "final_normed", None),
        ("jump_rate", "ζ", "jump_rate", "value", "residual", None),
        ("cosine_to_last", "Centred, mean", "cosine", "mean", "residual", 12),
        ("cosine_to_last", "Raw, mean", "cosine", "mean_raw", "residual", 12),
        ("lens_accuracy", "Accuracy", "lens_accuracy", "mean", "residual", None),
        ("lens_loss", "Loss", "lens_loss", "mean", "residual", None),
        ("saturation", "Settle at this layer", "saturation", "share", "residual", None),
        ("saturation", "Settled so far", "saturation", "cumulative", "residual", None),
        ("coherence", "Attention sub-layer", "coherence", "mean_corrected", "attention", None),
        ("coherence", "Whole layer", "coherence", "mean_corrected", "residual", None),
        ("coherence_effective", "Whole layer", "coherence", "share_0.3_0.7", "residual", None),
        ("coherence_bins", "0.7–0.8", "coherence", "bin_7", "residual", None),
        ("coherence_bins:attention", "0.2–0.3", "coherence", "bin_2", "attention", None),
        ("norm_ratio", "Without first token", "norm_ratio", "mean:no-first", "residual", None),
        ("renyi_entropy", "Value states, α = 1", "renyi_entropy", "mean:plain:1", "value", None),
        ("spectral_norm", "mlp.down_proj", "spectral_norm", "value", "mlp.down_proj", None),
        ("separability", "Residual stream", "separability", "mean", "residual", None),
    ],
)
def test_a_line_is_the_table(results, drawn, figure, trace, measure, statistic, site, other):
    rows = column(results.table, measure, statistic, site, other)
    assert len(rows) > 0
    line = traces(drawn[figure])[trace]
    assert list(line.x) == rows.layer.tolist()
    assert list(line.y) == rows.value.tolist()


def test_the_band_runs_from_p05_to_p95(results, drawn):
    upper, lower = drawn["displacement"].data[:2]
    assert list(upper.y) == column(results.table, "displacement", "p95").value.tolist()
    assert list(lower.y) == column(results.table, "displacement", "p05").value.tolist()
    assert lower.fill == "tonexty"
    assert [end for (end,) in lower.customdata] == list(upper.y)


@pytest.mark.parametrize(
    ("name", "measure", "statistic", "low"),
    [
        ("cosine", "cosine", "mean", -1),
        ("cosine:mean_raw:no-first", "cosine", "mean_raw:no-first", -1),
        ("cka", "cka", "debiased", 0),
        ("cka:biased", "cka", "biased", 0),
    ],
)
def test_a_map_is_the_table_with_a_fixed_range(results, drawn, name, measure, statistic, low):
    (cells,) = drawn[name].data
    rows = results.table[(results.table.measure == measure) & (results.table.statistic == statistic)]
    expected = np.full((13, 13), math.nan)
    expected[rows.layer.astype(int), rows.other.astype(int)] = rows.value
    np.testing.assert_array_equal(np.array(cells.z), expected)
    assert (cells.zmin, cells.zmax) == (low, 1)
    assert drawn[name].layout.yaxis.autorange != "reversed"


def test_a_map_completes_pairs_given_in_one_order():
    rows = [("cka", "residual", a, b, "debiased", 1.0 - 0.1 * (b - a), 8, "1") for a in range(3) for b in range(a, 3)]
    (cells,) = figures.build(tabulate(rows), {})["cka"].data
    np.testing.assert_allclose(np.array(cells.z), [[1, 0.9, 0.8], [0.9, 1, 0.9], [0.8, 0.9, 1]])


def test_counts_are_in_the_hover_boxes(drawn):
    mean = traces(drawn["displacement"])["Mean"]
    assert list(mean.customdata[0]) == ["Layer 1", "16,384"]
    assert "n = %{customdata[1]}" in mean.hovertemplate
    assert "n = 2,048" in drawn["cosine"].data[0].hovertemplate
    settle = traces(drawn["saturation"])["Settle at this layer"]
    assert settle.customdata[8][1].endswith(" of 16,320")


def test_axes_are_honest(drawn):
    for name in ("displacement", "jump_rate", "lens_accuracy", "lens_loss", "renyi_entropy", "spectral_norm"):
        assert drawn[name].layout.yaxis.rangemode == "tozero", name
    for name in ("coherence", "saturation", "separability", "coherence_bins"):
        assert drawn[name].layout.yaxis.range[0] == 0, name
        assert 1 <= drawn[name].layout.yaxis.range[1] <= 1.05, name
    assert drawn["jump_rate"].layout.yaxis.ticksuffix == " %"
    assert drawn["norm_ratio"].layout.yaxis.type == "log"
    assert "log scale" in drawn["norm_ratio"].layout.title.subtitle.text


def test_effective_depth_by_tolerance(drawn):
    (relative,) = drawn["effective_depth"].data  # the absolute depths are all L: nothing is good enough before it
    assert (list(relative.x), list(relative.y)) == (["ε = 0.05"], [11])


def test_the_summary_names_the_extremes(drawn):
    assert drawn["displacement"].layout.meta["alt"] == (
        "Mean displacement: lowest 0.019 at layer 10, highest 0.265 at layer 12."
    )
    assert "Half of all positions have settled by layer 9." in drawn["saturation"].layout.meta["alt"]


def test_labelled_data(synthetic):
    results = synthetic.classifier()
    drawn = results.figures()
    assert "separability" not in drawn
    (collapse,) = drawn["nc1"].data
    np.testing.assert_allclose(collapse.y, [40 * math.exp(-layer) for layer in range(7)])
    assert drawn["nc1"].layout.yaxis.type == "log"


def test_only_what_the_table_has(synthetic):
    drawn = synthetic.minimal().figures()
    assert list(drawn) == ["displacement", "displacement:log"]
    (mean,) = drawn["displacement"].data
    np.testing.assert_allclose(mean.y, [0.1, 0.2, 0.3])
    assert figures.build(tabulate([]), {}) == {}


@pytest.mark.parametrize("measure", ["displacement", "cosine", "cka", "saturation", "coherence", "renyi_entropy"])
def test_any_measure_may_be_missing(results, measure):
    table = results.table[results.table.measure != measure]
    drawn = figures.build(table, results.meta)
    whole = results.figures()
    assert set(drawn) < set(whole)
    gone = set(whole) - set(drawn)
    assert ("cosine_against_cka" in gone) is (measure in ("cosine", "cka")), "this figure needs both"
    assert {name.split("_")[0].split(":")[0] for name in gone - {"cosine_against_cka"}} == {measure.split("_")[0]}


def test_nan_leaves_a_gap_and_nothing_but_nan_leaves_no_figure(results):
    table = results.table.copy()
    table.loc[(table.measure == "displacement") & (table.layer == 5), "value"] = math.nan
    table.loc[(table.measure == "cka") & (table.layer == 2), "value"] = math.nan
    table.loc[table.measure == "norm_ratio", "value"] = math.nan
    table.loc[(table.measure == "lens_loss") & (table.layer == 0), "value"] = math.inf
    drawn = figures.build(table, results.meta)
    assert traces(drawn["displacement"])["Mean"].y[4] is None
    assert list(drawn["cka"].data[0].z[2]) == [None] * 13
    assert drawn["lens_loss"].data[0].y[0] is None
    assert "norm_ratio" not in drawn
    assert "NaN" not in drawn["displacement"].to_json()


@pytest.mark.parametrize("missing", ["count", "layer"])
def test_missing_cells_do_not_break(results, missing):
    table = results.table.copy()
    table.loc[::3, missing] = pd.NA
    assert len(figures.build(table, results.meta)) > 10


def test_layer_one_does_not_flatten_the_rest():
    """The axis ends above layers 2 to L; layer 1 is written beside it, and everything is in the logarithmic reading."""
    means = [0.5, 0.02, 0.03, 0.01, 0.14]
    rows = [("displacement", "residual", at, None, "mean", mean, 8, "1") for at, mean in enumerate(means, start=1)]
    drawn = figures.build(tabulate(rows), {"model": {"num_layers": 5}})
    low, high = drawn["displacement"].layout.yaxis.range
    assert low == 0
    assert 0.14 < high < 0.2
    (note,) = drawn["displacement"].layout.annotations
    assert (note.x, note.text) == (1, "↑ Layer 1: 0.5")
    assert list(traces(drawn["displacement:log"])["Mean"].y) == means
    assert drawn["displacement:log"].layout.yaxis.type == "log"
    even = figures.build(tabulate([(*row[:5], 0.1, *row[6:]) for row in rows]), {})
    assert even["displacement"].layout.yaxis.range is None
    assert not even["displacement"].layout.annotations


def test_depths_that_are_l_by_definition_are_no_figure():
    rows = [("effective_depth", "residual", None, None, f"eps={eps}", 4.0, 8, "layers") for eps in (0.05, 0.1)]
    assert "effective_depth" not in figures.build(tabulate(rows), {"model": {"num_layers": 4}})
    assert "effective_depth" in figures.build(tabulate(rows), {"model": {"num_layers": 5}})
