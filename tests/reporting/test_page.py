"""The pages in a real browser: drawn, quiet, operable, legible, inert."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fulldepth.comparison import compare
from fulldepth.reporting import write
from fulldepth.results import Results

pytestmark = pytest.mark.browser
TALLEST = {
    "language_model": 6000, "classifier": 6000, "series": 8000, "comparison": 8000, "minimal": 6000,
    "image_classifier": 8000, "two_towers": 6000, "training": 6000, "training_comparison": 8000,
}  # fmt: skip
"""Builder of results -> largest height of its page in pixels."""
EMPTY = """() => [...document.querySelectorAll(".plot")]
    .filter((div) => !(div.data || []).some((trace) => (trace.z || trace.y || []).flat().some((one) => one != null)))
    .map((div) => div.dataset.figure)"""
SIZES = """() => [...document.querySelectorAll(".plot")].filter((div) => !div.querySelector(".main-svg")).length"""
WIDTH = "document.documentElement.scrollWidth"
BOTTOM = "(node) => node.getBoundingClientRect().bottom"


def unfold(page):
    """Open everything that is folded; the figures inside are drawn as it opens."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait_for_function(f"({SIZES})() === 0")


@pytest.mark.parametrize("kind", TALLEST)
def test_a_page_is_short_narrow_and_full_of_data(pages, visit, ready, kind):
    page = visit(pages(kind))
    assert page.evaluate("document.documentElement.scrollHeight") <= TALLEST[kind]
    assert page.evaluate(WIDTH) <= 1280
    unfold(page)
    assert page.locator(".plot").count() >= 1
    assert page.evaluate(EMPTY) == []
    names = page.locator(".plot").evaluate_all("(all) => all.map((div) => [div.getAttribute('role'), div.ariaLabel])")
    assert all(role == "img" and len(name) > 20 for role, name in names)
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_timeout(300)
        ready(page)
        assert page.evaluate(WIDTH) <= width
        plots = page.locator(".plot .main-svg:first-child")
        assert max(plots.evaluate_all("(all) => all.map((svg) => svg.clientWidth)")) <= width
    if page.locator("#lens-box").is_visible():
        inner, outer = page.locator("#lens-box").evaluate("(box) => [box.scrollWidth, box.clientWidth]")
        assert inner > outer


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_answers(pages, visit, scheme):
    page = visit(pages("language_model"), viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    story = page.locator("#story")
    assert "Displacement is clearly below 0.02 (16 degrees) in" in story.inner_text()
    assert "fulldepth skip search runs/llama-12x256/checkpoint-3000 --data corpus:builtin" in story.inner_text()
    assert story.evaluate(BOTTOM) < 400
    assert page.locator("#profile").evaluate(BOTTOM) < 500
    assert page.locator("[data-figure=displacement] .xtick text").first.evaluate(BOTTOM) <= 800
    assert page.locator("#cards").evaluate("(node) => node.getBoundingClientRect().top") > 700
    assert not page.locator("#remarks li").first.is_visible()  # folded
    assert page.locator("[data-figure=lens_loss] .main-svg").count() == 0
    unfold(page)
    assert page.locator("[data-figure=lens_loss]").evaluate("(div) => div.data[0].y.length") == 13
    text = page.locator("#verdict").inner_text().replace("\n", "")
    for part in ("The last layer jumps by 22.7 %", "9of 12", "16,384 tokens", "nc1: it needs labelled data"):
        assert part in text, part
    expected = Results.load(pages("language_model").parent).values("displacement", "mean", "residual").to_numpy()
    drawn = page.evaluate("document.querySelector('[data-figure=displacement]').data[2].y")
    np.testing.assert_allclose(drawn, expected, rtol=1e-5)


def test_a_layer_of_the_strip_tells_its_numbers_and_leads_to_the_figure(pages, visit, ready):
    page = visit(pages("two_towers"))
    assert page.locator("#profile h3").all_inner_texts() == ["Image", "Text"]
    strips = page.locator(".profile-columns")
    assert [strips.nth(number).locator("button").count() for number in (0, 1)] == [4, 6]
    layer = strips.nth(1).locator("button").nth(4)
    layer.hover()
    assert page.locator("#profile-readout").inner_text().startswith("Text, layer 5: displacement")
    layer.locator("i").nth(1).click()
    ready(page)
    bands = "document.querySelector(\"[data-figure^='coherence:Text']\").layout.shapes.map((one) => [one.x0, one.x1])"
    assert page.evaluate(bands) == [[4.5, 5.5]]
    others = "(document.querySelector(\"[data-figure^='displacement:Image']\").layout.shapes || []).length"
    assert page.evaluate(others) == 0
    page.mouse.move(5, 5)
    layer.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#profile-readout").inner_text().startswith("Text, layer 4: ")


def test_figures_switch_zoom_show_numbers_and_are_downloaded(pages, visit):
    page = visit(pages("language_model"), accept_downloads=True)
    results = Results.load(pages("language_model").parent)
    figure = page.locator("[data-figure=displacement]")
    figure.hover()
    for format in ("PNG", "SVG"):
        with page.expect_download() as download:
            figure.locator(f"[data-title='Download as {format}']").click()
        assert download.value.suggested_filename == f"displacement.{format.lower()}"
        content = download.value.path().read_bytes()
        assert content.startswith(b"\x89PNG" if format == "PNG" else b"<svg")
    assert "Displacement per layer" in content.decode()
    before = figure.evaluate("(div) => div.layout.xaxis.range.join()")
    box = figure.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 240, box["y"] + 120, steps=4)
    page.mouse.up()
    assert figure.evaluate("(div) => div.layout.xaxis.range.join()") != before
    maps = page.locator("figure", has_text="Cosine similarity of layers")
    maps.get_by_label("Raw", exact=True).focus()
    page.keyboard.press("Space")
    raw = page.evaluate("document.querySelector(\"[data-figure='cosine:mean_raw']\").data[0].z[0][1]")
    rows = results.table[(results.table.measure == "cosine") & (results.table.statistic == "mean_raw")]
    assert raw == pytest.approx(rows[(rows.layer == 0) & (rows.other == 1)].value.item(), rel=1e-5)
    jumps = page.locator("figure", has=page.locator("[data-figure=jump_rate]"))
    jumps.get_by_text("Numbers", exact=True).click()
    rates = results.values("jump_rate", "value").sort_index()
    assert jumps.locator("tbody th").all_inner_texts() == [str(layer) for layer in rates.index]
    np.testing.assert_allclose([float(cell) for cell in jumps.locator("tbody td").all_inner_texts()], rates, rtol=1e-3)


