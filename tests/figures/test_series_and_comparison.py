"""Curves over steps, and models side by side."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fulldepth import figures
from fulldepth.figures.style import SEQUENTIAL


@pytest.fixture(scope="module")
def series(synthetic):
    return synthetic.series()


@pytest.fixture(scope="module")
def over_steps(series):
    return series.figures()


@pytest.fixture(scope="module")
def comparison(synthetic):
    return synthetic.comparison()


@pytest.fixture(scope="module")
def side_by_side(comparison):
    return comparison.figures()


STEPS = [100, 500, 1000, 2000, 3000]


def values(table, measure, statistic, **where):
    rows = table[(table.measure == measure) & (table.statistic == statistic) & (table.site == "residual")]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows


def test_the_jump_rate_of_the_last_layers_over_steps(series, over_steps):
    for back, trace in enumerate(over_steps["steps_jump_rate"].data):
        rows = values(series.table, "jump_rate", "value", layer=12 - back).sort_values("step")
        assert list(trace.x) == STEPS
        assert list(trace.y) == rows.value.tolist()


def test_one_line_a_layer_over_steps(series, over_steps):
    lines = [trace for trace in over_steps["steps_displacement"].data if trace.mode == "lines+markers"]
    assert [trace.name for trace in lines] == [f"Layer {layer}" for layer in range(1, 13)]
    rows = values(series.table, "displacement", "mean", layer=12).sort_values("step")
    assert list(lines[11].y) == rows.value.tolist()
    assert len(over_steps["steps_lens_accuracy"].data) == 13 + 1  # embeddings, and the key of shades


def test_depth_in_use_over_steps(over_steps):
    lines = {trace.name: list(trace.y) for trace in over_steps["steps_depth"].data}
    assert lines == {
        "Median saturation layer": [9] * 5,
        "Effective depth, ε = 0.05": [12] * 5,
        "Effective depth, relative ε = 0.05": [11] * 5,
    }


def test_a_series_shows_its_last_step(series, over_steps):
    mean = next(trace for trace in over_steps["displacement"].data if trace.name == "Mean")
    assert list(mean.y) == values(series.table, "displacement", "mean", step=3000).value.tolist()


def test_a_step_without_a_measure_leaves_a_gap(series):
    table = series.table[~((series.table.measure == "jump_rate") & (series.table.step == 1000))]
    drawn = figures.build(table, series.meta)
    assert drawn["steps_jump_rate"].data[0].y[2] is None


def test_one_line_a_model(comparison, side_by_side):
    lines = side_by_side["displacement"].data
    assert [line.name for line in lines] == ["baseline", "jump-penalty", "half-depth"]
    for line in lines:
        rows = values(comparison.table, "displacement", "mean", model=line.name)
        assert list(line.x) == rows.layer.tolist()
        assert list(line.y) == rows.value.tolist()
    assert len({line.line.color for line in lines}) == 3


def test_the_difference_is_the_value_minus_the_baselines(comparison, side_by_side):
    base = values(comparison.table, "displacement", "mean", model="baseline").value.to_numpy()
    drawn = side_by_side["difference_displacement"]
    assert [line.name for line in drawn.data] == ["jump-penalty", "half-depth"]
    for line in drawn.data:
        own = values(comparison.table, "displacement", "mean", model=line.name).value.to_numpy()
        np.testing.assert_allclose(line.y, own - base[: len(own)])
    assert drawn.layout.shapes[0].y0 == 0


def test_one_map_a_model_and_the_difference_maps(comparison, side_by_side):
    sizes = {name: len(side_by_side[f"cka:{name}"].data[0].z) for name in ("baseline", "jump-penalty", "half-depth")}
    assert sizes == {"baseline": 13, "jump-penalty": 13, "half-depth": 7}
    (cells,) = side_by_side["difference_cka:jump-penalty"].data
    own, base = (np.array(side_by_side[f"cka:{name}"].data[0].z) for name in ("jump-penalty", "baseline"))
    np.testing.assert_allclose(np.array(cells.z), own - base, atol=1e-12)
    largest = np.abs(own - base).max()
    others = np.abs(np.array(side_by_side["difference_cka:half-depth"].data[0].z)).max()
    assert cells.zmax == pytest.approx(max(largest, others), abs=0.01)  # one scale for all maps of differences
    assert (cells.zmin, side_by_side["difference_cka:half-depth"].data[0].zmax) == (-cells.zmax, cells.zmax)
    assert {colour for _, colour in cells.colorscale}.isdisjoint(SEQUENTIAL[1:])  # not the colours of values
    assert "difference_cka:baseline" not in side_by_side
    assert f"{largest:.2f}" in side_by_side["difference_cka:jump-penalty"].layout.meta["alt"]


def test_relative_depth_puts_models_on_one_axis(synthetic):
    results = synthetic.comparison("relative")
    lines = {line.name: line for line in results.figures()["displacement"].data}
    np.testing.assert_allclose(lines["baseline"].x, np.arange(1, 13) / 12)
    np.testing.assert_allclose(lines["half-depth"].x, np.arange(1, 7) / 6)
    assert lines["half-depth"].customdata[2][0] == "Layer 3"


def test_models_whose_names_shorten_to_the_same_stay_apart(comparison):
    table = comparison.table.copy()
    table["model"] = table["model"].map(lambda name: "x" * 100 + name)
    names = [line.name for line in figures.build(table, {"kind": "comparison"})["displacement"].data]
    assert len(set(names)) == 3
    assert max(map(len, names)) < 60


def test_no_difference_where_nothing_can_be_compared(comparison):
    table = comparison.table.assign(difference=math.nan)
    assert not [name for name in figures.build(table, comparison.meta) if name.startswith("difference_")]
