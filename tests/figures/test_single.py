"""The figures of one model: what is drawn are the table's numbers."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from figures import synthetic
from fulldepth import figures
from fulldepth.figures.record import mathml
from fulldepth.results import tabulate


@pytest.fixture(scope="module")
def results():
    return synthetic.language_model()


@pytest.fixture(scope="module")
def drawn(results):
    return results.figures()


def traces(figure):
    return {trace.name: trace for trace in figure.data}


def test_the_reading_order(drawn):
    assert [name for name in drawn if ":" not in name] == [
        "displacement", "jump_rate", "cosine", "cka", "cosine_to_last", "lens_accuracy", "lens_loss", "saturation",
        "coherence", "coherence_effective", "norm_ratio", "renyi_entropy", "spectral_norm", "separability",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("figure", "trace", "measure", "statistic", "site"),
    [
        ("displacement", "Mean", "displacement", "mean", "residual"),
        ("displacement:log", "Mean without first token", "displacement", "mean:no-first", "residual"),
        ("displacement:log", "Last layer after the final norm", "displacement", "mean", "final_normed"),
        ("jump_rate", "ζ", "jump_rate", "value", "residual"),
        ("cosine_to_last", "Raw, mean", "cosine", "mean_raw", "residual"),
        ("lens_accuracy", "Accuracy", "lens_accuracy", "mean", "residual"),
        ("lens_loss", "Loss", "lens_loss", "mean", "residual"),
        ("saturation", "Settle at this layer", "saturation", "share", "residual"),
        ("saturation", "Settled so far", "saturation", "cumulative", "residual"),
        ("coherence", "Attention sub-layer", "coherence", "mean_corrected", "attention"),
        ("coherence_effective", "Whole layer", "coherence", "share_0.3_0.7", "residual"),
        ("norm_ratio", "Without first token", "norm_ratio", "mean:no-first", "residual"),
        ("renyi_entropy", "Value states, α = 1", "renyi_entropy", "mean:plain:1", "value"),
        ("spectral_norm", "mlp.down_proj", "spectral_norm", "value", "mlp.down_proj"),
        ("separability", "Residual stream", "separability", "mean", "residual"),
    ],
)
def test_a_line_is_the_table(results, drawn, figure, trace, measure, statistic, site):
    table = results.table
    rows = table[(table.measure == measure) & (table.statistic == statistic) & (table.site == site)].sort_values(
        "layer"
    )
    if measure == "cosine":
        rows = rows[rows.other == 12]
    line = traces(drawn[figure])[trace]
    assert list(line.x) == rows.layer.tolist() != []
    assert list(line.y) == rows.value.tolist()


def test_bands_and_error_bars(results, drawn):
    low, high = (results.values("displacement", name, "residual").tolist() for name in ("p05", "p95"))
    upper, lower = drawn["displacement"].data[:2]
    assert (list(lower.y), list(upper.y), lower.fill) == (low, high, "tonexty")
    spread = traces(drawn["separability"])["Residual stream"]
    assert list(spread.error_y.array) == [0.04] * 13
    assert spread.customdata[3] == ["Layer 3", "400", 0.04]
    assert spread.hovertemplate == "%{y:.1%}  (n = %{customdata[1]}) ± %{customdata[2]:.1%}"
    assert traces(drawn["displacement"])["Mean"].customdata[0] == ["Layer 1", "16,384"]


@pytest.mark.parametrize(
    ("name", "measure", "statistic", "low"),
    [("cosine:mean_raw:no-first", "cosine", "mean_raw:no-first", -1), ("cka", "cka", "debiased", 0)],
)
def test_a_map_is_the_table_with_a_fixed_range(results, drawn, name, measure, statistic, low):
    (cells,) = drawn[name].data
    rows = results.table[(results.table.measure == measure) & (results.table.statistic == statistic)]
    expected = np.full((13, 13), math.nan)
    expected[rows.layer.astype(int), rows.other.astype(int)] = rows.value
    np.testing.assert_array_equal(np.array(cells.z), expected)
    assert (cells.zmin, cells.zmax) == (low, 1)
    assert "n = 2,048" in cells.hovertemplate
    half = figures.build(rows[rows.layer <= rows.other], {})  # a pair given in one order holds for both
    np.testing.assert_array_equal(np.array(next(iter(half.values())).data[0].z), np.maximum(expected, expected.T))


def test_axes_are_honest(drawn):
    for name in ("displacement", "jump_rate", "lens_accuracy", "lens_loss", "renyi_entropy", "spectral_norm"):
        assert drawn[name].layout.yaxis.rangemode == "tozero", name
    for name in ("coherence", "saturation", "separability"):
        assert drawn[name].layout.yaxis.range[0] == 0, name
        assert 1 <= drawn[name].layout.yaxis.range[1] <= 1.05, name
    assert drawn["jump_rate"].layout.yaxis.ticksuffix == " %"
    assert drawn["norm_ratio"].layout.yaxis.type == "log"
    assert "log scale" in drawn["norm_ratio"].layout.title.subtitle.text


def test_the_summary_names_the_extremes(drawn):
    assert drawn["displacement"].layout.meta["alt"].startswith("Mean: lowest 0.0187 at layer 10, highest 0.2650 at la")
    assert drawn["saturation"].layout.meta["alt"] == "Half of all positions have settled by layer 9."


def test_labelled_data_and_a_table_of_one_measure():
    drawn = synthetic.classifier().figures()
    np.testing.assert_allclose(drawn["nc1"].data[0].y, [40 * math.exp(-layer) for layer in range(7)])
    assert drawn["nc1"].layout.yaxis.type == "log"
    alone = synthetic.minimal().figures()
    assert list(alone) == ["displacement", "displacement:log"]
    assert figures.build(tabulate([]), {}) == {}


@pytest.mark.parametrize("measure", ["displacement", "cosine", "saturation"])
def test_any_measure_may_be_missing(results, drawn, measure):
    left = figures.build(results.table[results.table.measure != measure], results.meta)
    assert {name.split("_")[0].split(":")[0] for name in set(drawn) - set(left)} == {measure}
    assert set(left) < set(drawn)


def test_nan_leaves_a_gap_and_nothing_but_nan_leaves_no_figure(results):
    table = results.table.copy()
    table.loc[(table.measure == "displacement") & (table.layer == 5), "value"] = math.nan
    table.loc[(table.measure == "cka") & (table.layer == 2), "value"] = math.nan
    table.loc[table.measure == "norm_ratio", "value"] = math.nan
    table.loc[(table.measure == "lens_loss") & (table.layer == 0), "value"] = math.inf
    table.loc[::7, "count"] = pd.NA
    drawn = figures.build(table, results.meta)
    assert traces(drawn["displacement"])["Mean"].y[4] is None
    assert list(drawn["cka"].data[0].z[2]) == [None] * 13
    assert drawn["lens_loss"].data[0].y[0] is None
    assert "norm_ratio" not in drawn
    assert "NaN" not in drawn["displacement"].to_json()


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


def weight(layer, source):
    return (1 + math.sin(layer + 3 * source)) / 2


def retrieval(signed=False):
    """Retrieval rows of layers 2..5; `signed`: masses that are no shares."""
    return [
        ("retrieval_weight", "routing", layer, source, statistic, factor * weight(layer, source), 960, "1")
        for layer in range(2, 6)
        for statistic, factor in (("share", 1.0), ("mean", -2.0 if signed else 1.0 + 1e-7))
        for source in range(layer)
    ] + [("expected_retrieval", "routing", layer, None, "value", 0.4 * layer, 960, "layers") for layer in range(2, 6)]


def test_retrieval_is_a_triangle_and_signed_weights_are_a_second_reading():
    drawn = figures.build(tabulate(retrieval()), {"model": {"num_layers": 5}})
    assert list(drawn) == ["retrieval_weight", "expected_retrieval"]
    (cells,) = drawn["retrieval_weight"].data
    assert [list(row) for row in cells.z] == [[weight(r, m) if m < r else None for r in range(2, 6)] for m in range(5)]
    assert (list(cells.x), list(cells.y)) == ([2, 3, 4, 5], ["emb", "1", "2", "3", "4"])
    assert (cells.zmin, cells.zmax) == (0, max(weight(r, m) for r in range(2, 6) for m in range(r)))
    expected, plain = drawn["expected_retrieval"].data
    np.testing.assert_allclose(expected.y, [0.8, 1.2, 1.6, 2.0])
    assert list(plain.y) == [1, 2, 3, 4]
    drawn = figures.build(tabulate(retrieval(signed=True)), {})
    (cells,) = drawn["retrieval_weight:mean"].data
    assert cells.z[1][2] == -2 * weight(4, 1)
    assert cells.zmin == -cells.zmax == min(-2 * weight(r, m) for r in range(2, 6) for m in range(r))
    assert drawn["retrieval_weight"].layout.meta["variant"] == "Share of absolute weight"


def test_streams_stand_in_order():
    rows = [
        ("stream_mixing", f"{branch}_stream_{i}", layer, None, statistic, shift + i - layer, 96, "1")
        for shift, statistic in enumerate(("input", "kept", "given", "output"))
        for branch in ("attention", "mlp")
        for i in range(12)
        for layer in range(1, 6)
    ]
    drawn = figures.build(tabulate(rows), {})
    assert list(drawn) == ["stream_mixing", *(f"stream_mixing:{name}" for name in ("output", "kept", "given"))]
    for name, shift in (("stream_mixing", 0), ("stream_mixing:output", 3)):
        (cells,) = drawn[name].data
        assert list(cells.y) == [f"{branch} {i}" for branch in ("Attention", "MLP") for i in range(12)]
        np.testing.assert_allclose(cells.z, [[shift + i - r for r in range(1, 6)] for _ in "ab" for i in range(12)])
        assert cells.zmin == -cells.zmax


def test_images_stand_against_texts():
    rows = [
        (measure, "cross", image, text, statistic, 0.1 * image - 0.05 * text, 7, "1")
        for measure, statistic in (("cosine", "matched"), ("retrieval", "text_to_image"))
        for image in range(3)
        for text in range(5)
    ]
    drawn = figures.build(tabulate(rows), {})
    assert list(drawn) == ["cross", "cross:text_to_image"]
    for name, low in (("cross", -1), ("cross:text_to_image", 0)):
        (cells,) = drawn[name].data
        np.testing.assert_allclose(cells.z, [[0.1 * a - 0.05 * b for b in range(5)] for a in range(3)])
        assert (cells.zmin, cells.zmax) == (low, 1)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (r"\frac{a + b}{2}", "<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac>"),
        ("∑_i^L x", "<munderover><mo>∑</mo><mi>i</mi><mi>L</mi></munderover><mi>x</mi>"),
        ("h^L_n", "<msubsup><mi>h</mi><mi>n</mi><mi>L</mi></msubsup>"),
        (r"\bar{Ψ}_k", "<msub><mover><mi>Ψ</mi><mo>¯</mo></mover><mi>k</mi></msub>"),
        (r"\{x < n\}", "<mo>{</mo><mi>x</mi><mo>&lt;</mo><mi>n</mi><mo>}</mo>"),
        (r'E \thin t_"e"', '<mi>E</mi><mspace width="0.1em"></mspace><msub><mi>t</mi><mtext>e</mtext></msub>'),
    ],
)
def test_formulas(formula, expected):
    assert mathml(formula) == expected


def test_every_note_is_well_formed():
    for note in {note for record in figures.FIGURES for note in record.methods if note.formula}:
        root = ElementTree.fromstring(f"<math>{mathml(note.formula)}</math>")
        assert {"_", "^", "\\"}.isdisjoint("".join(root.itertext())), note.title
