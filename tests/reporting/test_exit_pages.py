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


def test_the_paragraph_of_a_sweep_states_the_calibrated_threshold():
    results = folders.classifier_exit()
    said, after = story(results)
    entry = next(one for one in results.meta["exits"] if one["split"] == "report" and one["calibrated"])
    early = 100 * (1 - entry["exits"][-1] / sum(entry["exits"]))
    assert said.startswith(f"At confidence 0.9, chosen on other data, {early:.0f} % of the samples leave early")
    assert f"a speed-up of {entry['measured_speedup']:.2f} ({entry['theoretical_speedup']:.2f} in theory)" in said
    low, high = entry["drop_interval"]
    assert f"{100 * entry['drop']:.1f} points less accuracy (95 % interval {100 * low:.1f} to {100 * high:.1f})" in said
    assert "Measured is" not in said  # 94 % of theory
    ends = {entry["layer"]: entry["drop_interval"][1] for entry in results.meta["stopping"]}
    cheap = next(layer for layer in range(1, 13) if ends[layer] <= 0.01)
    assert f"Stopping everything after layer {cheap} of 12: no measurable loss" in said
    assert after["command"].endswith(f"--export-layers {cheap} --output first-{cheap}/")


def test_a_slow_exit_is_called_slow():
    said, _ = story(folders.classifier_exit(share=0.88))
    assert "Measured is 88 % of theory." in said
    said, _ = story(folders.decoder_exit(share=0.5))
    assert "slower, at 0.61 times the full model’s speed (1.22 in theory)" in said
    assert "No threshold makes it measurably faster." in said
    untimed = folders.decoder_exit()
    for entry in untimed.meta["exits"]:
        entry |= {"measured_speedup": None, "timing": None, "calibrated": False}
        entry["drop"] += 0.02
        entry["drop_interval"] = [end + 0.02 for end in entry["drop_interval"]]
    said, _ = story(untimed)
    assert said.startswith(
        "No threshold is shown to keep accuracy within 1 point of the full model’s. At confidence 0.9, 52 % of"
    )
    for timing, words in (("busy", "the machine was busy, so times are not compared"), ("no-difference", "no measura")):
        results = folders.classifier_exit()
        for entry in results.meta["exits"]:
            entry["timing"] = timing
        assert words in story(results)[0]


def test_nothing_is_advised_where_the_full_model_is_at_chance():
    reason = "The full model is right on 52.0 ± 2.1 %, not measurably more than ...: nothing is advised."
    results = folders.classifier_exit()
    results.meta["full"]["no_advice"] = reason
    assert story(results) == (reason, None)
    older = folders.classifier_exit()
    del older.meta["full"]["chance"], older.meta["full"]["no_advice"]
    assert story(older)[1] is None
    evaluated = folders.evaluation()
    for entry in evaluated.meta["tasks"].values():
        entry["advised"] = False
    said, after = story(evaluated)
    assert "are not measurably above chance: nothing is advised." in said
    assert "From layer" not in said
    assert after is None


def test_the_threshold_is_not_chosen_by_the_reported_numbers():
    """Of two rules' chosen thresholds, the one with fewer layers on the calibration part."""
    results = folders.classifier_exit()
    for entry in results.meta["exits"]:
        entry["calibrated"] = entry["threshold"] == 0.9
        if entry["rule"] == "margin" and entry["split"] == "calibration":
            entry["exits"] = [2000] + [0] * 11
    assert story(results)[0].startswith("At margin 0.9, chosen on other data")
    for entry in results.meta["exits"]:
        entry["calibrated"] = False
    unsure = [entry for entry in results.meta["exits"] if entry["threshold"] < 0.9]
    assert story(results)[0].startswith("At confidence 0.9, ")
    assert any(entry["drop"] > 0.01 for entry in unsure)


def test_every_threshold_is_a_row():
    results = folders.classifier_exit()
    rows = cells(results, "thresholds", "Every threshold")
    assert list(rows)[2] == "confidence 0.9 · chosen"
    entry = next(one for one in results.meta["exits"] if (one["rule"], one["threshold"]) == ("margin", 0.7))
    row, (low, high) = rows["margin 0.7"], entry["drop_interval"]
    assert row["Leave early"] == f"{100 * (1 - entry['exits'][-1] / 2000):.1f} %"
    assert row["Change"] == f"−{100 * entry['drop']:.1f} (−{100 * high:.1f} to −{100 * low:.1f})"
    assert (row["In theory"], row["Of theory"]) == (f"{entry['theoretical_speedup']:.2f}×", "94 %")


