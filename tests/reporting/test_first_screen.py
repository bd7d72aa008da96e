"""What a person sees without scrolling, and how long and heavy a page is."""

from __future__ import annotations

import pytest

from fulldepth.reporting import render

LIMIT = 2_000_000
"""Bytes of a page of one model."""


@pytest.mark.parametrize("layers", [12, 80])
def test_a_page_of_one_model_is_light(synthetic, layers):
    assert len(render(synthetic.language_model(layers)).encode()) <= LIMIT


@pytest.mark.browser
@pytest.mark.parametrize(
    ("kind", "most"), [("language_model", 6000), ("classifier", 6000), ("series", 8000), ("comparison", 8000)]
)
def test_a_page_is_short(pages, visit, kind, most):
    page = visit(pages(kind))
    assert page.evaluate("document.documentElement.scrollHeight") <= most


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_answers(pages, visit, scheme):
    page = visit(pages("language_model"), viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    bottom = "(node) => node.getBoundingClientRect().bottom"
    story = page.locator("#story")
    assert "Displacement is clearly below 0.02 (16 degrees) in" in story.inner_text()
    assert "fulldepth skip search runs/llama-12x256/checkpoint-3000 --data corpus:builtin" in story.inner_text()
    assert story.evaluate(bottom) < 400
    assert page.locator("#profile").evaluate(bottom) < 500
    assert page.locator("[data-figure=displacement] .xtick text").first.evaluate(bottom) <= 800
    assert page.locator("#cards").evaluate("(node) => node.getBoundingClientRect().top") > 700
    assert not page.locator("#remarks li").first.is_visible()  # folded
    assert not page.locator("#about dt").first.is_visible()


@pytest.mark.browser
def test_a_layer_of_the_strip_tells_its_numbers_and_leads_to_the_figure(pages, visit, ready):
    page = visit(pages("language_model"))
    columns = page.locator("#profile button")
    assert columns.count() == 12
    columns.nth(9).hover()
    assert page.locator("#profile-readout").inner_text().startswith("Layer 10: displacement 0.019")
    columns.nth(9).locator("i").nth(1).click()
    ready(page)
    bands = "document.querySelector('[data-figure=coherence]').layout.shapes.map((one) => [one.x0, one.x1])"
    assert page.evaluate(bands) == [[9.5, 10.5]]
    inside = page.locator("[data-figure=coherence]").evaluate(
        "(div) => div.getBoundingClientRect().bottom <= innerHeight"
    )
    assert inside
    page.mouse.move(5, 5)
    columns.nth(9).focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#profile-readout").inner_text().startswith("Layer 9: ")


@pytest.mark.browser
def test_figures_zoom_and_are_downloaded(pages, visit):
    page = visit(pages("language_model"), accept_downloads=True)
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


@pytest.mark.browser
def test_folded_figures_are_drawn_when_they_are_opened(pages, visit):
    page = visit(pages("language_model"))
    folded = page.locator("[data-figure=lens_loss]")
    assert folded.locator(".main-svg").count() == 0
    page.locator(".more > summary", has_text="Loss per layer").click()
    folded.locator(".main-svg").first.wait_for()
    assert folded.evaluate("(div) => div.data[0].y.length") == 13


@pytest.mark.browser
def test_a_browser_that_cannot_unpack_says_so(pages, browser):
    context = browser.new_context()
    context.add_init_script("delete window.DecompressionStream")
    page = context.new_page()
    page.goto(pages("language_model").as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert "This browser cannot unpack the figures" in page.locator("#no-figures").inner_text()
    assert "The last layer’s displacement" in page.locator("#story").inner_text()
    figure = page.locator("figure", has=page.locator("[data-figure=jump_rate]"))
    figure.get_by_text("Numbers", exact=True).click()
    assert figure.locator("tbody tr").count() == 11
    context.close()
