"""The pages: what they hold; in a real browser drawn, quiet, operable, legible and inert."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import stats

from fulldepth.core.number_format import rounded
from fulldepth.reporting import measured, render
from fulldepth.reporting.page import compact_json, embedded_json, lens_samples, payload
from fulldepth.reporting.phrases import figure_of, quantity, scaled, seconds, spread_of, visible
from fulldepth.reporting.source import PageSource
from fulldepth.reporting.style import minus
from fulldepth.reporting.tables import flatten, page_texts
from fulldepth.results import PAGE, Results, compare, report, tabulate
from json_files import any_value
from refusals import refused
from reporting import exit_folders, skip_folders, synthetic
from reporting.synthetic import payload_of

LIMIT = 2_000_000
"""Bytes of a page of one model."""
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\u202eevil\u202c",
    "a\x00b",
    "\u2028<!--<script>",
    "{{ 7 * 7 }}<a href='javascript:alert(3)'>x</a>%{customdata}<b>",
    "x" * 100_000,
    "שלום עולם",
]


@pytest.mark.parametrize("layers", [12, 80])
def test_one_light_file_without_an_address_to_fetch_from(layers):
    results = synthetic.language_model(layers)
    html = render(results.table, results.meta)
    assert len(html.encode()) <= LIMIT
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", html)
    assert not {"@import", "url("} & set(re.findall(r"@import|url\(", html))
    assert "default-src 'none'" in html
    assert html.count("</script>") == 3
    bundle = re.search(r'<script type="application/gzip" id="plotly">(.*?)</script>', html, re.S).group(1)
    assert b"* plotly.js (cartesian - minified)" in gzip.decompress(base64.b64decode(bundle))


def test_the_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = synthetic.minimal().save(tmp_path / "out")
    before = report(folder).read_text()
    monkeypatch.setattr(
        "fulldepth.core.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with refused("No space left"):
        report(folder)
    assert (folder / "report.html").read_text() == before


@given(any_value())
def test_embedded_data_comes_back_and_cannot_leave_its_element(value):
    text = embedded_json(value)
    assert text.isascii()
    assert not set(text) & set("<>&")
    assert json.loads(text) == value


@given(st.text())
def test_visible_text_has_no_character_that_draws_nothing(text):
    shown = visible(text)
    assert not [c for c in shown if c.isspace() and c != "\u3000" and ord(c) < 0x80]
    assert not set(shown) & {"\u202e", "\u202a", "\u2066", "\u200b", "\x00", "\x7f", "\u2028"}


def test_standard_errors_stand_beside_their_numbers():
    results, compared = synthetic.language_model(), synthetic.comparison()
    results.meta["headline"]["zeta_L"]["standard_error"] = 0.01234
    cards = {card["name"]: card["error"] for card in payload_of(results)["cards"]}
    assert (cards["Jump of the last layer"], cards["Mean coherence"]) == ("± 0.012", "")
    compared.meta["models"][0]["headline"]["zeta_L"]["standard_error"] = 0.5
    rows = {name: cells for name, *cells in measured.comparison_table(PageSource(compared.table, compared.meta)).rows}
    assert rows["Jump of the last layer"][0].endswith("± 0.5 %")
    assert "±" not in rows["Jump of the last layer"][1]


def test_a_number_has_as_many_decimals_as_its_error_and_no_exponent():
    def written(value, **entry):
        return " ".join((*figure_of({"value": value, **entry}), spread_of(entry))).strip()

    assert written(0.0513, unit="%", standard_error=0.0056) == "0.051 % ± 0.0056"
    assert written(10.3, unit="%", standard_error=0.12) == "10.3 % ± 0.12"
    assert written(0.0071234, unit="1", standard_error=6.1e-5) == "0.00712  ± 0.000061"
    assert written(29.0, unit="layers", interval=[28.0, 29.0]) == "29 layers (28 to 29)"
    assert (spread_of({"standard_error": 1234.0}), spread_of({"standard_error": math.nan})) == ("± 1,234", "")
    assert (rounded(51_234.5, "+.3g"), rounded(-0.12345, ".3g"), minus(-1234.5, "+.3g")) == (
        "+51,234",
        "-0.123",
        "−1,234",
    )
    small = [minus(value, ".3g") for value in (1e-9, -2.5e-12, 0.00012)]
    assert small == ["1 × 10⁻⁹", "−2.5 × 10⁻¹²", "0.00012"]


def test_a_comparison_says_first_what_its_table_does_not():
    told, news = {"zeta_L:b": {"sentence": "told"}}, {"redundancy_change:b": {"sentence": "new"}}
    for headline, expected in (({**told, **news}, ["new", "told"]), (told, ["told"])):
        assert measured.sentences(measured.comparison_findings({"headline": headline}, None)) == expected


def test_the_lens_grid_in_numbers():
    words = {}
    sample = {"title": "S", "tokens": ["a", "\n"], "targets": ["\n", ""], "saturation": [1, 2]}
    grid = {"samples": [{**sample, "grid": [[["a", 0.25], ["b", None]], [["\n", 1.2], ["a", 0.0004]]]}]}
    (packed,) = lens_samples(grid, words)
    assert list(words) == ["a", "⏎", "", "b"]
    assert packed["top"] == [[0, 3], [1, 0]]
    assert packed["probability"] == [[250, None], [1000, 0]]
    assert lens_samples(None, words) == []


def test_numbers_as_they_are_written():
    assert figure_of({"value": 12.345, "unit": "%"}) == ("12.3", "%")
    assert figure_of({"value": 9.0, "unit": "layers"}, 12) == ("9", "of 12")
    assert [figure_of({"value": one})[0] for one in (-0.0128, 0.00416, 0, 0.9997)] == [
        "−0.013",
        "0.0042",
        "0.000",
        "0.9997",
    ]
    assert (quantity(2_630_784, "1"), quantity(5120.4, "tokens/s")) == ("2.63 M", "5,120 tokens/s")
    assert quantity(3.4, "tokens/s") == "3.4 tokens/s"  # as on the card
    assert figure_of({"value": 3.4, "unit": "tokens/s"}) == ("3.4", "")
    assert [seconds(one) for one in (0.0123, 90.0, 600, 9000)] == ["12.3 ms", "90.0 s", "10 min", "2.5 h"]
    assert (scaled(9_412_352), scaled(1.2e9), scaled(512), scaled(None)) == ("9.41 M", "1.2 B", "512", "?")
    assert compact_json({"a": [1 / 3, math.nan, (2, "x")]}) == {"a": [0.333333, None, [2, "x"]]}
    nested = {"a": {"b": 1e-3, "c": None, "d": []}, "e": True, "f": ["x", 2], "g": 2_000_000.0}
    assert flatten(nested) == {"a.b": "0.001", "e": "true", "f": "x, 2", "g": "2000000"}


def test_routers_stand_before_the_figures_of_the_memory():
    routers = [
        {"layer": 3, "source": 0, "head": 1, "tokens": [[" the", 0.8123], ["\n", 0.5], ["<b>\u202e", None]]},
        {"layer": 2, "source": 0, "head": 0, "tokens": []},
    ]
    table = tabulate([("retrieval_weight", "routing", 2, 0, "share", 0.5, 8, "1")])
    made = payload(table, {"model": {"num_layers": 3}, "router_tokens": {"routers": routers, "of": 18}})
    (memory,) = made["sections"]
    assert memory["tables"][0].rows == [["Layer 3, state 0, head 1", "·the ⏎ <b>⟨U+202E⟩", "0.812"]]
    assert memory["slots"] == [["retrieval_weight"]]


def test_the_page_of_a_training_run():
    results = synthetic.training()
    made = payload_of(results)
    assert [section["id"] for section in made["sections"]] == ["loss", "displacement", "cost", "settings"]
    words = "300 steps × 16 sequences × 128 tokens = 614,400 tokens"
    assert words in render(results.table, results.meta)
    settings = made["sections"][-1]["tables"][0].rows
    assert ["objective.jump.weight", "1"] in settings
    assert not [row for row in settings if row[0] in ("about", "report_to", "objective.aligned")]
    clock = 50 * 0.4 * (3 + 3 * 1.05)
    assert made["sections"][2]["tables"][0].rows == [
        ["Training time", f"{clock / 60:.0f} min"],
        ["Throughput", "5,120 tokens/s at last (4,876 to 5,120)"],
        ["Peak memory", "1.2 GiB"],
    ]


def test_the_tests_over_seeds_in_one_table():
    results = synthetic.over_seeds(claims={"zeta_L": "less"})
    page = payload_of(results)
    assert page["models"].columns[:2] == ["tiny-jreg", "tiny-llama"]
    rows = {row[0]: dict(zip(page["models"].columns, row[1:], strict=True)) for row in page["models"].rows}
    shown = [test for test in results.meta["tests"] if test["deviation"]]
    for test in shown:
        cells = rows[page_texts()["headlines"][test["name"]][0]]
        assert cells["Difference"].replace("−", "-") == f"{test['difference']:+.3g} ± {test['deviation']:.2g}"
        assert cells["p"].replace("−", "-") == f"{test['p']:.2g}"
        assert (cells["Claim"], cells["Pairs"]) == ("less" if test["name"] == "zeta_L" else "–", "4")
    ((differing,),) = [section["tables"] for section in page["sections"] if section["id"] == "settings"]
    assert [row[0] for row in differing.rows] == ["method", "objective.jump.weight"]
    assert page["story"]["sentences"] == page["more_sentences"][:1]
    drawn = page["figures"]["seeds"]["data"]
    expected = [difference / test["deviation"] for test in shown for difference in test["by_seed"]]
    assert_allclose(drawn[0]["x"], expected, rtol=1e-5)
    ends = np.array(drawn[1]["x"]) + drawn[1]["error_x"]["array"]
    assert_allclose(ends, [test["interval"][1] / test["deviation"] for test in shown], rtol=1e-4)


def test_losses_of_groups_by_the_flops_of_their_training():
    drawn = synthetic.over_seeds().figures()["loss_by_flops"].data
    groups = (("tiny-jreg", 7.5e14, 3.42, {"jump": 0.09}), ("tiny-llama", 6e14, 3.41, {}))
    for (name, flops, level, terms), index in zip(groups, (0, 3), strict=True):
        losses = []  # [seed, step]
        for one in synthetic.group(name, 0.1, level, terms):
            rows = one.table[one.table.measure == "validation_loss"]
            losses.append(rows.set_index("step").value)
        values = np.array(losses)
        mean, reach = values.mean(0), stats.sem(values) * stats.t.ppf(0.975, 3)
        high, low, line = drawn[index : index + 3]
        assert line.name == name
        for trace, expected in ((high, mean + reach), (low, mean - reach), (line, mean)):
            assert_allclose(trace.x, flops / 1e15 * np.arange(0, 301, 50) / 300)
            assert_allclose(trace.y, expected)
    assert "loss_by_flops" not in synthetic.training().figures()


EMPTY = """() => [...document.querySelectorAll(".plot")]
    .filter((div) => !(div.data || []).some((trace) => (trace.z || trace.y || []).flat().some((one) => one != null)))
    .map((div) => div.dataset.figure)"""
UNDRAWN = """() => [...document.querySelectorAll(".plot")].filter((div) => !div.querySelector(".main-svg")).length"""
WIDTH = "document.documentElement.scrollWidth"
BOTTOM = "(node) => node.getBoundingClientRect().bottom"
TALLEST = {"comparison": 8000, "series": 8000, "skips": 6000, "groups": 8000, "evaluation": 6000, "generation": 6000}
"""Kind of results -> largest height of its page in pixels."""


def unfold(page):
    """Open everything that is folded; the figures inside are drawn as it opens."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait_for_function(f"({UNDRAWN})() === 0")


