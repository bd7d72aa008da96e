"""Figures of early exit, generation and evaluation: every point against the document or rows that it is made of."""

from __future__ import annotations

import numpy as np
import pytest

from fulldepth.comparison import compare
from fulldepth.errors import FulldepthError
from fulldepth.figures.early_exit import points
from fulldepth.figures.evaluation import tasks
from fulldepth.figures.record import Source
from fulldepth.results import Results

from . import exit_folders as folders


def named(drawn, name, mode="lines+markers"):
    """The x and y of the trace with this name and mode."""
    (trace,) = [one for one in drawn.data if one.name == name and (one.mode or "").startswith(mode)]
    return list(trace.x), list(trace.y)


def reported(results, rule):
    return sorted(
        (entry for entry in results.meta["exits"] if entry["split"] == "report" and entry["rule"] == rule),
        key=lambda entry: entry["threshold"],
    )


def test_quality_against_speed_up_is_the_document():
    results = folders.classifier_exit()
    for key, name in (("accuracy", ""), ("loss", ":loss"), ("agreement", ":agreement")):
        drawn = results.figures()["exit_tradeoff" + name]
        for rule in ("confidence", "margin"):
            (measured,) = [one for one in drawn.data if one.name == rule]
            entries = reported(results, rule)
            assert list(measured.x) == [entry["measured_speedup"] for entry in entries]
            assert list(measured.y) == [entry[key] for entry in entries]
            assert list(measured.error_y.array) == [entry[f"{key}_stderr"] for entry in entries]
        (ring,) = [one for one in drawn.data if one.name == "chosen on other data"]
        chosen = next(entry for entry in reported(results, "confidence") if entry["calibrated"])
        assert (list(ring.x), list(ring.y)) == ([chosen["measured_speedup"]], [chosen[key]])
        (full,) = [one for one in drawn.data if one.name == "full model"]
        assert (full.x[0], full.y[0]) == (1.0, 1.0 if key == "agreement" else results.meta["full"][key])


def test_the_histogram_is_the_counts():
    results = folders.classifier_exit()
    entries = reported(results, "margin")[:-1]  # nothing leaves early at 1, which would flatten the others
    bars = results.figures()["exit_histogram:margin"].data
    assert [one.name for one in bars] == ["margin 0.5", "margin 0.7", "margin 0.9"]
    for bar, entry in zip(bars, entries, strict=True):
        np.testing.assert_allclose(np.array(bar.y) * sum(entry["exits"]), entry["exits"])
    for point, entry in zip(points(results.meta["exits"])[:3], reported(results, "confidence"), strict=False):
        layers = np.repeat(np.arange(1, 13), entry["exits"])
        assert point.mean_layer == pytest.approx(layers.mean())
        assert point.early == pytest.approx((layers < 12).mean())


def test_a_histogram_of_many_thresholds_keeps_the_chosen_one():
    results = folders.classifier_exit()
    report = reported(results, "confidence")
    more = [{**report[0], "threshold": 0.51 + at / 100, "exits": [1, *report[0]["exits"][1:]]} for at in range(30)]
    results.meta["exits"] = [*report, *more]
    names = [bar.name for bar in results.figures()["exit_histogram"].data]
    assert len(names) <= 5
    assert "confidence 0.9" in names


def test_a_decoder_has_the_runs_that_generate_and_what_was_not_timed_is_in_theory():
    results = folders.decoder_exit()
    drawn = results.figures()
    runs = results.meta["generation"]
    for policy in ("recompute", "propagate"):
        x, y = named(drawn["generation_tradeoff"], f"confidence, {policy}")
        assert x == [run["measured_speedup"] for run in runs if run["policy"] == policy]
        assert y == [run["agreement"] for run in runs if run["policy"] == policy]
    assert {"generation_histogram", "generation_histogram:confidence, recompute"} <= set(drawn)
    for entry in results.meta["exits"]:
        entry["measured_speedup"] = None
    untimed = results.figures()["exit_tradeoff"]
    assert named(untimed, "confidence, recompute")[0] == pytest.approx(
        [entry["theoretical_speedup"] for entry in reported(results, "confidence")]
    )


def test_scores_their_errors_and_the_shallowest_layer_are_those_stated():
    results = folders.evaluation()
    rows = results.table[results.table["measure"] == "task_score"].pivot_table(
        index="layer", columns=["site", "statistic"], values="value"
    )
    drawn = results.figures()
    names = ["task_scores", *(f"task_scores:{task}" for task in list(folders.TASKS)[1:])]
    for task, name in zip(tasks(Source(results.table, results.meta)), names, strict=True):
        metric = folders.TASKS[task.name][0]
        score, error = rows[task.name][metric], rows[task.name][f"{metric}_stderr"]
        trace = drawn[name].data[0]
        assert list(trace.y) == score.tolist()
        assert list(trace.error_y.array) == error.tolist()
        stated = results.meta["tasks"][task.name]
        assert (task.shallowest, task.above_chance) == (stated["earliest"], stated["advised"])
    older = {name: {"metric": entry["metric"]} for name, entry in results.meta["tasks"].items()}
    [unknown, *_] = tasks(Source(results.table, {**results.meta, "tasks": older}))
    assert unknown.shallowest is unknown.above_chance is None


def test_sweeps_of_several_models_share_a_figure():
    plain, aligned = folders.classifier_exit(), folders.classifier_exit("runs/aligned", accuracy=0.9, share=0.99)
    results = compare([plain, aligned], names=["plain", "aligned"])
    drawn = results.figures()
    for label, one in (("plain", plain), ("aligned", aligned)):
        (trace,) = (trace for trace in drawn["exit_tradeoff"].data if trace.name == f"{label}, confidence")
        assert list(trace.x) == [entry["measured_speedup"] for entry in reported(one, "confidence")]
    assert [trace.name for trace in drawn["lens_accuracy"].data] == ["plain", "aligned"]
    rows = results.table[(results.table["model"] == "aligned") & (results.table["measure"] == "lens_accuracy")]
    np.testing.assert_allclose(rows["difference"], rows["value"].to_numpy() * (1 - 0.912 / 0.9))
    scores = compare([folders.evaluation(), folders.evaluation("b", better=0.1)], names=["a", "b"])
    assert [trace.name for trace in scores.figures()["task_scores"].data] == ["a", "b"]


def test_what_cannot_be_compared_is_refused_in_one_sentence():
    with pytest.raises(FulldepthError, match="an early-exit sweep: a; an evaluation: b"):
        compare([folders.classifier_exit(), folders.evaluation()], names=["a", "b"])
    with pytest.raises(FulldepthError, match="is a generation, which has nothing to compare by layer"):
        compare([folders.generation(), folders.generation()])
    fewer = folders.evaluation("b")
    fewer.meta["tasks"]["piqa_local"]["count"] = 20
    (warning,) = [one for one in compare([folders.evaluation(), fewer]).meta["warnings"] if "piqa_local" in one]
    assert "the numbers of examples differ" in warning


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("exits", [{"exits": [1, -1]}], "exits.0.exits.1"),
        ("exits", [{"exits": [1, 2]}], "2, 12 layers"),
        ("exits", [{"accuracy": 1.2}], "exits.0.accuracy"),
        ("exits", {"rule": "x"}, "exits"),
        ("generation", {"texts": []}, "generation"),
    ],
)
def test_documents_that_contradict_themselves_are_refused(tmp_path, entry, value, words):
    results = folders.classifier_exit()
    results.meta[entry] = value
    with pytest.raises(FulldepthError, match=words):
        Results.load(results.save(tmp_path / "out", page=False))
