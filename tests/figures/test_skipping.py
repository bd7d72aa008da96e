"""Figures of `fulldepth skip`: every number is one of the table."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from figures import skip_folders as folders
from fulldepth import figures
from fulldepth.figures.benchmark import benchmarked_models
from fulldepth.figures.skip_results import TOGETHER, Part, layers_of, parts, removals
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


def test_a_curve_is_its_rows() -> None:
    results = folders.curve()
    for name, measure in (
        ("removal_loss", "loss"),
        ("removal_loss:added", "loss_added"),
        ("kl", "kl"),
        ("greedy_agreement", "greedy_agreement"),
    ):
        figure = drawn(results, name)
        line, low = figure.data[2], figure.data[1]
        expected = rows(results, measure, "mean").sort_values("removed")
        assert list(line.x) == expected.removed.tolist()
        np.testing.assert_array_equal(line.y, expected.value)
        np.testing.assert_array_equal(figure.data[0].y, rows(results, measure, "high").value)
        np.testing.assert_array_equal(low.y, rows(results, measure, "low").value)
        assert low.fill == "tonexty"
        assert "95 %" in figure.layout.meta["subtitle"]


def test_the_break_point_is_marked_with_its_interval() -> None:
    results = folders.curve(at=5)
    figure = drawn(results, "removal_loss")
    spans = {(shape.type, shape.x0, shape.x1) for shape in figure.layout.shapes}
    assert spans == {("rect", 4, 6), ("line", 5, 5)}
    assert any(one.name == "Break point: 5 (95 %: 4 to 6)" for one in figure.data)
    assert not drawn(folders.curve(at=None), "removal_loss").layout.shapes


@pytest.mark.parametrize("name", ["removal_loss", "removal_loss:added"])
def test_healed_loss_and_control_stand_beside_the_line(name) -> None:
    for results in (folders.search(), joined(out=folders.search(), curve=folders.curve())):
        figure = drawn(results, name)
        base = rows(results, "loss", state="original").value.item() if name.endswith("added") else 0.0
        for mark, state, at in (("Healed", "healed", 4), ("Control", "scalars_only", 0)):
            point = trace(figure, mark)
            assert list(point.x) == [at]
            assert point.y[0] == pytest.approx(rows(results, "loss", state=state).value.item() - base)
    assert not any("Healed" in str(one.name) for one in drawn(folders.search(healed=False), name).data)


def test_a_search_without_a_curve_has_a_line_of_its_own() -> None:
    results = folders.search()
    line = trace(drawn(results, "removal_loss"), "Not healed")
    expected = pd.concat([rows(results, "loss", state="original"), rows(results, "loss", state="skipped")])
    np.testing.assert_array_equal(line.y, expected.value)
    added = trace(drawn(results, "removal_loss:added"), "Not healed")
    np.testing.assert_allclose(added.y, expected.value - expected.value.iloc[0])


def test_lines_that_run_along_each_other_are_drawn_once() -> None:
    def lines(results):
        return [str(one.name) for one in drawn(results, "removal_loss").data if one.mode == "lines+markers"]

    together = joined(out=folders.search(), curve=folders.curve(), bench=folders.bench())
    assert lines(together) == ["Not healed"]
    elsewhere = {"data": {**folders.plan()["data"], "hash": "sha256:" + "9" * 64}}
    apart = joined(out=folders.search(), curve=folders.curve(**elsewhere))
    assert lines(apart) == ["curve, not healed", "out, not healed"]  # other data: other losses
    other = joined(a=folders.search(), b=folders.search(blocks=(12, 2, 3)))
    assert lines(other) == ["a, not healed", "b, not healed"]


def test_each_removal_adds_the_difference_of_the_plans_losses() -> None:
    for results in (folders.search(), folders.curve(), folders.bench()):
        figure = drawn(results, "added_loss")
        plan = results.meta.get("plan") or results.meta["models"][1]
        np.testing.assert_allclose(figure.data[0].y, np.diff(plan["losses"]))
        assert list(figure.layout.xaxis.ticktext) == [str(block) for block in plan["blocks"]]
        assert [block for block, _ in figure.data[0].customdata] == plan["blocks"]
    signs = ["#c46a2f" if step < 0 else "#3b7ec1" for step in np.diff(folders.losses_of(4))]
    assert list(drawn(folders.search(), "added_loss").data[0].marker.color) == signs


def test_scalars_are_the_rows_with_gaps_where_a_block_is_gone() -> None:
    results = folders.search()
    figure = drawn(results, "scalars")
    for name, (site, statistic) in {
        "b_att": ("attention", "b"), "s_att": ("attention", "s"), "b_mlp": ("mlp", "b"), "s_mlp": ("mlp", "s"),
    }.items():  # fmt: skip
        line = trace(figure, name)
        expected = rows(results, "scalar", statistic, site=site).set_index("layer")["value"]
        assert list(line.x) == list(range(1, 13))
        for layer, value in zip(line.x, line.y, strict=True):
            assert value == expected.get(layer), (name, layer)
        assert line.connectgaps is False
        gaps = {layer for layer, value in zip(line.x, line.y, strict=True) if value is None}
        assert gaps == (set(folders.BLOCKS) if site == "attention" else set())
    columns = sorted((shape.x0 + shape.x1) / 2 for shape in figure.layout.shapes if shape.type == "rect")
    assert columns == sorted(folders.BLOCKS)
    assert [shape.y0 for shape in figure.layout.shapes if shape.type == "line"] == [1]
    bare = folders.search(healed=False)
    assert "scalars" not in figures.build(bare.table, bare.meta)


def test_per_channel_scalars_show_their_spread() -> None:
    results = folders.search()
    wide = rows(results, "scalar", "b", site="mlp").assign(statistic="b_std", value=0.125)
    figure = drawn(Results(pd.concat([results.table, wide]), results.meta), "scalars")
    assert set(trace(figure, "b_mlp").error_y.array) == {0.125}
    assert trace(figure, "s_mlp").error_y.array is None


def test_states_and_weights_are_the_rows() -> None:
    results = folders.search()
    for state, name in STATE.items():
        line = trace(drawn(results, "mmd"), name)
        np.testing.assert_array_equal(line.y, rows(results, "mmd", state=state).sort_values("layer").value)
    for name, group in (("spectral_norm", "self_attn."), ("spectral_norm::mlp", "mlp.")):
        figure = drawn(results, name)
        lines = [one for one in figure.data if one.hoverinfo != "skip"]
        assert [group + one.name for one in lines] == [p for p in folders.PROJECTIONS if p.startswith(group)]
        for one in lines:
            expected = rows(results, "spectral_norm", site=group + one.name).sort_values("layer")
            np.testing.assert_array_equal(one.y, expected.value)
    removed = folders.search(granularity="mlp")
    assert drawn(removed, "spectral_norm").layout.meta["variant"] == "mlp"  # what went comes first


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_quality_against_time_shows_the_ratios_of_the_table(phase) -> None:
    results, plan = folders.bench(), folders.plan()
    whole = results.table[results.table.batch.isna()]
    figure = drawn(results, f"pareto_{phase}")
    for model in ("folded", "fast"):
        point = trace(figure, model)
        keep = (whole.measure == "time_ratio") & (whole.site == phase) & (whole.model == model)
        ratio = whole[keep].set_index("statistic").value
        assert (point.x[0], *point.customdata[0]) == (ratio["median"], ratio["low"], ratio["high"])
        assert point.y[0] == plan["healed_loss"]
    base = trace(figure, "base")
    assert (base.x[0], base.y[0]) == (1, plan["losses"][0])
    assert not any(str(one.name).startswith("other") for one in figure.data)  # its loss is not known
    cell = drawn(results, f"pareto_{phase}::4:512")
    ratio = rows(results, "time_ratio", site=phase, model="fast", batch=4, context=512).set_index("statistic").value
    point = trace(cell, "fast")
    assert (point.x[0], *point.customdata[0]) == (ratio["median"], ratio["low"], ratio["high"])


def test_an_export_that_is_not_healed_has_the_last_loss() -> None:
    planned = folders.plan(healed=False)
    assert trace(drawn(folders.bench(planned), "pareto_prefill"), "fast").y[0] == planned["losses"][-1]


def test_corners_and_exports_stand_in_one_plane() -> None:
    results = joined(bench=folders.bench(), quantised=folders.quantised())
    figure = drawn(results, "pareto_decode")
    points = {str(one.name): (one.x[0], one.y[0]) for one in figure.data if one.mode == "markers"}
    assert set(points) == {"base (original)", "folded", "fast", *list(folders.CORNERS)[1:]}  # one original for both
    for name, (loss, _, _, decode) in list(folders.CORNERS.items())[1:]:
        assert points[name] == pytest.approx((decode, loss))
    assert all(one.mode == "markers" for one in figure.data), "no line says which of them cannot be told apart"


def test_losses_on_different_data_are_shown_as_added() -> None:
    planned = folders.plan()
    planned["losses"] = [loss + 1 for loss in planned["losses"]]
    planned["healed_loss"] += 1
    results = joined(bench=folders.bench(planned), quantised=folders.quantised())
    figure = drawn(results, "pareto_prefill")
    assert "added" in figure.layout.yaxis.title.text
    assert trace(figure, "fast").y[0] == pytest.approx(planned["healed_loss"] - planned["losses"][0])
    assert trace(figure, "quantised, then").y[0] == pytest.approx(folders.CORNERS["quantised, then skipped"][0] - 2.9)
    assert trace(figure, "base").y[0] == 0


def test_names_that_two_folders_share_are_told_apart() -> None:
    bench = folders.bench()
    names = {"fast": "skipped"}
    bench.table["model"] = bench.table["model"].replace(names)
    bench.meta["models"][2]["label"] = "skipped"
    both = joined(bench=bench, quantised=folders.quantised())
    found = [one.name for one in benchmarked_models(parts(both.table, both.meta))]
    assert "skipped (benchmark)" in found
    assert "skipped (quantisation)" in found
    two = joined(a=folders.bench(), b=folders.bench())
    found = [one.name for one in benchmarked_models(parts(two.table, two.meta))]
    assert found[:3] == ["a: base", "a: folded", "a: fast"]
    assert len(set(found)) == 8


def test_removals_are_named_once() -> None:
    results = joined(out=folders.search(), curve=folders.curve(), bench=folders.bench(), q=folders.quantised())
    found = removals(parts(results.table, results.meta))
    assert [(one.name, one.blocks) for one in found] == [
        ("out, folded, fast, skipped", folders.BLOCKS),
        ("curve", folders.FARTHER),
        ("quantised, then skipped", (7, 8, 4, 11)),
    ]


def test_the_depth_is_what_any_folder_says() -> None:
    curve = folders.curve()
    assert layers_of([Part("", "curve", curve.table, curve.meta)]) == max(folders.FARTHER)
    results = joined(curve=curve, bench=folders.bench())
    assert layers_of(parts(results.table, results.meta)) == 12


def test_deep_models_and_whole_layers() -> None:
    blocks = tuple(itertools.islice((70, 41, 33, 12, 55, 66, 68, 72, 44, 39, 21, 9, 61, 77, 50, 52), 16))
    results = folders.search(80, blocks)
    made = figures.build(results.table, results.meta)
    assert len(made["scalars"].layout.xaxis.tickvals) <= 14
    assert len(made["added_loss"].layout.xaxis.tickvals) <= 16
    layers = folders.search(blocks=(10, 9), granularity="layer")
    assert {value for value in trace(drawn(layers, "scalars"), "b_mlp").y[8:10]} == {None}


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
    names = [str(one.name) for one in drawn(bench, "pareto_prefill").data]
    assert "&lt;b&gt;x&lt;/b&gt;%&#123;y}\ufffd" in names