@pytest.mark.browser
@pytest.mark.parametrize("kind", TALLEST)
def test_a_page_is_short_narrow_and_full_of_data(pages, visit, ready, kind):
    page = visit(pages(kind))
    assert page.evaluate("document.documentElement.scrollHeight") <= TALLEST[kind]
    unfold(page)
    assert page.evaluate(EMPTY) == []
    assert page.locator(".plot").count() > 0 or kind == "generation"
    names = page.locator(".plot").evaluate_all("(all) => all.map((div) => [div.getAttribute('role'), div.ariaLabel])")
    assert all(role == "img" and len(name) > 20 for role, name in names)
    page.set_viewport_size({"width": 320, "height": 844})
    page.wait_for_timeout(300)
    ready(page)
    assert page.evaluate(WIDTH) <= 320
    if kind == "skips":
        gone = page.locator("ol.strip").first.locator(".gone").all_inner_texts()
        assert gone == ["3", "1", "2", "4"]  # by depth: layers 3, 7, 8, 11
        cut = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth)"
        assert page.locator(".strip .added").evaluate_all(cut) == []


@pytest.mark.browser
def test_the_first_screen_answers_and_figures_are_operated(pages, visit):
    page = visit(pages("language_model"), viewport={"width": 1280, "height": 800}, color_scheme="dark")
    results, story = Results.load(pages("language_model").parent), page.locator("#story")
    assert "Displacement is clearly below 0.02 (16 degrees) in" in story.inner_text()
    assert "fulldepth skip search runs/llama-12x256/checkpoint-3000 --data corpus:builtin" in story.inner_text()
    assert page.locator("#profile").evaluate(BOTTOM) < 500
    figure = page.locator("[data-figure=displacement]")
    assert figure.locator(".xtick text").first.evaluate(BOTTOM) <= 800
    assert not page.locator("#remarks li").first.is_visible()  # folded
    assert page.locator("[data-figure=lens_loss] .main-svg").count() == 0
    drawn = page.evaluate("document.querySelector('[data-figure=displacement]').data[2].y")
    assert_allclose(drawn, results.values("displacement", "mean", "residual"), rtol=1e-5)
    before = figure.evaluate("(div) => div.layout.xaxis.range.join()")
    box = figure.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 240, box["y"] + 120, steps=4)
    page.mouse.up()
    assert figure.evaluate("(div) => div.layout.xaxis.range.join()") != before
    page.locator("figure", has_text="Cosine similarity of layers").get_by_label("Raw", exact=True).focus()
    page.keyboard.press("Space")
    raw = page.evaluate("document.querySelector(\"[data-figure='cosine:mean_raw']\").data[0].z[0][1]")
    assert raw == pytest.approx(results.values("cosine", "mean_raw", other=1)[0], rel=1e-5)
    rates = results.values("jump_rate", "value").sort_index()
    assert_allclose(page.locator("[data-figure=jump_rate]").evaluate("(div) => div.data[0].y"), rates, 1e-5)
    unfold(page)
    assert page.locator("[data-figure=lens_loss]").evaluate("(div) => div.data[0].y.length") == 13
    text = page.locator("#verdict").inner_text().replace("\n", "")
    for part in ("The last layer jumps by 22.7 %", "9of 12", "16,384 tokens", "nc1: it needs labelled data"):
        assert part in text, part