def test_the_lens_grid_is_the_document_and_keys_move_in_it(pages, visit):
    page = visit(pages("language_model"))
    sample = Results.load(pages("language_model").parent).meta["lens_grid"]["samples"][0]
    rows = page.locator(".lens tbody tr")
    assert rows.locator("th").all_inner_texts() == [*map(str, range(12, 0, -1)), "emb"]
    shown = [cell.replace("·", " ").replace("⏎", "\n") for cell in rows.first.locator("td").all_inner_texts()]
    assert shown == [token for token, _ in sample["grid"][12]]
    for position, settled in enumerate(sample["saturation"]):
        assert page.locator(f".lens td.stays[data-position='{position}']").count() == 12 - settled + 1
    title = page.locator(".lens td[data-layer='12'][data-position='1']").get_attribute("title")
    assert f"{sample['grid'][12][1][1]:.3f}" in title
    assert "the true token is ·the" in title
    before = page.locator(".lens").inner_text()
    page.get_by_label("Sample", exact=True).select_option("Sample 2")
    assert page.locator(".lens").inner_text() != before
    page.locator(".lens td[tabindex='0']").focus()
    assert "Layer 12, position 1" in page.locator("#readout").inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "Layer 11, position 2" in page.locator("#readout").inner_text()
    assert page.locator(".lens td[tabindex='0']").count() == 1


def test_rows_of_a_classifier_are_samples_and_columns_layers(pages, visit):
    page = visit(pages("image_classifier"))
    samples = Results.load(pages("image_classifier").parent).meta["lens_grid"]["samples"]
    assert page.locator("#lens-title").inner_text() == "Samples by layer"
    rows = page.locator(".lens tbody tr:not(.group)")
    assert rows.count() == len(samples) == 12
    for number, sample in enumerate(samples):
        cells = rows.nth(number).locator("td")
        assert cells.locator("bdi").all_inner_texts() == [row[0][0] for row in sample["grid"]]
        right = [row[0][0] == sample["targets"][0] for row in sample["grid"]]
        marks = cells.evaluate_all("(all) => all.map((td) => [td.matches('.right'), td.matches('.wrong')])")
        assert marks == [[good, not good] for good in right]
    pictures = page.locator(".lens img")
    assert pictures.evaluate_all("(all) => all.map((img) => img.src)") == [sample["picture"] for sample in samples]
    page.locator(".lens td[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#readout").inner_text().startswith("Image 2, layer 1: predicts frog with probability 0.300")


