"""Training runs, one and several: every line is the table's rows, every difference is worked out again."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from fulldepth import figures
from fulldepth.figures.training_run import PROFILES


@pytest.fixture(scope="module")
def run(synthetic):
    return synthetic.training(terms={"jump": 0.09, "aligned": 4.0})


@pytest.fixture(scope="module")
def drawn(run):
    return run.figures()


@pytest.fixture(scope="module")
def comparison(synthetic):
    return synthetic.training_comparison()


@pytest.fixture(scope="module")
def side_by_side(comparison):
    return comparison.figures()


def by_step(table, measure, **where):
    rows = table[table.measure == measure]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows.set_index("step")["value"].sort_index()


def points(trace):
    return pd.Series(list(trace.y), index=list(trace.x), dtype=float)


def test_the_figures_of_a_run(drawn):
    assert set(drawn) == {
        "loss", "loss:later", "penalty", "penalty:aligned", "learning_rate", "displacement", "throughput",
        "steps_displacement", "steps_jump_rate",
    }  # fmt: skip


def test_losses_are_the_rows(run, drawn):
    validation, training = drawn["loss"].data
    pd.testing.assert_series_equal(points(validation), by_step(run.table, "validation_loss"), check_names=False)
    pd.testing.assert_series_equal(points(training), by_step(run.table, "train_loss"), check_names=False)
    assert (validation.name, training.name) == ("Validation", "Training")
    assert list(training.x) == [50, 100, 150, 200, 250, 300]  # nothing has been trained at step 0
    loss = by_step(run.table, "validation_loss")
    assert f"{loss[0]:.3f} at step 0, {loss[300]:.3f} at step 300" in drawn["loss"].layout.meta["alt"]


def test_the_second_half_leaves_the_steep_beginning_out(run, drawn, synthetic):
    validation, _ = drawn["loss:later"].data
    pd.testing.assert_series_equal(
        points(validation), by_step(run.table, "validation_loss").loc[150:], check_names=False
    )
    assert "loss:later" not in synthetic.training(steps=(0, 50, 100)).figures()


def test_penalties_stand_apart_with_their_weights(run, drawn, synthetic):
    for name, term, unit in (("penalty", "jump", "Penalty"), ("penalty:aligned", "aligned", "nats")):
        (trace,) = drawn[name].data
        pd.testing.assert_series_equal(points(trace), by_step(run.table, "penalty", site=term), check_names=False)
        assert drawn[name].layout.yaxis.title.text == unit
        assert drawn[name].layout.meta["beside"]
    assert drawn["penalty"].layout.meta["variant"] == "Jump penalty, weight 1"
    alone = synthetic.training().figures()["penalty"].layout.meta
    assert (alone["title"], alone["beside"]) == ("Jump penalty over training", False)
    assert alone["subtitle"].endswith("before its weight of 1")
    assert "penalty" not in synthetic.training(terms={}).figures()


def test_displacement_over_layers_and_over_steps(run, drawn):
    for trace in drawn["displacement"].data:
        step = int(trace.name.removeprefix("Step ").replace(",", ""))
        rows = run.table[(run.table.measure == "displacement") & (run.table.step == step)].sort_values("layer")
        assert list(trace.x) == rows.layer.tolist()
        assert list(trace.y) == rows.value.tolist()
    lines = [trace for trace in drawn["steps_displacement"].data if trace.name]
    assert len(lines) == 12
    for layer, trace in enumerate(lines, start=1):
        expected = by_step(run.table, "displacement", layer=layer)
        pd.testing.assert_series_equal(points(trace), expected, check_names=False)
    for back, trace in enumerate(drawn["steps_jump_rate"].data):
        expected = by_step(run.table, "jump_rate", layer=12 - back)
        pd.testing.assert_series_equal(points(trace), expected, check_names=False)


def test_a_long_run_stays_readable(synthetic):
    drawn = synthetic.training(steps=tuple(range(0, 20_001, 100))).figures()
    profiles = [trace.name for trace in drawn["displacement"].data]
    assert len(profiles) == PROFILES
    assert (profiles[0], profiles[-1]) == ("Step 0", "Step 20,000")
    assert drawn["loss"].data[0].mode == "lines"
    assert len(drawn["loss"].data[0].x) == 201


def test_a_loss_that_is_not_finite_leaves_a_gap(run):
    table = run.table.copy()
    table.loc[(table.measure == "validation_loss") & (table.step == 100), "value"] = math.nan
    assert figures.build(table, run.meta)["loss"].data[0].y[2] is None


def test_a_run_before_its_first_evaluation_has_no_figures(run):
    assert figures.build(run.table.iloc[:0], run.meta) == {}


def test_one_line_a_run(comparison, side_by_side):
    for name, measure in (("loss", "validation_loss"), ("loss:training", "train_loss")):
        lines = side_by_side[name].data
        assert [line.name for line in lines] == ["tiny-llama", "tiny-jreg", "tiny-lime", "half-depth"]
        for line in lines:
            expected = by_step(comparison.table, measure, model=line.name)
            pd.testing.assert_series_equal(points(line), expected, check_names=False)
        assert len({line.line.color for line in lines}) == 4
    assert {line.name for line in side_by_side["penalty:jump"].data} == {"tiny-jreg"}


def test_the_difference_of_the_losses_at_equal_steps(synthetic, side_by_side):
    base, *others = (by_step(one.table, "validation_loss") for one in synthetic.trainings())
    lines = side_by_side["difference_loss"].data
    assert [line.name for line in lines] == ["tiny-jreg", "tiny-lime", "half-depth"]
    for line, own in zip(lines, others, strict=True):
        expected = (own - base).dropna()
        np.testing.assert_array_equal(list(line.x), expected.index)
        np.testing.assert_allclose(list(line.y), expected, atol=1e-12)
    assert "from −0.087 in tiny-lime to +0.193 in half-depth" in side_by_side["difference_loss"].layout.meta["alt"]


def test_losses_over_training_time(synthetic, side_by_side):
    for line, one in zip(side_by_side["time_loss"].data, synthetic.trainings(), strict=True):
        both = pd.concat([by_step(one.table, name) for name in ("elapsed", "validation_loss")], axis=1).to_numpy()
        np.testing.assert_allclose(np.column_stack([line.x, line.y]), both / [60, 1])
    assert side_by_side["time_loss"].layout.xaxis.title.text == "Training time (minutes)"


def test_displacement_is_compared_at_the_common_step(comparison, side_by_side, synthetic):
    base = next(iter(synthetic.trainings())).table
    base = base[(base.measure == "displacement") & (base.step == 200)].value.to_numpy()
    for line in side_by_side["displacement"].data:
        rows = comparison.table[(comparison.table.model == line.name) & (comparison.table.step == 200)]
        rows = rows[rows.measure == "displacement"].sort_values("layer")
        assert list(line.y) == rows.value.tolist()
        np.testing.assert_allclose(list(line.x), rows.layer.to_numpy(float) / len(rows))
        if line.name != "tiny-llama":
            (change,) = (one for one in side_by_side["difference_displacement"].data if one.name == line.name)
            expected = rows.value - np.interp(np.array(line.x), np.arange(1, 13) / 12, base)
            np.testing.assert_allclose(list(change.y), expected, atol=1e-12)
    assert side_by_side["displacement"].layout.meta["subtitle"] == "One line a run, at step 200"


def test_jump_rates_meet_from_the_end(comparison, side_by_side):
    for back in range(3):
        for line in side_by_side[f"steps_jump_rate:{back}"].data:
            depth = 6 if line.name == "half-depth" else 12
            expected = by_step(comparison.table, "jump_rate", model=line.name, layer=depth - back)
            pd.testing.assert_series_equal(points(line), expected, check_names=False)