@pytest.mark.browser
def test_a_layer_of_the_strip_tells_its_numbers_and_leads_to_the_figure(pages, visit, ready):
    page = visit(pages("two_towers"))
    strips = page.locator(".profile-columns")
    assert [strips.nth(number).locator("button").count() for number in (0, 1)] == [4, 6]
    layer = strips.nth(1).locator("button").nth(4)
    assert layer.get_attribute("title").startswith("Text, layer 5: displacement")
    layer.locator("i").nth(1).click()
    ready(page)
    bands = "document.querySelector(\"[data-figure^='coherence:Text']\").layout.shapes.map((one) => [one.x0, one.x1])"
    assert page.evaluate(bands) == [[4.5, 5.5]]
    others = "(document.querySelector(\"[data-figure^='displacement:Image']\").layout.shapes || []).length"
    assert page.evaluate(others) == 0
    layer.focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Text, layer 4: ")


def test_a_layer_of_the_strip_is_marked_in_every_figure_over_layers(pages, visit, ready):
    page = visit(pages("language_model"))
    page.locator(".profile-columns button").nth(2).click()
    unfold(page)
    ready(page)
    figures = page.evaluate(
        "[...document.querySelectorAll('.plot')].map((div) => [div.dataset.figure, div.data[0].type,"
        " div.layout.xaxis.title.text, (div.layout.shapes || []).map((one) => [one.x0, one.x1])])"
    )
    over_layers = [figure for figure in figures if figure[2].startswith("Layer") and figure[1] != "heatmap"]
    assert {"displacement", "lens_accuracy", "lens_loss"} <= {name for name, *_ in over_layers}
    assert [name for name, _, _, shapes in over_layers if [2.5, 3.5] not in shapes] == []


