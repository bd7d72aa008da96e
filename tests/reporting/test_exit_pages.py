"""Pages of early exit, generation and evaluation: the paragraph and the tables; in a browser drawn, short and inert."""

from __future__ import annotations

import pytest

from figures import exit_folders as folders
from fulldepth.comparison import compare
from fulldepth.reporting import render, write, write_together
from fulldepth.reporting.payload import payload

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e%{x}"
EMPTY = """() => [...document.querySelectorAll(".plot")]
    .filter((div) => !div.hidden && !div.closest("details:not([open])"))
    .filter((div) => !(div.data || []).some((trace) => (trace.y || trace.median || []).some((value) => value != null)))
    .map((div) => div.dataset.figure)"""


def several():
    aligned = folders.classifier_exit("runs/aligned", accuracy=0.905, share=0.99)
    return compare([folders.classifier_exit(), aligned], names=["plain", "aligned"])


MADE = {
    "exit": folders.classifier_exit,
    "decoder": folders.decoder_exit,
    "generation": folders.generation,
    "evaluation": folders.evaluation,
    "exits": several,
}


def story(results):
    told = payload(results)["story"]
    return " ".join(told["sentences"]), told["next"]


def cells(results, section, title):
    (found,) = [one for one in payload(results)["sections"] if one["id"] == section]
    (table,) = [one for one in found["tables"] if one.get("title") == title]
    return {row[0]: dict(zip(table["columns"], row[1:], strict=True)) for row in table["rows"]}


def test_the_paragraph_of_a_sweep_is_its_findings_and_the_export_that_follows():
    said, after = story(folders.classifier_exit())
    assert said == "Layer 9 is enough. At confidence 0.9 it is 1.36 times as fast."
    assert after["command"].endswith("--layers 9 --output first-9/")
    chance = folders.classifier_exit()
    chance.meta["headline"] = {"accuracy": {"value": 0.5, "unit": "1", "sentence": "Nothing is advised."}}
    assert story(chance) == ("Nothing is advised.", None)
    assert story(folders.generation())[0] == "16 tokens. After a trial."


def test_nothing_is_advised_of_tasks_at_chance():
    evaluated = folders.evaluation()
    for entry in evaluated.meta["tasks"].values():
        entry["advised"] = False
    said, after = story(evaluated)
    assert "are not measurably above chance: nothing is advised." in said
    assert "From layer" not in said
    assert after is None


def test_every_threshold_is_a_row():
    results = folders.classifier_exit()
    rows = cells(results, "thresholds", "Every threshold")
    assert list(rows)[2] == "confidence 0.9 · chosen"
    report = [one for one in results.meta["exits"] if one["split"] == "report"]
    entry = next(one for one in report if (one["rule"], one["threshold"]) == ("margin", 0.7))
    row, (low, high) = rows["margin 0.7"], entry["drop_interval"]
    assert row["Leave early"] == f"{100 * (1 - entry['exits'][-1] / 2000):.1f} %"
    assert row["Change"] == f"−{100 * entry['drop']:.1f} (−{100 * high:.1f} to −{100 * low:.1f})"
    speeds = row["Speed-up"], row["In theory"]
    assert speeds == (f"{entry['measured_speedup']:.2f}×", f"{entry['theoretical_speedup']:.2f}×")
    for timing, words in (("busy", "busy"), ("no-difference", f"≈ {speeds[0]}")):
        for one in results.meta["exits"]:
            one["timing"] = timing
        assert cells(results, "thresholds", "Every threshold")["margin 0.7"]["Speed-up"] == words


def test_a_prompt_that_the_text_repeats_is_shown_once():
    results = folders.generation()
    results.meta["generation"] |= {"prompts": ["a b"], "texts": ["a b c\u202e\nd"]}
    (section,) = [one for one in payload(results)["sections"] if one["id"] == "texts"]
    assert section["tables"][0]["items"] == [["a b", " c⟨U+202E⟩\nd"]]


def test_the_paragraph_of_an_evaluation_names_the_layer_that_is_enough():
    results = folders.evaluation()
    said, after = story(results)
    assert said.startswith("All 30 layers score 54.7 % ± 3.5 on arc_easy_local (chance 25.0 %), 66.2 % ± 3.3 on piqa")
    rows = cells(results, "tasks", "Every task")
    layers = {name: int(row["As good from"].split()[1]) for name, row in rows.items()}
    assert f"From layer {max(layers.values())} on, stopping early is shown to lose at most one point" in said
    assert f"on piqa_local from layer {layers['piqa_local']} on." in said
    assert f"--layers {max(layers.values())} " in after["command"]
    results.meta["tasks"]["piqa_local"]["advised"] = False
    assert "piqa_local is not measurably above chance." in story(results)[0]


def test_several_sweeps_stand_side_by_side():
    made = payload(several())
    assert made["models"]["columns"] == ["plain (baseline)", "aligned"]
    rows = cells(several(), "thresholds", "Equal accuracy, and equal speed")
    assert {label: row["Full accuracy"] for label, row in rows.items()} == {
        "plain (baseline)": "91.2 %", "aligned": "90.5 %",
    }  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_a_folder_of_every_kind_has_a_page_figures_and_a_display(tmp_path, name):
    results = MADE[name]()
    folder = results.save(tmp_path / name, page=False)
    assert write_together([folder]) == folder / "report.html"
    notes = render(results).split('id="method-title"')[1]
    assert ("Scores by exit layer" in notes, "Speed-up of early exit" in notes) == (
        name == "evaluation", name in ("exit", "decoder", "exits"),
    )  # fmt: skip


@pytest.mark.browser
@pytest.mark.parametrize(("name", "width"), [*((name, 1280) for name in MADE), ("exit", 390), ("evaluation", 390)])
def test_pages_are_drawn_whole_and_short(tmp_path, visit, name, width):
    page = visit(write(MADE[name]().save(tmp_path / name)), viewport={"width": width, "height": 800})
    assert page.evaluate(EMPTY) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") <= (6000 if width == 1280 else 9000)
    if width == 1280 and name not in ("generation", "exits"):
        assert page.locator(".plot .xtick text").first.evaluate("(node) => node.getBoundingClientRect().bottom") <= 800
    if name != "exits":
        assert page.locator("#story").is_visible()


@pytest.mark.browser
def test_hostile_strings_are_text(tmp_path, visit):
    decoder, generated, scored = (
        folders.decoder_exit(layers=12),
        folders.generation(10, 4),
        folders.evaluation(layers=6),
    )
    for entry in (*decoder.meta["exits"], *decoder.meta["generation"]):
        entry |= {"rule": HOSTILE, "policy": HOSTILE}
    decoder.meta["model"]["name"] = decoder.meta["headline"]["speedup"]["sentence"] = HOSTILE
    generated.meta["generation"] |= {"prompts": [HOSTILE], "texts": [HOSTILE + HOSTILE]}
    generated.meta["generation"]["stats"] |= {HOSTILE: HOSTILE, "__proto__": 1}
    generated.meta["headline"]["tokens"]["sentence"] = HOSTILE
    scored.meta["tasks"] = {HOSTILE: {"metric": HOSTILE, "chance": 0.5, "count": 2, "higher_is_better": True}}
    scored.table["site"] = HOSTILE
    scored.table.loc[scored.table["statistic"] == "acc", "statistic"] = HOSTILE
    for name, results in (("decoder", decoder), ("generated", generated), ("scored", scored)):
        page = visit(write(results.save(tmp_path / name)))  # `visit` fails on dialogs, requests and errors
        assert page.locator("script[src], img").count() == 0
        assert "alert(1)" in page.inner_text("main")
