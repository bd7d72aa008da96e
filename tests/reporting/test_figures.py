"""Figures: what is drawn are the table's numbers, of one model, over steps, and of several models side by side."""

from __future__ import annotations

import gzip
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_array_equal
from pandas.testing import assert_series_equal

from fulldepth.reporting import build, charts, page
from fulldepth.reporting.charts import Figure, Line, Note, every_record
from fulldepth.reporting.figures import records
from fulldepth.reporting.kinds import KINDS
from fulldepth.results import tabulate
from reporting import plotted, synthetic
from reporting.synthetic import payload_of, versus

WRITTEN = json.loads(gzip.decompress(plotted.FILE.read_bytes()))


@pytest.fixture(scope="module")
def results():
    return synthetic.language_model()


@pytest.fixture(scope="module")
def comparison():
    return synthetic.comparison()


def numbers(arrays):
    """All numbers of a trace in one list; texts are compared as they are."""
    flat = [value for name in sorted(arrays) for value in np.ravel(np.array(arrays[name], dtype=object))]
    return [math.nan if value is None else value for value in flat]


@pytest.mark.parametrize("kind", plotted.KINDS)
def test_every_figure_plots_what_it_plotted(kind):
    drawn = plotted.plotted(plotted.KINDS[kind]())
    assert set(drawn) == set(WRITTEN[kind])
    for name, expected in WRITTEN[kind].items():
        found, wanted = (sorted(traces, key=json.dumps) for traces in (drawn[name], expected))
        assert [sorted(trace) for trace in found] == [sorted(trace) for trace in wanted], name
        for one, other in zip(found, wanted, strict=True):
            for a, b in zip(numbers(one), numbers(other), strict=True):
                assert a == (b if isinstance(b, str) else pytest.approx(b, rel=1e-7, abs=1e-12, nan_ok=True)), name


def values(table, line):
    """The rows of a line as they stand in the table."""
    rows = table[(table.measure == line.measure) & (table.site == line.site)]
    rows = rows[rows.statistic == line.statistic.split("|")[0]]
    if line.to_last:  # of the pairs those with the last layer
        rows = rows[rows.other == rows.other.max()]
    return pd.Series(rows["value"].to_numpy(), index=rows["layer"].astype("int64")).sort_index()


def test_every_figure_is_of_kinds_that_exist():
    assert {kind for record in every_record() for kind in record.kinds} <= {*KINDS}


def fixed(kind):
    """Records and their lines without patterns."""
    return [
        (record, line)
        for record in every_record()
        if kind in record.kinds and record.over == "layer"
        for line in record.lines
        if "(?P" not in f"{line.site}{line.statistic}"
    ]


def test_a_line_is_the_table(results):
    drawn, proven = build(results.table, results.meta), 0
    for record, line in fixed("measure"):
        rows = values(results.table, line)
        name = f"{record.name}:log" if record.name == "displacement" else record.name
        if len(rows):
            (trace,) = [one for one in drawn[name].data if one.name == line.name]
            found = pd.Series(list(trace.y), index=list(trace.x), dtype=float)
            assert_series_equal(found, rows, check_names=False)
            proven += 1
    assert proven >= 13


def test_maps(results, comparison):
    drawn = comparison.figures()
    cells, other = (drawn[f"difference_cka:{name}"].data[0] for name in ("jump-penalty", "half-depth"))
    assert (cells.zmin, other.zmax) == (-cells.zmax, cells.zmax)
    once = results.table[~((results.table.measure == "cka") & (results.table.layer > results.table.other))]
    cells = np.array(build(once, results.meta)["cka"].data[0].z, dtype=float)
    assert_array_equal(cells, cells.T)  # a pair that is given once holds for both orders


