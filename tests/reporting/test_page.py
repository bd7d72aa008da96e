"""The page in a real browser: drawn, quiet, operable, legible, inert."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fulldepth.reporting import write
from fulldepth.results import Results

pytestmark = pytest.mark.browser
KINDS = ["language_model", "series", "classifier", "comparison", "minimal"]
EMPTY = """() => [...document.querySelectorAll(".plot")].filter((div) => !div.hidden)
    .filter((div) => !div.closest("details.more:not([open])"))  // folded figures are drawn when they are opened
    .filter((div) => !(div.data || []).some((trace) =>
        (trace.z || trace.y || trace.median || []).flat().some((value) => value != null)))
    .map((div) => div.dataset.figure)"""
SIZES = """() => [...document.querySelectorAll(".plot")].filter((div) => !div.hidden)
    .filter((div) => !div.querySelector(".main-svg")).length"""


def y_of(page, figure, trace):
    return page.evaluate(
        "([name, at]) => document.querySelector(`[data-figure='${name}']`).data[at].y", [figure, trace]
    )


def unfold(page):
    """Open everything that is folded; the figures inside are drawn as it opens."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait_for_timeout(50)
    page.wait_for_function(f"({SIZES})() === 0")


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_has_data_and_a_name(pages, visit, kind):
    page = visit(pages(kind))
    unfold(page)
    assert page.locator(".plot").count() >= 1
    assert page.evaluate(EMPTY) == []
    assert page.evaluate(SIZES) == 0
    names = page.locator(".plot").evaluate_all("(all) => all.map((div) => [div.getAttribute('role'), div.ariaLabel])")
    assert all(role == "img" and len(name) > 20 for role, name in names)


def test_figures_hold_the_tables_numbers(pages, visit):
    page = visit(pages("language_model"))
    results = Results.load(pages("language_model").parent)
    expected = results.values("displacement", "mean", "residual").to_numpy()
    np.testing.assert_allclose(y_of(page, "displacement", 2), expected, rtol=1e-5)


def test_the_order_of_the_page(pages, visit):
    page = visit(pages("series"))
    assert page.locator("main h2").all_inner_texts() == [
        "Verdict at step 3,000", "Displacement and jump", "Similarity of layers", "Predictions by depth", "Coherence",
        "Norms, entropy and weights", "Lens grid", "Over training", "How to read the numbers",
    ]  # fmt: skip


def test_the_verdict_says_what_was_measured_and_what_was_not(pages, visit):
    page = visit(pages("language_model"))
    unfold(page)
    text = page.locator("#verdict").inner_text()
    for part in (
        "The last layer jumps by 22.7 %", "9\nof 12", "corpus:builtin", "16,384 tokens", "Every token counts",
        "nc1: it needs labelled data", "2,048 tokens are fewer", "LlamaForCausalLM", "9.41 M parameters",
    ):  # fmt: skip
        assert part.replace("\n", "") in text.replace("\n", ""), part
    assert page.title() == "runs/llama-12x256/checkpoint-3000 – fulldepth"


def test_readings_switch(pages, visit):
    page = visit(pages("language_model"))
    figure = page.locator("figure", has_text="Cosine similarity of layers")
    before = page.evaluate("document.querySelector('[data-figure=cosine]').data[0].z[0][1]")
    figure.get_by_label("Raw", exact=True).focus()
    page.keyboard.press("Space")
    after = page.evaluate("document.querySelector(\"[data-figure='cosine:mean_raw']\").data[0].z[0][1]")
    table = Results.load(pages("language_model").parent).table
    rows = table[(table.measure == "cosine") & (table.layer == 0) & (table.other == 1)].set_index("statistic").value
    np.testing.assert_allclose([before, after], [rows["mean"], rows["mean_raw"]], rtol=1e-5)
    assert "states as they are" in figure.inner_text()


