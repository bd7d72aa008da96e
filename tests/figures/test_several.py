"""Curves over steps, models and training runs side by side: every line is the table's rows."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from figures import synthetic
from fulldepth import figures
from fulldepth.figures.style import SEQUENTIAL
from fulldepth.figures.training import PROFILES

STEPS = [100, 500, 1000, 2000, 3000]


@pytest.fixture(scope="module")
def series():
    return synthetic.series()


@pytest.fixture(scope="module")
def comparison():
    return synthetic.comparison()


@pytest.fixture(scope="module")
def run():
    return synthetic.training(terms={"jump": 0.09, "aligned": 4.0})


@pytest.fixture(scope="module")
def runs():
    return synthetic.training_comparison()


def values(table, measure, by="step", **where):
    """The values of a measure by step or layer."""
    rows = table[(table.measure == measure) & table.statistic.isin(["mean", "value"])]
    for name, value in {"site": "residual", **where}.items():
        rows = rows[rows[name] == value]
    return pd.Series(rows["value"].to_numpy(), index=rows[by].astype("int64")).sort_index()


def is_drawn(trace, rows):
    assert len(rows) > 0
    drawn = pd.Series(list(trace.y), index=list(trace.x), dtype=float)
    pd.testing.assert_series_equal(drawn, rows, check_names=False)


def test_a_series_over_its_steps(series):
    drawn = series.figures()
    for back, trace in enumerate(drawn["steps_jump_rate"].data):
        is_drawn(trace, values(series.table, "jump_rate", layer=12 - back))
    lines = [trace for trace in drawn["steps_displacement"].data if trace.mode == "lines+markers"]
    assert [trace.name for trace in lines] == [f"Layer {layer}" for layer in range(1, 13)]
    is_drawn(lines[11], values(series.table, "displacement", layer=12))
    assert len(drawn["steps_lens_accuracy"].data) == 13 + 1  # embeddings, and the key of shades
    assert {trace.name: list(trace.y) for trace in drawn["steps_depth"].data} == {
        "Median saturation layer": [9] * 5,
        "Effective depth, ε = 0.05": [12] * 5,
        "Effective depth, relative ε = 0.05": [11] * 5,
    }
    last = next(trace for trace in drawn["displacement"].data if trace.name == "Mean")
    is_drawn(last, values(series.table, "displacement", "layer", step=3000))
    table = series.table[~((series.table.measure == "jump_rate") & (series.table.step == 1000))]
    assert figures.build(table, series.meta)["steps_jump_rate"].data[0].y[2] is None


def test_one_line_a_model_and_its_difference_from_the_baseline(comparison):
    drawn = comparison.figures()
    lines = drawn["displacement"].data
    assert [line.name for line in lines] == ["baseline", "jump-penalty", "half-depth"]
    assert len({line.line.color for line in lines}) == 3
    own = {line.name: values(comparison.table, "displacement", "layer", model=line.name) for line in lines}
    for line in lines:
        is_drawn(line, own[line.name])
    assert [line.name for line in drawn["difference_displacement"].data] == ["jump-penalty", "half-depth"]
    for line in drawn["difference_displacement"].data:
        np.testing.assert_allclose(line.y, (own[line.name] - own["baseline"]).dropna())
    assert drawn["difference_displacement"].layout.shapes[0].y0 == 0


def test_maps_of_models_and_of_differences(comparison):
    drawn = comparison.figures()
    own, base, half = (np.array(drawn[f"cka:{name}"].data[0].z) for name in ("jump-penalty", "baseline", "half-depth"))
    assert [len(one) for one in (own, base, half)] == [13, 13, 7]
    (cells,) = drawn["difference_cka:jump-penalty"].data
    np.testing.assert_allclose(np.array(cells.z), own - base, atol=1e-12)
    others = np.abs(np.array(drawn["difference_cka:half-depth"].data[0].z)).max()
    assert cells.zmax == pytest.approx(max(np.abs(own - base).max(), others), abs=0.01)  # one scale for all maps
    assert (cells.zmin, drawn["difference_cka:half-depth"].data[0].zmax) == (-cells.zmax, cells.zmax)
    assert {colour for _, colour in cells.colorscale}.isdisjoint(SEQUENTIAL[1:])  # not the colours of values
    assert "difference_cka:baseline" not in drawn
    table = comparison.table.assign(difference=math.nan)
    assert not [name for name in figures.build(table, comparison.meta) if name.startswith("difference_")]


def test_relative_depth_and_long_names():
    results = synthetic.comparison("relative")
    lines = {line.name: line for line in results.figures()["displacement"].data}
    np.testing.assert_allclose(lines["baseline"].x, np.arange(1, 13) / 12)
    np.testing.assert_allclose(lines["half-depth"].x, np.arange(1, 7) / 6)
    assert lines["half-depth"].customdata[2][0] == "Layer 3"
    table = results.table.assign(model="x" * 100 + results.table["model"])
    names = [line.name for line in figures.build(table, {"kind": "comparison"})["displacement"].data]
    assert len(set(names)) == 3
    assert max(map(len, names)) < 60


def test_one_training_run(run):
    drawn = run.figures()
    assert set(drawn) == {
        "loss", "penalty", "penalty:aligned", "displacement", "steps_displacement", "steps_jump_rate",
    }  # fmt: skip
    for trace, measure in zip(drawn["loss"].data, ("validation_loss", "train_loss"), strict=True):
        is_drawn(trace, values(run.table, measure, site="model"))
    assert drawn["loss"].data[1].x[0] == 50  # nothing has been trained at step 0
    for name, term, unit in (("penalty", "jump", "Penalty"), ("penalty:aligned", "aligned", "nats")):
        is_drawn(drawn[name].data[0], values(run.table, "penalty", site=term))
        assert drawn[name].layout.yaxis.title.text == unit
    for trace in drawn["displacement"].data:
        step = int(trace.name.removeprefix("Step ").replace(",", ""))
        is_drawn(trace, values(run.table, "displacement", "layer", step=step))
    lines = [trace for trace in drawn["steps_displacement"].data if trace.name]
    for layer, trace in enumerate(lines, start=1):
        is_drawn(trace, values(run.table, "displacement", layer=layer))
    for back, trace in enumerate(drawn["steps_jump_rate"].data):
        is_drawn(trace, values(run.table, "jump_rate", layer=12 - back))


def test_long_broken_and_empty_runs(run):
    drawn = synthetic.training(steps=tuple(range(0, 20_001, 100))).figures()
    profiles = [trace.name for trace in drawn["displacement"].data]
    assert (len(profiles), profiles[0], profiles[-1]) == (PROFILES, "Step 0", "Step 20,000")
    assert drawn["loss"].data[0].mode == "lines"
    table = run.table.copy()
    table.loc[(table.measure == "validation_loss") & (table.step == 100), "value"] = math.nan
    assert figures.build(table, run.meta)["loss"].data[0].y[2] is None
    assert figures.build(run.table.iloc[:0], run.meta) == {}


def test_runs_side_by_side(runs):
    drawn, every = runs.figures(), synthetic.trainings()
    names = ["tiny-llama", "tiny-jreg", "tiny-lime", "half-depth"]
    for figure, measure in (("loss", "validation_loss"), ("loss:training", "train_loss")):
        assert [line.name for line in drawn[figure].data] == names
        for line in drawn[figure].data:
            is_drawn(line, values(runs.table, measure, model=line.name, site="model"))
    assert {line.name for line in drawn["penalty:jump"].data} == {"tiny-jreg"}
    base, *others = (values(one.table, "validation_loss", site="model") for one in every)
    for line, own in zip(drawn["difference_loss"].data, others, strict=True):
        np.testing.assert_array_equal(list(line.x), (own - base).dropna().index)
        np.testing.assert_allclose(list(line.y), (own - base).dropna(), atol=1e-12)
    for line, one in zip(drawn["time_loss"].data, every, strict=True):
        clock, loss = (values(one.table, name, site="model") for name in ("elapsed", "validation_loss"))
        np.testing.assert_allclose([line.x, line.y], [clock / 60, loss])
    assert drawn["time_loss"].layout.xaxis.title.text == "Training time (minutes)"
    for line in drawn["steps_jump_rate"].data:
        depth = 6 if line.name == "half-depth" else 12
        is_drawn(line, values(runs.table, "jump_rate", model=line.name, layer=depth))


def test_displacement_is_compared_at_the_common_step(runs):
    drawn = runs.figures()
    base = values(runs.table, "displacement", "layer", model="tiny-llama", step=200)
    changes = {line.name: line for line in drawn["difference_displacement"].data}
    for line in drawn["displacement"].data:
        own = values(runs.table, "displacement", "layer", model=line.name, step=200)
        np.testing.assert_allclose([line.x, line.y], [own.index.to_numpy(float) / len(own), own])
        if line.name != "tiny-llama":
            expected = own - np.interp(np.array(line.x), np.arange(1, 13) / 12, base)
            np.testing.assert_allclose(list(changes[line.name].y), expected, atol=1e-12)
    assert drawn["displacement"].layout.meta["subtitle"] == "One line a run, at step 200"
