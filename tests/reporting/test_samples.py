"""Samples with pictures, and strips of several stacks, in a real browser."""

from __future__ import annotations

import json

import pytest

from fulldepth.reporting import render, write
from fulldepth.reporting.lens import PICTURES_LIMIT, Vocabulary, pack
from fulldepth.results import Results

browser = pytest.mark.browser
CLASSES = ("<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>")
FITS = "document.documentElement.scrollWidth <= innerWidth"
GLYPH = "(all) => all.map((td) => getComputedStyle(td, '::before').content)"


@browser
def test_rows_are_samples_and_columns_layers(pages, visit):
    page = visit(pages("image_classifier"))
    samples = Results.load(pages("image_classifier").parent).meta["lens_grid"]["samples"]
    assert page.locator("#lens-title").inner_text() == "Samples by layer"
    assert page.locator("#lens tr.group").all_inner_texts() == list(dict.fromkeys(s["group"] for s in samples))
    rows = page.locator(".lens tbody tr:not(.group)")
    assert rows.count() == len(samples) == 12
    for number, sample in enumerate(samples):
        cells = rows.nth(number).locator("td")
        assert cells.locator("bdi").all_inner_texts() == [row[0][0] for row in sample["grid"]]
        assert cells.locator("small").all_inner_texts() == [f"{row[0][1]:.2f}" for row in sample["grid"]]
        right = [row[0][0] == sample["targets"][0] for row in sample["grid"]]
        marks = cells.evaluate_all("(all) => all.map((td) => [td.matches('.right'), td.matches('.wrong')])")
        assert marks == [[good, not good] for good in right]
        assert rows.nth(number).locator(".stays").count() == 7 - sample["saturation"][0]
    assert set(page.locator(".lens .wrong").evaluate_all(GLYPH)) == {'"×"'}, "told apart by more than a colour"
    pictures = page.locator(".lens img")
    assert pictures.evaluate_all("(all) => all.map((img) => img.src)") == [sample["picture"] for sample in samples]
    page.wait_for_function("[...document.querySelectorAll('.lens img')].every((img) => img.naturalWidth > 0)")
    crisp = pictures.evaluate_all("(all) => all.map((img) => img.classList.contains('crisp'))")
    assert crisp == [False, True, True, True] * 3
    page.locator(".lens td[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#readout").inner_text().startswith("Image 2, layer 1: predicts frog with probability 0.300")
    assert "the true class is dog" in page.locator("#readout").inner_text()


@browser
@pytest.mark.parametrize("kind", ["image_classifier", "two_towers"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_them_in_both_schemes(pages, visit, kind, scheme):
    page = visit(pages(kind), color_scheme=scheme, viewport={"width": 360, "height": 800})
    assert page.evaluate(FITS)
    if kind != "two_towers":
        inner, outer = page.locator("#lens-box").evaluate("(box) => [box.scrollWidth, box.clientWidth]")
        assert inner > outer
        assert page.locator(".lens tbody th[scope=row]").first.evaluate("(cell) => cell.clientWidth") < outer / 2


@browser
def test_each_stack_has_its_strip_which_leads_to_its_figure(pages, visit, ready):
    page = visit(pages("two_towers"))
    assert page.locator("#profile h3").all_inner_texts() == ["Image", "Text"]
    strips = page.locator(".profile-columns")
    assert [strips.nth(number).locator("button").count() for number in (0, 1)] == [4, 6]
    strips.nth(1).locator("button").nth(4).hover()
    assert page.locator("#profile-readout").inner_text().startswith("Text, layer 5: displacement")
    strips.nth(1).locator("button").nth(4).locator("i").nth(1).click()
    ready(page)
    bands = "document.querySelector(\"[data-figure^='coherence:Text']\").layout.shapes.map((one) => [one.x0, one.x1])"
    assert page.evaluate(bands) == [[4.5, 5.5]]
    others = "(document.querySelector(\"[data-figure^='displacement:Image']\").layout.shapes || []).length"
    assert page.evaluate(others) == 0


@browser
def test_hostile_classes_and_files_stay_text(synthetic, visit, tmp_path):
    results = synthetic.image_classifier(names=(*CLASSES, "\"quoted\" 'twice' `here`"))
    meta = json.loads(json.dumps(results.meta))
    meta["lens_grid"]["samples"][0]["title"] = CLASSES[0]
    page = visit(write(Results(results.table, meta).save(tmp_path)))
    assert page.locator("script").count() == 3
    assert page.locator("main img:not([src^='data:image/'])").count() == 0
    assert page.evaluate(FITS)
    said = page.locator(".lens").inner_text()
    assert CLASSES[0][:8] in said
    assert CLASSES[1][:8] in said


def test_other_addresses_are_not_embedded(synthetic):
    results = synthetic.image_classifier()
    bad = ("https://example.org/x.png", "data:image/svg+xml;base64,AAAA", "javascript:1")
    for sample, address in zip(results.meta["lens_grid"]["samples"], bad, strict=False):
        sample["picture"] = address
    page = render(results)
    assert [address for address in bad if address in page] == []


def test_a_page_holds_each_picture_once_and_not_more_than_it_can(synthetic):
    words = Vocabulary()
    packed = pack(synthetic.image_classifier().meta["lens_grid"], words)
    assert len(words.pictures) == 2
    assert [sample["picture"] for sample in packed[:4]] == [0, 1, 1, 1]
    letters = [f"data:image/png;base64,{number:05}{'A' * 10_000}" for number in range(300)]
    added = [words.add_picture(picture) for picture in letters]
    assert sum(map(len, words.pictures)) <= PICTURES_LIMIT
    assert added[-1] is None
    assert added[0] == words.add_picture(letters[0]) == 2


@pytest.mark.parametrize("of", ["samples", "boxes", "something new"])
def test_a_grid_of_another_form_is_shown_as_tokens(synthetic, of):
    grid = {**synthetic.lens_grid(4), "of": of}
    assert "picture" not in pack(grid, Vocabulary())[0]