@pytest.mark.browser
@pytest.mark.parametrize("layers", [12, 80])
def test_the_names_of_the_strip_stand_beside_their_rows_on_a_telephone(visit, tmp_path, layers):
    page = visit(synthetic.language_model(layers).save(tmp_path / "out") / PAGE, viewport={"width": 400, "height": 900})
    names = page.locator(".profile-names span").all()[1:]
    first, last = (page.locator(".layer").nth(at).locator("i").all() for at in (0, -1))
    assert [name.inner_text() for name in names] == ["Displacement", "Coherence", "Settled"]
    for name, start, end in zip(names, first, last, strict=True):
        beside, cell, final = (one.bounding_box() for one in (name, start, end))
        assert abs(beside["y"] + beside["height"] / 2 - cell["y"] - cell["height"] / 2) < 2
        assert beside["x"] + beside["width"] < cell["x"] < final["x"] < final["x"] + final["width"] <= 400
        assert final["width"] > 3


HOVERED = """(div) => {
    const { type, x, y } = div.data[0];
    Plotly.Fx.hover(div, type === "heatmap" ? { xval: x[0], yval: 0 } : { xval: 0 });
    return [...div.querySelectorAll(".hoverlayer text")].map((one) => one.textContent).join(" ");
}"""
"""Text of the hover boxes at the first layer of a figure."""