def test_the_lens_grid_is_the_document(pages, visit):
    page = visit(pages("language_model"))
    sample = Results.load(pages("language_model").parent).meta["lens_grid"]["samples"][0]
    rows = page.locator(".lens tbody tr")
    assert rows.count() == 13
    assert rows.first.locator("th").inner_text() == "12"
    assert rows.last.locator("th").inner_text() == "emb"
    shown = [cell.replace("·", " ").replace("⏎", "\n") for cell in rows.first.locator("td").all_inner_texts()]
    assert shown == [token for token, _ in sample["grid"][12]]
    heads = page.locator(".lens thead th bdi").all_inner_texts()
    assert [head.replace("·", " ").replace("⏎", "\n") for head in heads] == sample["tokens"]
    for position, settled in enumerate(sample["saturation"]):
        marked = page.locator(f".lens td.stays[data-position='{position}']").count()
        assert marked == 12 - settled + 1
    assert page.locator(".lens td.settled").count() == len(sample["tokens"])
    title = page.locator(".lens td[data-layer='12'][data-position='1']").get_attribute("title")
    assert f"{sample['grid'][12][1][1]:.3f}" in title
    assert "the true token is ·the" in title


def test_the_picker_changes_the_grid_and_keys_move_in_it(pages, visit):
    page = visit(pages("language_model"))
    before = page.locator(".lens").inner_text()
    page.get_by_label("Sample", exact=True).select_option("Sample 2")
    assert page.locator(".lens").inner_text() != before
    assert page.get_by_label("Sample", exact=True).evaluate("(picker) => picker === document.activeElement")
    cell = page.locator(".lens td[tabindex='0']")
    cell.focus()
    assert "Layer 12, position 1" in page.locator("#readout").inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "Layer 11, position 2" in page.locator("#readout").inner_text()
    assert page.locator(".lens td[tabindex='0']").count() == 1


def test_no_lens_grid_without_one(pages, visit):
    page = visit(pages("classifier"))
    assert not page.locator("#lens").is_visible()
    assert "Lens grid" not in page.locator("nav").inner_text()


def test_a_comparison_shows_models_side_by_side(pages, visit):
    page = visit(pages("comparison"))
    table = page.locator(".verdict-table").inner_text()
    assert "baseline" in table
    assert "half-depth" in table
    assert "22.7 %" in table
    maps = page.locator("[data-figure^='cka:']")
    assert maps.count() == 3
    tops = maps.evaluate_all("(all) => all.map((div) => Math.round(div.getBoundingClientRect().top))")
    assert len(set(tops)) == 1
    before = page.locator(".lens tbody tr").count()
    page.get_by_label("Model", exact=True).select_option("half-depth")
    assert (before, page.locator(".lens tbody tr").count()) == (13, 7)


def test_every_figure_has_its_numbers_as_a_table(pages, visit):
    page = visit(pages("language_model"))
    figure = page.locator("figure", has=page.locator("[data-figure=jump_rate]"))
    figure.get_by_text("Numbers", exact=True).click()
    rates = Results.load(pages("language_model").parent).values("jump_rate", "value").sort_index()
    assert figure.locator("tbody th").all_inner_texts() == [str(layer) for layer in rates.index]
    shown = [float(cell) for cell in figure.locator("tbody td").all_inner_texts()]
    np.testing.assert_allclose(shown, rates.to_numpy(), rtol=1e-3)


def test_a_band_has_both_its_ends_in_the_table(pages, visit):
    page = visit(pages("language_model"))
    figure = page.locator("figure", has=page.locator("[data-figure=displacement]"))
    figure.get_by_text("Numbers", exact=True).first.click()
    names = figure.locator("thead th").all_inner_texts()
    column = next(at for at, name in enumerate(names) if name == "p05–p95")
    results = Results.load(pages("language_model").parent)
    low, high = (results.values("displacement", name, "residual") for name in ("p05", "p95"))
    rows = [row.inner_text().split("\t") for row in figure.locator("tbody tr").all()]
    shown = {int(row[0]): [float(end) for end in row[column].split(" to ")] for row in rows if row[column] != "–"}
    assert len(shown) > 1
    for layer, ends in shown.items():
        np.testing.assert_allclose(ends, [low[layer], high[layer]], rtol=1e-3)