def test_models_and_runs_stand_side_by_side(pages, visit):
    page = visit(pages("comparison"))
    assert "22.7 %" in page.locator(".verdict-table").inner_text()
    maps = page.locator("[data-figure^='cka:']")
    assert len(set(maps.evaluate_all("(all) => all.map((div) => Math.round(div.getBoundingClientRect().top))"))) == 1
    before = page.locator(".lens tbody tr").count()
    page.get_by_label("Model", exact=True).select_option("half-depth")
    assert (before, page.locator(".lens tbody tr").count()) == (13, 7)
    page = visit(pages("training_comparison"), color_scheme="dark")
    assert "3.550 nats" in page.locator("#cards .verdict-table").inner_text()


BACKGROUNDS = """() => {
    const page = [document.documentElement, document.querySelector(".lens th")];
    const shown = (svg) => !svg.closest("details.more:not([open])");
    const all = [...document.querySelectorAll(".plot .main-svg:first-child")].filter(shown);
    const plots = all.map((svg) => svg.style.background);
    return page.map((node) => getComputedStyle(node).backgroundColor).concat(plots.filter(Boolean));
}"""
CONTRAST = """() => {
    const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const light = (colour) => {
        const [r, g, b] = colour.match(/[0-9.]+/g).map((part) => channel(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (node, behind) => {
        const [low, high] = [getComputedStyle(node).color, behind].map(light).sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const paper = getComputedStyle(document.documentElement).backgroundColor;
    const text = [...document.querySelectorAll("h1, h2, h3, p, dt, dd, summary, .name, .symbol, nav a, label")];
    const cells = [...document.querySelectorAll(".lens td")];
    const shade = (node) => getComputedStyle(node).backgroundColor;
    return [text.map((node) => ratio(node, paper)), cells.map((node) => ratio(node, shade(node)))].map((all) => Math.min(...all));
}"""  # noqa: E501