@pytest.mark.browser
@pytest.mark.parametrize(("layers", "least"), [(2, 2), (12, 4), (47, 4), (100, 4)])
def test_ticks_of_narrow_figures_are_layers_and_the_last_layer_is_one(layers, least, tmp_path, visit):
    path = synthetic.language_model(layers).save(tmp_path / "out") / PAGE
    page = visit(path, viewport={"width": 400, "height": 900})
    for name, axis, first in (("displacement", "x", 1), ("cosine", "x", 0), ("cosine", "y", 0)):
        named = page.locator(f"[data-figure='{name}'] .{axis}tick text").all_text_contents()
        ticks = [int(text) for text in named]  # of a layer that does not exist, such as 0.5, this fails
        assert first <= min(ticks) < max(ticks) == layers
        assert least <= len(ticks) <= 6


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["comparison", "language_model"])
def test_embeddings_are_layer_0_on_axes_in_hover_boxes_and_in_the_lens(pages, visit, kind):
    page = visit(pages(kind))
    unfold(page)
    page.wait_for_timeout(1000)
    found = {}
    for plot in page.locator(".plot").all():
        if "(0: embeddings)" in plot.locator(".xtitle").text_content():
            found[plot.get_attribute("data-figure").partition(":")[0]] = plot.evaluate(HOVERED)
            assert "0" in plot.locator(".xtick").all_text_contents()
    assert {"lens_loss", "lens_accuracy", "cosine", "cka"} <= {*found}
    assert {name: text[:7] for name, text in found.items()} == dict.fromkeys(found, "Layer 0")
    assert "layer 0" in found["cosine"]
    cell = page.locator(".lens td[data-layer='0'][data-position='1']")
    assert cell.get_attribute("title").startswith("Layer 0, ")
    assert not re.search(r"\bemb\b|at embeddings", page.locator("body").inner_text())