@pytest.mark.parametrize(
    ("figure", "column", "site"),
    [
        ("retrieval_weight:b", "value", "routing"),
        ("difference_retrieval_weight", "difference", "routing"),
        ("retrieval_by_head:b, Head 3", "value", "head_3"),
        ("difference_retrieval_by_head:b, Head 3", "difference", "head_3"),
    ],
)
def test_compared_maps_of_retrieval_are_the_table(figure, column, site):
    one, other = plotted.memory(), plotted.memory()
    other.table["value"] = other.table["value"] * 1.5
    compared = versus(one, other)
    drawn = compared.figures()
    (heatmap,) = (drawn.get(figure) or drawn[f"{figure}:b"]).data
    rows = compared.table.query(
        f"model == 'b' and measure == 'retrieval_weight' and statistic == 'share' and site == '{site}'"
    )
    cells = {
        (column, row): value
        for row, values in zip(heatmap.y, heatmap.z, strict=True)
        for column, value in zip(heatmap.x, values, strict=True)
        if value is not None
    }
    assert cells == pytest.approx(dict(zip(zip(rows.layer, rows.other, strict=True), rows[column], strict=True)))


def test_effects_of_several_models_have_their_errors():
    compared = versus(synthetic.removal(), synthetic.removal())
    bars = compared.figures()["effect_output"].data[1].error_y.array
    assert list(bars) == [0.005] * 12  # as `effect_rows` states them


def test_one_line_a_model(comparison):
    drawn, table = comparison.figures(), comparison.table
    lines = drawn["displacement"].data
    assert [line.name for line in lines] == ["baseline", "jump-penalty", "half-depth"]
    assert drawn["difference_displacement"].layout.shapes[0].y0 == 0
    without = build(table.assign(difference=math.nan), comparison.meta)
    assert not [name for name in without if name.startswith("difference_")]


def test_a_series_and_a_run_over_their_steps():
    series, run = synthetic.series(), synthetic.training(terms={"jump": 0.09, "aligned": 4.0})
    drawn = run.figures()
    broken = series.table[~((series.table.measure == "jump_rate") & (series.table.step == 1000))]
    assert build(broken, series.meta)["steps_jump_rate"].data[0].y[2] is None
    for name, unit in (("penalty", "Penalty"), ("penalty:aligned", "Penalty (nats)")):
        assert drawn[name].layout.yaxis.title.text == unit
    long = synthetic.training(steps=tuple(range(0, 20_001, 100)))
    profiles = [trace.name for trace in long.figures()["displacement"].data]
    assert (len(profiles), profiles[0], profiles[-1]) == (charts.PROFILES, "Step 0", "Step 20,000")
    assert build(run.table.iloc[:0], run.meta) == {}


def test_layer_one_does_not_flatten_the_rest():
    """The axis ends above layers 2 to L; layer 1 is written beside it, and everything is in the logarithmic reading."""
    means = [0.5, 0.02, 0.03, 0.01, 0.14]
    rows = [synthetic.row("displacement", at, mean) for at, mean in enumerate(means, start=1)]
    drawn = build(tabulate(rows), {"model": {"num_layers": 5}})
    low, high = drawn["displacement"].layout.yaxis.range
    assert low == 0
    assert 0.14 < high < 0.2
    (note,) = drawn["displacement"].layout.annotations
    assert (note.x, note.text) == (1, "↑ Layer 1: 0.5")
    assert list(drawn["displacement:log"].data[0].y) == means
    assert drawn["displacement:log"].layout.yaxis.type == "log"


@pytest.mark.parametrize(
    "ends", [(21.1, 21.9), (2.01, 4.99), (0.9, 1.95), (5.5, 9.9), (1 - 1e-6, 1 + 1e-6), (3e-7, 40.0)]
)
def test_a_logarithmic_axis_has_two_numbers_between_its_values(ends):
    drawn = build(
        tabulate([synthetic.row("nc1", at, value, "value") for at, value in enumerate(ends)]),
        {"model": {"num_layers": 1}},
    )
    (low, high), shown = drawn["nc1"].data[0].y, drawn["nc1"].layout.yaxis
    within = [text for tick, text in zip(shown.tickvals, shown.ticktext, strict=True) if low <= tick <= high]
    assert shown.type == "log"
    assert 2 <= len({float(text) for text in within}) == len(within) <= 12
    assert_array_equal(
        [float(text) for text in shown.ticktext], np.float64([f"{tick:.10g}" for tick in shown.tickvals])
    )