def test_the_paragraph_of_a_generation_says_whether_it_paid():
    said, after = story(folders.generation())
    assert said.startswith("The first 4 of 30 layers draft 4 tokens at a time: 67 % of the drafts are accepted")
    assert after is None
    said, _ = story(folders.generation(paid=False))
    assert said.startswith("Speculation did not pay, so the text was decoded plainly: at best, 0 % of the drafts")


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
    assert f"--export-layers {max(layers.values())} " in after["command"]
    results.meta["tasks"]["piqa_local"]["advised"] = False
    assert "piqa_local is not measurably above chance." in story(results)[0]


def test_several_sweeps_stand_side_by_side():
    made = payload(several())
    assert [row[0] for row in made["models"]["rows"]] == ["plain (baseline)", "aligned"]
    assert (
        "aligned: a speed-up of 1.21 (1.22 in theory), 0.5 points less accuracy (95 % interval 0.3 to 0.6), at confid"
        in (made["story"]["sentences"][0])
    )


@pytest.mark.parametrize("name", MADE)
def test_a_folder_of_every_kind_has_a_page_figures_and_a_display(tmp_path, name):
    results = MADE[name]()
    folder = results.save(tmp_path / name, page=False)
    assert write_together([folder]) == folder / "report.html"
    notes = render(results).split('id="method-title"')[1]
    assert ("Self-speculative" in notes, "Scores by exit layer" in notes, "Speed-up of early exit" in notes) == (
        name == "generation", name == "evaluation", name in ("exit", "decoder", "exits"),
    )  # fmt: skip


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "width"), [*((name, 1280) for name in MADE), ("exit", 390), ("generation", 390), ("evaluation", 390)]
)
def test_pages_are_drawn_whole_and_short(tmp_path, visit, name, width):
    page = visit(write(MADE[name]().save(tmp_path / name)), viewport={"width": width, "height": 800})
    assert page.evaluate(EMPTY) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") <= (6000 if width == 1280 else 9000)
    if width == 1280 and name != "generation":
        assert page.locator(".plot .xtick text").first.evaluate("(node) => node.getBoundingClientRect().bottom") <= 800
    if name != "exits":
        assert page.locator("#story").is_visible()


@pytest.mark.browser
def test_exits_are_outlined_and_read_out(tmp_path, visit):
    results = folders.generation()
    page = visit(write(results.save(tmp_path / "out")))
    (sample,) = results.meta["lens_grid"]["samples"]
    early = [(layer, at) for at, layer in enumerate(sample["exits"]) if layer < 30]
    outlined = page.locator(".lens td.exit").evaluate_all(
        "(all) => all.map((cell) => [Number(cell.dataset.layer), Number(cell.dataset.position)])"
    )
    assert sorted(map(tuple, outlined)) == sorted(early)
    assert page.locator(".lens td.settled").count() == len(sample["saturation"])
    layer, at = early[0]
    page.locator(f".lens td[data-layer='{layer}'][data-position='{at}']").hover()
    readout = page.locator("#readout").inner_text()
    assert f"Layer {layer}, step {at + 1}" in readout
    assert "the generated token is" in readout
    assert f"The step leaves after layer {layer}." in readout
    assert "<b>long</b>" in page.locator(".texts").inner_text()


@pytest.mark.browser
def test_hostile_strings_are_text(tmp_path, visit):
    decoder, generated, scored = (
        folders.decoder_exit(layers=12),
        folders.generation(10, 4),
        folders.evaluation(layers=6),
    )
    for entry in (*decoder.meta["exits"], *decoder.meta["generation"]):
        entry |= {"rule": HOSTILE, "policy": HOSTILE}
    decoder.meta["model"]["name"] = HOSTILE
    generated.meta["generation"] |= {"prompts": [HOSTILE], "texts": [HOSTILE + HOSTILE]}
    generated.meta["generation"]["stats"] |= {HOSTILE: HOSTILE, "__proto__": 1}
    generated.meta["speculation"]["chosen_by"] = HOSTILE
    generated.meta["lens_grid"]["samples"][0] |= {"targets": [HOSTILE] * 4, "saturation": [None] * 4}
    scored.meta["tasks"] = {HOSTILE: {"metric": HOSTILE, "chance": 0.5, "count": 2, "higher_is_better": True}}
    scored.table["site"] = HOSTILE
    scored.table.loc[scored.table["statistic"] == "acc", "statistic"] = HOSTILE
    for name, results in (("decoder", decoder), ("generated", generated), ("scored", scored)):
        page = visit(write(results.save(tmp_path / name)))  # `visit` fails on dialogs, requests and errors
        assert page.locator("script[src], img").count() == 0
        assert "alert(1)" in page.inner_text("main")