COVERED = """() => [...document.querySelectorAll(".plot")].flatMap((div) => {
    const box = (one) => one.getBoundingClientRect();
    const meets = (a, b) => a.width && b.width && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
    const bars = [...div.querySelectorAll(".modebar-group")].map(box);
    if (!bars.some((bar) => bar.width > 10)) return [div.dataset.figure + ": no toolbar"];
    const names = ".legend .legendtext, .legend .legendsymbols";
    const shown = div.querySelectorAll(`${names}, .nsewdrag, .heatmaplayer image, .xtick text`);
    return [...shown].filter((one) => bars.some((bar) => meets(bar, box(one))))
        .map((one) => `${div.dataset.figure}: ${one.getAttribute("class") || one.tagName} ${one.textContent}`);
})"""
"""What of the figures lies under their toolbars."""
CUT = """() => [...document.querySelectorAll(".verdict-table")].flatMap((box) => {
    const right = Math.min(box.getBoundingClientRect().right, innerWidth) + 0.5;
    return [...box.querySelectorAll("th, td")].filter((one) => one.getBoundingClientRect().right > right
        || one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText);
})"""
"""Cells of the tables of verdicts that are cut."""


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["comparison", "language_model", "skips", "bench"])
def test_toolbars_cover_nothing_and_no_column_is_cut(pages, visit, kind):
    page = visit(pages(kind))
    unfold(page)
    assert page.locator(".plot").count() > 0
    assert page.locator(".verdict-table").count() > 0 or kind == "language_model"
    assert page.evaluate(COVERED) == []
    assert page.evaluate(CUT) == []


@pytest.mark.browser
def test_the_lens_grid_is_the_document(pages, visit):
    page = visit(pages("comparison"))
    meta = Results.load(pages("comparison").parent).meta["models"]
    sample, rows = meta[0]["lens_grid"]["samples"][0], page.locator(".lens tbody tr")
    assert rows.locator("th").all_inner_texts() == [*map(str, range(12, -1, -1))]
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
    page.locator(".lens td[data-layer='11'][data-position='1']").hover()
    assert "Layer 11, position 2" in page.locator("#readout").inner_text()
    page.get_by_label("Model", exact=True).select_option("half-depth")
    assert page.locator(".lens tbody tr").count() == 7


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


@pytest.mark.browser
def test_light_dark_paper_and_the_keyboard(pages, visit, ready):
    page = visit(pages("series"), color_scheme="dark")
    for scheme, colour in (("dark", "rgb(20, 23, 27)"), ("light", "rgb(255, 255, 255)")):
        page.emulate_media(media="screen", color_scheme=scheme)
        page.wait_for_function("() => !document.querySelector('.method[open]')")
        ready(page)
        assert set(page.evaluate(BACKGROUNDS)) == {colour}
        text, cells = page.evaluate(CONTRAST)
        assert (text >= 4.5, cells >= 3.5) == (True, True)
        page.emulate_media(media="print")
        page.wait_for_function("() => !document.querySelector('.method:not([open])')")
        assert set(page.evaluate(BACKGROUNDS)) == {"rgb(255, 255, 255)"}
        widths = page.locator(".plot .main-svg:first-child").evaluate_all("(all) => all.map((svg) => svg.clientWidth)")
        assert max(widths) <= 340
    assert page.pdf(format="A4")[:5] == b"%PDF-"
    page.emulate_media(media="screen")
    page.wait_for_function("() => !document.querySelector('.method[open]')")
    reached, active = set(), "document.activeElement"
    for _ in range(141):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(f"{active}.id || {active}.type || {active}.className || {active}.tagName"))
    assert {"skip", "lens-sample", "lens-box", "radio", "SUMMARY"} <= reached
    unnamed = "[...document.querySelectorAll('input, select')].filter((one) => !one.labels.length).map((one) => one.id)"
    assert page.evaluate(unnamed) == []