def strings(value):
    """Every string inside a document."""
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in strings(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in strings(part)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(("kind", "removed"), [("language_model", 1.0), ("language_model", 0.5), ("comparison", 0.3)])
def test_gaps_are_gaps_and_not_words(kind, removed):
    """Any share of the table may be NaN or infinite: no figure fails, and nothing on the page is called nan."""
    results = getattr(synthetic, kind)()
    table = results.table
    drawn = np.random.default_rng(0).random(len(table))
    table.loc[drawn < removed, "value"] = math.nan
    table.loc[drawn < removed / 3, "value"] = math.inf
    table.loc[::7, "count"] = pd.NA
    if "difference" in table:
        table["difference"] = table["value"] - 1
    made = page.payload(table, results.meta)
    page.embedded_json(made["figures"])  # refuses NaN
    texts = [text.lower() for name in ("figures", "story", "cards", "profiles") for text in strings(made[name])]
    assert not [text for text in texts if {"nan", "inf", "-inf"} & set(text.replace(":", " ").split())]
    assert bool(made["figures"]) is (removed < 1)


def test_what_a_document_may_leave_out_is_not_drawn():
    """Tests without the differences of single seeds, and a word without a place on its map."""
    groups, single = synthetic.over_seeds(), synthetic.language_model()
    for test in groups.meta["tests"]:
        del test["by_seed"]
    one_seed, mean = groups.figures()["seeds"].data
    assert len(one_seed.x) == 0
    spread = [test for test in groups.meta["tests"] if test["deviation"]]
    assert list(mean.x) == [test["difference"] / test["deviation"] for test in spread]
    words = [{"word": "is", "x": [], "y": []}, {"word": "are", "x": [0.5], "y": [1.5]}]
    map_of_words = {"site": "residual", "layer": 3, "words": words}
    drawn = build(single.table, {**single.meta, "word_maps": [map_of_words]})["word_maps"]
    assert [list(trace.x) for trace in drawn.data] == [[], [0.5]]
    assert drawn.layout.meta["alt"].startswith("are: 1.5 at")


def test_one_record_is_a_figure_a_place_and_a_note(results, comparison, monkeypatch):
    notes = Note("A fake number", "Counts layers.", ("displacement",), "L", "Nobody."), Note("Another", "No.", ("mmd",))
    line = Line("displacement", name="Fake", compared=True)
    fake = Figure("fake", "geometry", quantity="Fake", axis="Fake (1)", lines=(line,), followed=True, notes=notes)
    everything = (*every_record(), fake)
    for room in (charts, page.figures):
        monkeypatch.setattr(room, "every_record", lambda: everything)

    def where(made, name):
        return [section["id"] for section in made["sections"] if any(name in slot for slot in section["slots"])]

    made, html = payload_of(results), page.render(results.table, results.meta)
    assert where(made, "fake") == ["geometry"]
    assert made["figures"]["fake"]["about"]["title"] == "Fake per layer"
    note = '<p class="formula">L</p><p>Counts layers.</p><p class="source">Nobody.</p></details>'
    assert f'<details class="method"><summary>A fake number</summary>{note}' in re.sub(r">\s+<", "><", html)
    assert "<summary>Another</summary>" not in html  # of a measure that the table lacks
    compared, series = payload_of(comparison), synthetic.series()
    assert where(compared, "fake") == where(compared, "difference_fake") == ["geometry"]
    folded = [section for section in payload_of(series)["sections"] if section["id"] == "training"]
    assert ["steps_fake"] in folded[0]["folded"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_figure_of_a_kind_has_a_name_of_its_own_and_a_section_that_is_there(kind):
    drawn_as = kind.drawn_as or kind.name
    assert drawn_as in page.CONTENTS
    names = [record.name for record, _ in records(drawn_as)]
    assert len(set(names)) == len(names)
    arranged = page.arrange(names, kind, {})
    placed = [slot[0] for section in arranged for slot in (*section["slots"], *section["folded"])]
    assert sorted(placed) == sorted(names)
    assert "further" not in {section["id"] for section in arranged}
    assert kind.first in {"", *(section["id"] for section in page.page_texts()["sections"][kind.sections])}


def test_formulas_are_html():
    for note in {note for record in every_record() for note in record.notes if note.formula}:
        root = ElementTree.fromstring(f"<p>{note.formula}</p>")
        assert {"_", "^", "\\"}.isdisjoint("".join(root.itertext())), note.title
