"""Figures of `fulldepth skip`: every number is one of the table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from figures import skip_folders as folders
from fulldepth import figures
from fulldepth.figures.skip_results import TOGETHER, Part, layers_of, parts, removals, timed_models
from fulldepth.results import Results

STATE = {"skipped": "Skipped, not healed", "healed": "Healed with scalars"}


def joined(**named: Results) -> Results:
    """Several folders as the report joins them."""
    table = pd.concat([one.table.assign(folder=name) for name, one in named.items()], ignore_index=True)
    return Results(table, {"kind": TOGETHER, "parts": [{**one.meta, "label": name} for name, one in named.items()]})


def drawn(results: Results, name: str):
    return figures.build(results.table, results.meta)[name]


def trace(figure, name: str):
    (found,) = [one for one in figure.data if str(one.name).startswith(name) and one.hoverinfo != "skip"]
    return found


def rows(results: Results, measure: str, statistic: str | None = None, **where) -> pd.DataFrame:
    table = results.table
    keep = table.measure == measure
    if statistic is not None:
        keep &= table.statistic == statistic
    for column, wanted in where.items():
        keep &= table[column] == wanted
    return table[keep.fillna(False).astype(bool)]


@pytest.mark.parametrize(
    ("name", "measure"),
    [("removal_loss", "loss_added"), ("kl", "kl"), ("greedy_agreement", "greedy_agreement")],
)
def test_a_curve_is_its_rows(name, measure) -> None:
    results = folders.curve()
    figure = drawn(results, name)
    high, low, line = figure.data[:3]
    expected = rows(results, measure, "mean").sort_values("removed")
    assert list(line.x) == expected.removed.tolist()
    np.testing.assert_array_equal(line.y, expected.value)
    np.testing.assert_array_equal(high.y, rows(results, measure, "high").value)
    np.testing.assert_array_equal(low.y, rows(results, measure, "low").value)
    assert low.fill == "tonexty"
    assert "95 %" in figure.layout.meta["subtitle"]


def test_the_break_point_is_marked_with_its_interval() -> None:
    figure = drawn(folders.curve(at=5), "removal_loss")
    spans = {(shape.type, shape.x0, shape.x1) for shape in figure.layout.shapes}
    assert spans == {("rect", 4, 6), ("line", 5, 5)}
    assert any(one.name == "Break point: 5 (95 %: 4 to 6)" for one in figure.data)
    assert not drawn(folders.curve(at=None), "removal_loss").layout.shapes


def test_healed_loss_and_control_stand_beside_the_line() -> None:
    search = folders.search()
    base = search.meta["plan"]["losses"][0]
    for results in (search, joined(out=search, curve=folders.curve())):
        figure = drawn(results, "removal_loss")
        for mark, state, at in (("Healed", "healed", 4), ("Control", "scalars_only", 0)):
            point = trace(figure, mark)
            assert list(point.x) == [at]
            assert point.y[0] == pytest.approx(rows(search, "loss", state=state).value.item() - base)
    line = trace(drawn(search, "removal_loss"), "Not healed")
    np.testing.assert_allclose(line.y, np.array(search.meta["plan"]["losses"]) - base)
    bare = drawn(folders.search(healed=False), "removal_loss")
    assert not any("Healed" in str(one.name) for one in bare.data)


def test_lines_that_run_along_each_other_are_drawn_once() -> None:
    def lines(results):
        return [str(one.name) for one in drawn(results, "removal_loss").data if one.mode == "lines+markers"]

    together = joined(out=folders.search(), curve=folders.curve(), bench=folders.bench())
    assert lines(together) == ["Not healed (curve)"]
    elsewhere = folders.search()
    elsewhere.meta["plan"]["losses"] = [loss + 0.1 for loss in elsewhere.meta["plan"]["losses"]]
    assert lines(joined(out=elsewhere, curve=folders.curve())) == ["Not healed (out)", "Not healed (curve)"]
    other = joined(a=folders.search(), b=folders.search(blocks=(12, 2, 3)))
    assert lines(other) == ["Not healed (a)", "Not healed (b)"]


def test_states_are_the_rows() -> None:
    results = folders.search()
    figure = drawn(results, "mmd")
    for state, name in STATE.items():
        np.testing.assert_array_equal(
            trace(figure, name).y, rows(results, "mmd", state=state).sort_values("layer").value
        )
    columns = sorted((shape.x0 + shape.x1) / 2 for shape in figure.layout.shapes)
    assert columns == sorted(folders.BLOCKS)


@pytest.mark.parametrize(("name", "phase"), [("pareto", "decode"), ("pareto:prefill", "prefill")])
def test_quality_against_time_shows_the_ratios_of_the_table(name, phase) -> None:
    results, plan = folders.bench(), folders.plan()
    figure = drawn(results, name)
    whole = results.table[results.table.batch.isna()]
    for model in ("folded", "fast"):
        point = trace(figure, model)
        keep = (whole.measure == "time_ratio") & (whole.site == phase) & (whole.model == model)
        ratio = whole[keep].set_index("statistic").value
        assert (point.x[0], *point.customdata[0]) == (ratio["median"], ratio["low"], ratio["high"])
        assert point.y[0] == pytest.approx(plan["healed_loss"] - plan["losses"][0])
    assert not any(str(one.name).startswith("other") for one in figure.data)  # its loss is not known
    unhealed = folders.plan(healed=False)
    added = unhealed["losses"][-1] - unhealed["losses"][0]
    assert trace(drawn(folders.bench(unhealed), name), "fast").y[0] == pytest.approx(added)


def test_exports_and_quantised_models_stand_in_one_plane() -> None:
    """Whatever data each folder used: losses are those added to its own original."""
    planned = folders.plan()
    planned["losses"] = [loss + 1 for loss in planned["losses"]]
    planned["healed_loss"] += 1
    results = joined(bench=folders.bench(planned), quantised=folders.quantised())
    points = {str(one.name): (one.x[0], one.y[0]) for one in drawn(results, "pareto").data}
    names = ["bench: folded", "bench: fast", *(f"quantised: {name}" for name in list(folders.CORNERS)[1:])]
    assert set(points) == set(names)  # the original of a benchmark without data has no loss of its own
    for name, (loss, _, _, decode) in list(folders.CORNERS.items())[1:]:
        assert points[f"quantised: {name}"] == pytest.approx((decode, loss - folders.CORNERS["original"][0]))
    found = timed_models(parts(results.table, results.meta))
    assert [one.stated for one in found[:4]] == [False, True, True, False]


def test_removals_are_named_once_and_the_depth_is_what_any_folder_says() -> None:
    curve = folders.curve()
    results = joined(out=folders.search(), curve=curve, bench=folders.bench(), q=folders.quantised())
    found = removals(parts(results.table, results.meta))
    assert [(one.name, one.blocks) for one in found] == [
        ("out, folded, fast, skipped", folders.BLOCKS),
        ("curve", folders.FARTHER),
        ("quantised, then skipped", (7, 8, 4, 11)),
    ]
    assert layers_of([Part("", "curve", curve.table, curve.meta)]) == max(folders.FARTHER)
    assert layers_of(parts(results.table, results.meta)) == 12


@pytest.mark.parametrize("kind", ["search", "curve", "bench", "quantised"])
def test_what_is_missing_leaves_out_its_figure_only(kind) -> None:
    results = folders.bench(cells=((1, 128),)) if kind == "bench" else getattr(folders, kind)()
    assert Results(results.table.iloc[:0], results.meta).figures() is not None
    for measure in results.table.measure.unique():
        kept = Results(results.table[results.table.measure != measure], results.meta)
        assert isinstance(kept.figures(), dict)
    assert isinstance(Results(results.table, {"kind": results.meta["kind"]}).figures(), dict)


def test_hostile_names_are_text() -> None:
    bench = folders.bench()
    bad = "<b>x</b>%{y}\u202e"
    bench.table["model"] = bench.table["model"].replace({"fast": bad})
    bench.meta["models"][2]["label"] = bad
    names = [str(one.name) for one in drawn(bench, "pareto").data]
    assert "&lt;b&gt;x&lt;/b&gt;%&#123;y}\ufffd" in names