@pytest.mark.browser
def test_a_browser_that_cannot_unpack_says_so(pages, browser):
    context = browser.new_context()
    context.add_init_script("delete window.DecompressionStream")
    page = context.new_page()
    page.goto(pages("language_model").as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert "This browser cannot unpack the figures" in page.locator("#no-figures").inner_text()
    context.close()


def spoilt():
    """Results of several kinds with hostile strings in every place that takes one."""
    models = synthetic.comparison()
    meta, subject = models.meta, models.meta["models"][1]
    subject["model"] |= {"name": "".join(HOSTILE[:6]), "class": HOSTILE[0]}
    subject["data"]["name"], subject["label"] = HOSTILE[6], HOSTILE[0]
    subject["headline"][HOSTILE[0]] = {"value": 1, "unit": HOSTILE[1], "sentence": HOSTILE[2]}
    meta["warnings"], meta["left_out"] = HOSTILE, [{"measure": text, "reason": text} for text in HOSTILE]
    meta["versions"][HOSTILE[1]] = HOSTILE[0]
    sample = subject["lens_grid"]["samples"][0]
    for position, text in enumerate(HOSTILE):
        sample["tokens"][position] = sample["targets"][position] = text
        sample["grid"][3][position] = [text, 0.5]
    meta["models"][2]["label"] = "__proto__"
    models.table["model"] = models.table["model"].replace({"jump-penalty": HOSTILE[0], "half-depth": "__proto__"})
    models.table["statistic"] = models.table["statistic"].replace({"mean:plain:1": f"mean:{HOSTILE[1]}:1"})
    groups = [synthetic.group(name, 0.1, level, {"jump": 0.1}) for name, level in (("a", 3.4), ("b", 3.5))]
    for run in groups[1]:
        run.meta["settings"] |= {"about": HOSTILE[0], "method": HOSTILE[1], HOSTILE[0]: HOSTILE[6]}
        run.meta |= {"recipe": HOSTILE[0], "warnings": HOSTILE}
        run.table["site"] = run.table["site"].replace({"jump": HOSTILE[1]})
    bench = skip_folders.bench()
    bench.table["model"] = bench.table["model"].replace({"fast": HOSTILE[0]})
    bench.meta["models"][2] |= {"label": HOSTILE[0], "granularity": HOSTILE[1]}
    bench.meta["model"]["name"] = bench.meta["machine"]["name"] = HOSTILE[1]
    decoder, generated = exit_folders.decoder_exit(layers=12), exit_folders.generation(10, 4)
    for name, rule in (("exits", HOSTILE[5]), ("generation", HOSTILE[0])):
        for entry in decoder.meta[name]:
            entry["rule"] = rule
    generated.meta["generation"] |= {"prompts": [HOSTILE[0]], "texts": HOSTILE}
    generated.meta["generation"]["stats"] |= {HOSTILE[0]: HOSTILE[1], "__proto__": 1}
    scored = exit_folders.evaluation(layers=6)
    scored.meta["tasks"] = {HOSTILE[5]: {"metric": HOSTILE[0], "chance": 0.5, "count": 2, "higher_is_better": True}}
    scored.table["site"] = HOSTILE[5]
    scored.table.loc[scored.table["statistic"] == "acc", "statistic"] = HOSTILE[0]
    both = compare(groups[0], against=groups[1], names=[HOSTILE[1], "constructor"])
    return {"models": models, "run": groups[1][0], "groups": both, "bench": bench, "decoder": decoder,
            "text": generated, "scored": scored}  # fmt: skip


@pytest.mark.browser
def test_hostile_text_stays_text(visit, tmp_path):
    """`visit` fails on dialogs, requests and errors."""
    for name, results in spoilt().items():
        page = visit(results.save(tmp_path / name) / "report.html", color_scheme="dark")
        assert page.locator("script").count() == 3
        assert page.locator("main img, main a[href^='javascript'], main iframe").count() == 0
        assert page.evaluate(WIDTH) <= 1280
        text = page.locator("html").inner_text()
        assert "alert(" in text
        assert "{{ 7 * 7 }}" in text or name not in ("decoder", "text", "scored")
        if name == "models":
            assert "__proto__" in page.locator(".legendtext").all_text_contents()
            page.get_by_label("Model", exact=True).select_option(index=1)
            cells = [page.locator(f".lens td[data-layer='3'][data-position='{at}']").inner_text() for at in range(8)]
            assert [cells[at] for at in (0, 2, 3, 7)] == [HOSTILE[0], "⟨U+202E⟩evil⟨U+202C⟩", "a␀b", "שלום·עולם"]
            assert len(cells[6]) == 40