BACKGROUNDS = """() => {
    const page = [document.documentElement, document.querySelector(".lens th")];
    const shown = (svg) => !svg.closest("details.more:not([open])");
    const all = [...document.querySelectorAll(".plot .main-svg:first-child")].filter(shown);
    const plots = all.map((svg) => svg.style.background);
    return page.map((node) => getComputedStyle(node).backgroundColor).concat(plots.filter(Boolean));
}"""


@pytest.mark.parametrize(("scheme", "colour"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")])
def test_light_and_dark(pages, visit, ready, scheme, colour):
    page = visit(pages("language_model"), color_scheme=scheme)
    assert set(page.evaluate(BACKGROUNDS)) == {colour}
    line = "document.querySelector('[data-figure=displacement]').data[2].line.color"
    here = page.evaluate(line)
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    ready(page)
    assert set(page.evaluate(BACKGROUNDS)) != {colour}
    assert page.evaluate(line) != here


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(pages, visit, scheme):
    page = visit(pages("series"), color_scheme=scheme)
    measured = page.evaluate("""() => {
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
        return [text.map((node) => ratio(node, paper)), cells.map((node) => ratio(node, shade(node)))];
    }""")
    assert min(measured[0]) >= 4.5
    assert min(measured[1]) >= 3.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_does_not_scroll_sideways(pages, visit, ready, kind):
    page = visit(pages(kind), viewport={"width": 390, "height": 844})
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_timeout(300)
        ready(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        plots = page.locator(".plot:visible .main-svg:first-child")
        widths = plots.evaluate_all("(all) => all.map((svg) => svg.clientWidth)")
        assert max(widths) <= width
    if page.locator("#lens-box").is_visible():
        inner, outer = page.locator("#lens-box").evaluate("(box) => [box.scrollWidth, box.clientWidth]")
        assert inner > outer
        page.locator("#lens-box").evaluate("(box) => { box.scrollLeft = 400; }")
        left = page.locator(".lens tbody th").first.evaluate("(cell) => cell.getBoundingClientRect().left")
        box = page.locator("#lens-box").evaluate("(box) => box.getBoundingClientRect().left")
        assert abs(left - box) <= 2  # the layer's name stays in sight


def test_paper(pages, visit):
    page = visit(pages("series"), color_scheme="dark")
    page.emulate_media(media="print")
    page.wait_for_function("() => !document.querySelector('.method:not([open]):not([hidden])')")
    assert set(page.evaluate(BACKGROUNDS)) == {"rgb(255, 255, 255)"}
    widths = page.locator(".plot .main-svg:first-child").evaluate_all("(all) => all.map((svg) => svg.clientWidth)")
    assert max(widths) <= 340
    assert page.locator(".method:not([open]):not([hidden])").count() == 0
    page.emulate_media(media="screen")
    page.wait_for_function("() => !document.querySelector('.method[open]')")
    assert page.locator(".method[open]").count() == 0
    assert set(page.evaluate(BACKGROUNDS)) == {"rgb(20, 23, 27)"}
    assert page.pdf(format="A4")[:5] == b"%PDF-"


def test_the_keyboard_reaches_every_control(pages, visit):
    page = visit(pages("series"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(140):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.type || document.activeElement.tagName")
        )
    assert {"lens-sample", "lens-box", "radio", "SUMMARY", "TD"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select')].filter((one) => !one.labels.length).map((one) => one.id)"
    )
    assert unnamed == []


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\u202eevil\u202c",
    "a\x00b",
    "\u2028<!--<script>",
    "<a href='javascript:alert(3)'>x</a>%{customdata}<b>",
    "=cmd()",
    "x" * 1_000_000,
    "\ud800",
    "שלום עולם",
]


@pytest.mark.parametrize("kind", ["language_model", "comparison"])
def test_hostile_text_stays_text(synthetic, visit, tmp_path, kind):
    results = getattr(synthetic, kind)()
    meta = json.loads(json.dumps(results.meta))
    bad = [text for text in HOSTILE if text != "\ud800"]
    table = results.table.copy()
    subject = meta if kind == "language_model" else meta["models"][1]
    subject["model"]["name"] = "".join(HOSTILE[:6])
    subject["model"]["class"] = HOSTILE[0]
    subject["data"]["name"] = HOSTILE[7]
    subject["headline"]["zeta_L"]["sentence"] = HOSTILE[1]
    subject["headline"][HOSTILE[0]] = {"value": 1, "unit": HOSTILE[1], "sentence": HOSTILE[2]}
    meta["warnings"], meta["left_out"] = bad, [{"measure": text, "reason": text} for text in bad]
    meta["versions"][HOSTILE[1]] = HOSTILE[0]
    sample = subject["lens_grid"]["samples"][0]
    sample["title"] = HOSTILE[0]
    for position, text in enumerate(HOSTILE):
        sample["tokens"][position] = sample["targets"][position] = text.replace("\ud800", "�")
        sample["grid"][3][position] = [text.replace("\ud800", "�"), 0.5]
    table["site"] = table["site"].replace({"mlp.up_proj": HOSTILE[5], "mlp.down_proj": HOSTILE[6]})
    table["statistic"] = table["statistic"].replace({"mean:plain:1": f"mean:{HOSTILE[1]}:1"})
    if kind == "comparison":
        meta["models"][1]["label"] = HOSTILE[0]
        meta["models"][2]["label"] = HOSTILE[7]
        table["model"] = table["model"].replace({"jump-penalty": HOSTILE[0], "half-depth": HOSTILE[7]})
    path = write(Results(table, meta).save(tmp_path))
    assert path.stat().st_size < 8_000_000
    page = visit(path)
    assert page.evaluate(EMPTY) == []
    assert page.locator("script").count() == 3
    assert page.locator("main img, main a[href^='javascript'], main iframe").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    if kind == "comparison":
        page.get_by_label("Model", exact=True).select_option(index=1)
    cell = page.locator(".lens td[data-layer='3'][data-position='0']")
    assert cell.inner_text() == "</script><script>alert(1)</script>"
    assert page.locator(".lens td[data-layer='3'][data-position='2']").inner_text() == "⟨U+202E⟩evil⟨U+202C⟩"
    assert page.locator(".lens td[data-layer='3'][data-position='3']").inner_text() == "a␀b"
    assert len(page.locator(".lens td[data-layer='3'][data-position='7']").inner_text()) == 40
    assert page.locator(".lens td[data-layer='3'][data-position='9'] bdi").inner_text() == "שלום·עולם"


INHERITED = ["__proto__", "constructor", "toString"]
"""Names of what every JavaScript object has."""


@pytest.mark.parametrize("kind", ["comparison", "training_comparison"])
def test_runs_may_be_named_like_anything(synthetic, visit, tmp_path, kind):
    """Traces, legends and tables hold the label itself; the dark scheme looks every string up among the colours."""
    results = getattr(synthetic, kind)()
    labels = [model["label"] for model in results.meta["models"]]
    renamed = dict(zip(labels, INHERITED, strict=False))
    meta = json.loads(json.dumps(results.meta))
    meta["baseline"] = renamed[meta["baseline"]]
    for model in meta["models"]:
        model["label"] = renamed.get(model["label"], model["label"])
    whole = results.table.reset_index(drop=True)
    few = whole["measure"].isin(["displacement", "jump_rate", "cka", "effective_depth", "validation_loss"])
    table = whole[few].assign(model=whole["model"].replace(renamed))
    page = visit(write(Results(table, meta).save(tmp_path)), color_scheme="dark")
    assert page.evaluate(EMPTY) == []
    unfold(page)
    assert page.evaluate(SIZES) == 0
    names = page.evaluate(
        "[...document.querySelectorAll('.plot')].flatMap((div) => (div.data || []).map((trace) => trace.name))"
    )
    assert all(name is None or isinstance(name, str) for name in names)
    said = " ".join(str(name) for name in names)
    shown = page.evaluate("[...document.querySelectorAll('.legendtext')].map((text) => text.textContent).join(' ')")
    for label in renamed.values():
        assert label in said, label
        assert label in shown, label
        assert label in page.locator("#cards").inner_text(), label
