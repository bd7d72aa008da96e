"""The pages of training runs: what stands in their tables, worked out from the rows; in a browser, drawn and inert."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from fulldepth.comparison import compare
from fulldepth.reporting import write
from fulldepth.reporting.kinds import PAGES
from fulldepth.reporting.payload import payload
from fulldepth.reporting.phrases import figure_of, quantity, seconds
from fulldepth.reporting.sections import arrange
from fulldepth.reporting.tables import flatten
from fulldepth.results import Results

EMPTY = """() => [...document.querySelectorAll(".plot")].filter((div) => !div.hidden)
    .filter((div) => !(div.data || []).some((trace) => (trace.y || []).some((value) => value != null)))
    .map((div) => div.dataset.figure)"""
HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "\u202eevil\u202c", "x" * 100_000]


def value(results, measure, step, **where):
    rows = results.table[(results.table.measure == measure) & (results.table.step == step)]
    for name, wanted in where.items():
        rows = rows[rows[name] == wanted]
    return rows.value.item()


def number(text):
    return float(text.split()[0].strip("×").replace("−", "-").replace(",", ""))


@pytest.fixture(scope="module")
def page(synthetic):
    return payload(synthetic.training_comparison())


def test_the_sections_of_a_run_and_of_several(synthetic, page):
    made = payload(synthetic.training())
    expected = ["Loss and penalties", "Displacement and jump", "Speed and memory", "Settings"]
    assert [section["title"] for section in made["sections"]] == expected
    assert [section["title"] for section in page["sections"]] == expected
    assert (made["kind"], page["kind"]) == ("training", "trainings")
    for kind, results in (("training", synthetic.training()), ("trainings", synthetic.training_comparison())):
        names = list(results.figures())
        placed = [
            name for section in arrange(names, kind, PAGES[kind].sections) for slot in section["slots"] for name in slot
        ]
        assert sorted(placed) == sorted(names)


def test_the_head_of_a_run(synthetic):
    made = payload(synthetic.training())
    assert made["title"] == "tiny-jreg"
    assert made["byline"] == "LlamaForCausalLM · 12 layers · 2.63 M parameters · trained on corpus:builtin/train"
    assert [card["name"] for card in made["cards"]] == [
        "Validation loss", "Jump of the last layer", "Tokens per second", "Peak memory",
    ]  # fmt: skip
    about = dict(made["about"])
    assert about["Objective"] == "cross-entropy + jump penalty (weight 1)"
    assert about["Schedule"] == ("300 steps × 16 sequences × 128 tokens = 614,400 tokens · evaluated every 50 steps")
    assert about["Optimiser"].startswith("AdamW, learning rate 0.002 · down to 0.0002 · 30 warm-up steps")
    assert "decay of" not in about["Optimiser"]
    everything = synthetic.training()
    everything.meta["settings"]["decay"] = "all"
    assert "weight decay 0.1 · gradients clipped at 1 · decay of all" in dict(payload(everything)["about"])["Optimiser"]
    (settings,) = made["sections"][-1]["tables"]
    assert settings["folded"]
    assert ["data.across_documents", "true"] in settings["rows"]
    assert ["objective.jump.weight", "1"] in settings["rows"]
    assert not [row for row in settings["rows"] if row[0] in ("about", "report_to", "objective.aligned")]


def test_the_costs_of_a_run(synthetic):
    results = synthetic.training()
    ((cost,),) = [section["tables"] for section in payload(results)["sections"] if section["id"] == "cost"]
    clock = 50 * 0.4 * (3 + 3 * 1.05)
    assert cost["rows"] == [
        ["Training time", f"{clock / 60:.0f} min"],
        ["Throughput", "5,120 tokens/s at last (4,876 to 5,120)"],
        ["Peak memory", "1.2 GiB"],
    ]


def test_one_row_a_run_at_the_common_step(synthetic, page):
    runs = synthetic.trainings()
    rows = {row[0]: row[1:] for row in page["models"]["rows"]}
    assert page["models"]["columns"] == [
        "Validation loss", "Difference", "Jump of the last layer", "Peak memory", "Parameters",
    ]  # fmt: skip
    assert list(rows) == ["tiny-llama (baseline)", "tiny-jreg", "tiny-lime", "half-depth"]
    for cells, one in zip(rows.values(), runs, strict=True):
        assert number(cells[0]) == pytest.approx(value(one, "validation_loss", 200), abs=5e-4)
        depth = one.meta["model"]["num_layers"]
        assert number(cells[2]) == pytest.approx(value(one, "jump_rate", 200, layer=depth), abs=0.05)
    for (name, cells), one in list(zip(rows.items(), runs, strict=True))[1:]:
        loss, memory = (
            [value(result, measure, 200) for result in (one, runs[0])] for measure in ("validation_loss", "peak_memory")
        )
        sizes = [result.meta["model"]["parameters"] for result in (one, runs[0])]
        assert number(cells[1]) == pytest.approx(loss[0] - loss[1], abs=5e-4), name
        ratios = [memory[0] / memory[1], sizes[0] / sizes[1]]
        assert [number(cell) for cell in cells[3:]] == pytest.approx(ratios, abs=6e-3), name
    assert rows["tiny-llama (baseline)"][1] == "–"


def test_the_tables_of_the_sections(synthetic, page):
    found = {section["id"]: section["tables"] for section in page["sections"]}
    jumps = {row[0]: row[1:] for row in found["displacement"][0]["rows"]}
    base, jreg = synthetic.trainings()[:2]
    rates = [value(one, "jump_rate", 200, layer=12) for one in (jreg, base)]
    assert jumps["tiny-jreg"][0] == f"{rates[0]:.1f} % (−{rates[1] - rates[0]:.1f})"
    profiles = [
        one.table[(one.table.measure == "displacement") & (one.table.step == 200)].value.to_numpy()
        for one in (jreg, base)
    ]
    change = 100 * (profiles[0] - profiles[1])
    assert [number(cell) for cell in jumps["tiny-jreg"][3:]] == pytest.approx([np.median(change)], abs=5e-3)
    differing = found["settings"][1]
    assert [row[0] for row in differing["rows"]] == [
        "method", "model.num_hidden_layers", "objective.jump.weight", "objective.orthogonality.weight",
        "router_learning_rate",
    ]  # fmt: skip
    assert differing["rows"][-1] == ["router_learning_rate", "–", "–", "0.01", "–"]
    assert [row[0] for row in found["settings"][0]["rows"]] == [row[0] for row in page["models"]["rows"]]


def test_what_is_said_first_and_what_is_shared(page):
    view = page
    assert [sentence.split(" ")[0] for sentence in view["sentences"]] == ["Validation"] * 3
    assert len(view["more_sentences"]) == 24
    about = dict(page["about"])
    assert about["Schedule"].startswith("300 steps")
    assert not [what for what in about if what.startswith("Model")]  # they differ: they stand in a table


def test_settings_are_flat_and_as_written():
    nested = {"a": {"b": 1e-3, "c": None, "d": []}, "e": True, "f": ["x", 2], "g": 2_000_000.0, "h": 0.123456789}
    assert flatten(nested) == {"a.b": "0.001", "e": "true", "f": "x, 2", "g": "2000000", "h": "0.123456789"}


def test_numbers_with_their_units():
    assert figure_of({"value": 5120.4, "unit": "tokens/s"}) == ("5,120", "")
    assert figure_of({"value": 1536.0, "unit": "MiB"}) == ("1.5", "GiB")
    assert quantity(5120.4, "tokens/s") == "5,120 tokens/s"
    assert (quantity(2_630_784, "1"), quantity(0.25, "1"), quantity(None, "s")) == ("2.63 M", "0.250", "–")
    assert [seconds(one) for one in (0.0123, 90.0, 600, 9000)] == ["12.3 ms", "90.0 s", "10 min", "2.5 h"]


def test_a_run_that_has_hardly_begun_still_gives_a_page(synthetic):
    results = synthetic.training()
    made = payload(Results(results.table.iloc[:0], {"kind": "training"}))
    assert made["sections"] == []
    assert made["title"] == "Unnamed model"
    start = payload(Results(results.table[results.table.step == 0], {**results.meta, "headline": {}}))
    assert "loss" in start["figures"]
    lost = payload(Results(results.table.assign(value=math.nan), results.meta))
    assert not [section for section in lost["sections"] if section["id"] == "cost"]


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["training", "training_comparison"])
def test_every_figure_is_drawn_and_nothing_scrolls_sideways(pages, visit, ready, kind):
    page = visit(pages(kind))
    assert page.locator(".plot").count() >= 6
    assert page.evaluate(EMPTY) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    page.set_viewport_size({"width": 320, "height": 844})
    page.wait_for_timeout(300)
    ready(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    unnamed = page.locator(".verdict-table").evaluate_all("(all) => all.filter((one) => !one.ariaLabel).length")
    assert unnamed == 0


@pytest.mark.browser
def test_the_browser_shows_the_numbers(pages, visit):
    page = visit(pages("training_comparison"), color_scheme="dark")
    results = Results.load(pages("training_comparison").parent)
    lines = page.evaluate("document.querySelector('[data-figure=loss]').data.map((trace) => [trace.name, trace.y])")
    for name, shown in lines:
        rows = results.table[(results.table.model == name) & (results.table.measure == "validation_loss")]
        np.testing.assert_allclose(shown, rows.sort_values("step").value, rtol=1e-5)
    assert "3.550 nats" in page.locator("#cards .verdict-table").inner_text()
    figure = page.locator("figure", has=page.get_by_role("heading", name="Loss over training", exact=True))
    figure.get_by_label("Second half").focus()
    page.keyboard.press("Space")
    shown = page.evaluate("document.querySelector(\"[data-figure='loss:later']\").data.map((trace) => trace.x[0])")
    assert shown == [150, 150, 150, 100]
    figure.get_by_text("Numbers").click()
    steps = figure.locator(".as-table tbody th").all_inner_texts()
    assert steps == ["100", "150", "200", "250", "300"]


@pytest.mark.browser
def test_hostile_text_stays_text(synthetic, visit, tmp_path):
    runs = synthetic.trainings()[:2]
    for one in runs:
        one.meta = json.loads(json.dumps(one.meta))
        one.meta["settings"]["about"] = one.meta["recipe"] = one.meta["data"]["name"] = HOSTILE[0]
    runs[1].meta["settings"] |= {"method": HOSTILE[1], HOSTILE[0]: HOSTILE[3]}
    runs[1].table["site"] = runs[1].table["site"].replace({"jump": HOSTILE[1]})
    runs[1].meta["warnings"] = HOSTILE
    path = write(compare(runs, names=[HOSTILE[1], HOSTILE[3][:1000]]).save(tmp_path / "both"))
    page = visit(path)
    assert page.locator("script").count() == 3
    assert page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert "<img src=x onerror=alert(2)>" in page.locator("#cards .verdict-table").inner_text()
    alone = visit(write(runs[1].save(tmp_path / "one")))
    assert alone.locator("script").count() == 3
    assert alone.locator("h1").inner_text() == HOSTILE[0]


def test_columns_that_no_run_fills_are_left_out(synthetic):
    runs = synthetic.trainings()[:2]
    for one in runs:
        one.table = one.table[~one.table.measure.isin(["elapsed", "peak_memory", "jump_rate"])]
    made = payload(compare(runs, names=["a", "b"]))
    assert made["models"]["columns"] == ["Validation loss", "Difference", "Parameters"]
    assert pd.notna(made["sentences"][0])