@pytest.mark.parametrize(("scheme", "colour"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")])
def test_light_dark_and_paper(pages, visit, ready, scheme, colour):
    page = visit(pages("series"), color_scheme=scheme)
    assert set(page.evaluate(BACKGROUNDS)) == {colour}
    text, cells = page.evaluate(CONTRAST)
    assert text >= 4.5
    assert cells >= 3.5
    page.emulate_media(media="print")
    page.wait_for_function("() => !document.querySelector('.method:not([open])')")
    assert set(page.evaluate(BACKGROUNDS)) == {"rgb(255, 255, 255)"}
    widths = page.locator(".plot .main-svg:first-child").evaluate_all("(all) => all.map((svg) => svg.clientWidth)")
    assert max(widths) <= 340
    page.emulate_media(media="screen", color_scheme="dark" if scheme == "light" else "light")
    page.wait_for_function("() => !document.querySelector('.method[open]')")
    ready(page)
    assert colour not in page.evaluate(BACKGROUNDS)
    assert page.pdf(format="A4")[:5] == b"%PDF-"


def test_the_keyboard_reaches_every_control(pages, visit):
    page = visit(pages("series"))
    assert page.locator("main h2").all_inner_texts() == [
        "Verdict at step 3,000", "Displacement and jump", "Similarity of layers", "Predictions by depth", "Coherence",
        "Norms, entropy and weights", "Lens grid", "Over training", "How to read the numbers",
    ]  # fmt: skip
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(140):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.type || document.activeElement.tagName")
        )
    assert {"lens-sample", "lens-box", "radio", "SUMMARY", "TD"} <= reached
    unnamed = "[...document.querySelectorAll('input, select')].filter((one) => !one.labels.length).map((one) => one.id)"
    assert page.evaluate(unnamed) == []


def test_a_browser_that_cannot_unpack_says_so(pages, browser):
    context = browser.new_context()
    context.add_init_script("delete window.DecompressionStream")
    page = context.new_page()
    page.goto(pages("language_model").as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert "This browser cannot unpack the figures" in page.locator("#no-figures").inner_text()
    figure = page.locator("figure", has=page.locator("[data-figure=jump_rate]"))
    figure.get_by_text("Numbers", exact=True).click()
    assert figure.locator("tbody tr").count() == 11
    context.close()


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\u202eevil\u202c",
    "a\x00b",
    "\u2028<!--<script>",
    "<a href='javascript:alert(3)'>x</a>%{customdata}<b>",
    "x" * 100_000,
    "שלום עולם",
]
INERT = "main img:not([src^='data:image/']), main a[href^='javascript'], main iframe"


def test_hostile_text_stays_text(synthetic, visit, tmp_path):
    results = synthetic.comparison()
    meta, table = json.loads(json.dumps(results.meta)), results.table.copy()
    subject = meta["models"][1]
    subject["model"] |= {"name": "".join(HOSTILE[:6]), "class": HOSTILE[0]}
    subject["data"]["name"] = HOSTILE[6]
    subject["headline"]["zeta_L"]["sentence"] = HOSTILE[1]
    subject["headline"][HOSTILE[0]] = {"value": 1, "unit": HOSTILE[1], "sentence": HOSTILE[2]}
    meta["warnings"], meta["left_out"] = HOSTILE, [{"measure": text, "reason": text} for text in HOSTILE]
    meta["versions"][HOSTILE[1]] = HOSTILE[0]
    sample = subject["lens_grid"]["samples"][0]
    sample["title"] = HOSTILE[0]
    for position, text in enumerate(HOSTILE):
        sample["tokens"][position] = sample["targets"][position] = text
        sample["grid"][3][position] = [text, 0.5]
    meta["models"][1]["label"], meta["models"][2]["label"] = HOSTILE[0], HOSTILE[6]
    table["model"] = table["model"].replace({"jump-penalty": HOSTILE[0], "half-depth": HOSTILE[6]})
    table["statistic"] = table["statistic"].replace({"mean:plain:1": f"mean:{HOSTILE[1]}:1"})
    page = visit(write(Results(table, meta).save(tmp_path / "models")))
    assert page.locator("script").count() == 3
    assert page.locator(INERT).count() == 0
    assert page.evaluate(WIDTH) <= 1280
    page.get_by_label("Model", exact=True).select_option(index=1)
    cells = [page.locator(f".lens td[data-layer='3'][data-position='{at}']").inner_text() for at in range(8)]
    assert [cells[at] for at in (0, 2, 3, 7)] == [HOSTILE[0], "⟨U+202E⟩evil⟨U+202C⟩", "a␀b", "שלום·עולם"]
    assert len(cells[6]) == 40
    runs = synthetic.trainings()[:2]
    runs[1].meta["settings"] |= {"about": HOSTILE[0], "method": HOSTILE[1], HOSTILE[0]: HOSTILE[6]}
    runs[1].meta |= {"recipe": HOSTILE[0], "warnings": HOSTILE}
    runs[1].table["site"] = runs[1].table["site"].replace({"jump": HOSTILE[1]})
    classes = synthetic.image_classifier(names=(*HOSTILE[:2], "\"quoted\" 'twice' `here`"))
    both = compare(runs, names=[HOSTILE[1], HOSTILE[6][:1000]])
    for name, one in (("run", runs[1]), ("runs", both), ("classes", classes)):
        page = visit(write(one.save(tmp_path / name)))
        assert page.locator("script").count() == 3
        assert page.locator(INERT).count() == 0
        assert page.evaluate(WIDTH) <= 1280


@pytest.mark.parametrize("kind", ["comparison", "training_comparison"])
def test_runs_may_be_named_like_anything(synthetic, visit, tmp_path, kind):
    """Traces, legends and tables hold the label itself; the dark scheme looks every string up among the colours."""
    results = getattr(synthetic, kind)()
    labels = [model["label"] for model in results.meta["models"]]
    renamed = dict(zip(labels, ["__proto__", "constructor", "toString"], strict=False))
    meta = json.loads(json.dumps(results.meta))
    meta["baseline"] = renamed[meta["baseline"]]
    for model in meta["models"]:
        model["label"] = renamed.get(model["label"], model["label"])
    whole = results.table.reset_index(drop=True)
    few = whole["measure"].isin(["displacement", "jump_rate", "cka", "validation_loss"])
    table = whole[few].assign(model=whole["model"].replace(renamed))
    page = visit(write(Results(table, meta).save(tmp_path)), color_scheme="dark")
    unfold(page)
    assert page.evaluate(EMPTY) == []
    shown = page.evaluate("[...document.querySelectorAll('.legendtext')].map((text) => text.textContent).join(' ')")
    for label in renamed.values():
        assert label in shown, label
        assert label in page.locator("#cards").inner_text(), label
