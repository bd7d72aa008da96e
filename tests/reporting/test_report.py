"""What the page is made of, without a browser."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulldepth.errors import FulldepthError
from fulldepth.figures.record import Source
from fulldepth.figures.steps import thin
from fulldepth.reporting import render, write
from fulldepth.reporting.findings import Shown, cards, sentences, with_cards
from fulldepth.reporting.lens import Vocabulary, pack
from fulldepth.reporting.measured import differences, side_by_side, title
from fulldepth.reporting.page import contrast, embed
from fulldepth.reporting.payload import compact, payload
from fulldepth.reporting.phrases import figure_of, scaled, short, visible
from fulldepth.reporting.sections import arrange
from fulldepth.results import Results


def document(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S).group(1))


def unpacked(html, name):
    """The text that an element holds compressed."""
    text = re.search(rf'<script type="application/gzip" id="{name}">(.*?)</script>', html, re.S).group(1)
    return gzip.decompress(base64.b64decode(text)).decode("utf-8")


def test_one_file_without_an_address_to_fetch_from(synthetic):
    html = render(synthetic.minimal())
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", html)
    assert "@import" not in html
    assert "url(" not in html
    assert "default-src 'none'" in html
    assert html.count("</script>") == 3
    assert "* plotly.js (cartesian - minified)" in unpacked(html, "plotly")
    assert html.isascii() or "\u2028" not in html


def test_the_page_is_written_whole_or_not_at_all(synthetic, tmp_path, monkeypatch):
    folder = synthetic.minimal().save(tmp_path / "out")
    path = write(folder)
    before = path.read_text(encoding="utf-8")
    monkeypatch.setattr("fulldepth.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(FulldepthError, match="No space left"):
        write(folder)
    assert path.read_text(encoding="utf-8") == before


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(FulldepthError, match="not a result folder"):
        write(tmp_path)


def test_torch_is_not_imported():
    code = "import sys, fulldepth.reporting, fulldepth.figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_embedded_data_comes_back_and_cannot_leave_its_element(value):
    text = embed(value)
    assert text.isascii()
    assert not set(text) & set("<>&")
    assert json.loads(text) == value


def test_standard_errors_stand_beside_their_numbers(synthetic):
    results = synthetic.language_model()
    results.meta["headline"]["zeta_L"]["standard_error"] = 0.01234
    results.meta["headline"]["mean_coherence"]["standard_error"] = None
    errors = {card["name"]: card["error"] for card in cards(with_cards(results.meta["headline"]))}
    assert errors["Jump of the last layer"] == "± 0.012"
    assert errors["Mean coherence"] == ""
    compared = synthetic.comparison()
    compared.meta["models"][0]["headline"]["zeta_L"]["standard_error"] = 0.5
    rows = {name: cells for name, *cells in side_by_side(Source(compared.table, compared.meta)).rows}
    assert rows["Jump of the last layer"][0].endswith("± 0.5 %")
    assert "±" not in rows["Jump of the last layer"][1]


def test_nan_never_reaches_the_page(synthetic):
    results = synthetic.language_model()
    results.table.loc[results.table.layer == 3, "value"] = math.nan
    results.meta["headline"]["zeta_L"]["value"] = None
    made = document(render(results))
    assert made["cards"][0]["digits"] == "–"


def strings(value):
    """Every string inside a document."""
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in strings(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in strings(part)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(("kind", "removed"), [("language_model", 1.0), ("language_model", 0.5), ("comparison", 0.3)])
def test_gaps_are_gaps_and_not_words(synthetic, kind, removed):
    """Any share of the table may be NaN or infinite: no figure fails, and nothing on the page is called nan."""
    results = getattr(synthetic, kind)()
    table = results.table
    drawn = np.random.default_rng(0).random(len(table))
    table.loc[drawn < removed, "value"] = math.nan
    table.loc[drawn < removed / 3, "value"] = math.inf
    if "difference" in table:
        table["difference"] = table["value"] - 1
    made = payload(results)
    embed(made)  # refuses NaN
    called = re.compile(r"(?<![a-z])(nan|-?inf)(?![a-z])", re.I)
    assert [text for text in strings(made) if called.search(text)] == []
    assert bool(made["figures"]) is (removed < 1)


@given(st.integers(1, 300), st.integers(2, 60))
def test_thinned_steps_keep_the_ends(count, most):
    steps = [100 * index for index in range(count)]
    kept = thin(steps, most)
    assert kept[0] == steps[0]
    assert kept[-1] == steps[-1]
    assert kept == sorted(set(kept))
    assert len(kept) == min(count, most)


def test_every_figure_has_one_place(synthetic):
    for builder, kind in (("language_model", "single"), ("series", "series"), ("comparison", "comparison")):
        names = list(getattr(synthetic, builder)().figures())
        placed = [name for section in arrange(names, kind) for slot in section["slots"] for name in slot]
        assert sorted(placed) == sorted(names)
    assert arrange(["something_new"])[0]["id"] == "further"


def test_the_lens_grid_in_numbers():
    words = Vocabulary()
    sample = {"title": "S", "tokens": ["a", "\n"], "targets": ["\n", ""], "saturation": [1, 2]}
    grid = {"samples": [{**sample, "grid": [[["a", 0.25], ["b", None]], [["\n", 1.2], ["a", 0.0004]]]}]}
    (packed,) = pack(grid, words)
    assert list(words.index) == ["a", "⏎", "", "b"]
    assert packed["top"] == [[0, 3], [1, 0]]
    assert packed["probability"] == [[250, None], [1000, 0]]
    assert pack(None, words) == []


@given(st.text())
def test_visible_text_has_no_character_that_draws_nothing(text):
    shown = visible(text)
    assert not [c for c in shown if c.isspace() and c != "\u3000" and ord(c) < 0x80]
    assert not set(shown) & {"\u202e", "\u202a", "\u2066", "\u200b", "\x00", "\x7f", "\u2028"}


def test_words():
    assert short("a\nb  c") == "a⏎b  c"
    assert len(short("x" * 10**6)) == 200
    assert figure_of({"value": 12.345, "unit": "%"}) == ("12.3", "%")
    assert figure_of({"value": 9.0, "unit": "layers"}, 12) == ("9", "of 12")
    assert figure_of({"value": 0.0823, "unit": "1"}) == ("0.082", "")
    assert figure_of({"value": None, "unit": "%"}) == ("–", "")
    assert (scaled(9_412_352), scaled(1.2e9), scaled(512), scaled(None)) == ("9.41 M", "1.2 B", "512", "?")
    assert compact({"a": [1 / 3, math.nan, (2, "x")]}) == {"a": [0.333333, None, [2, "x"]]}
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def test_a_comparison_says_first_what_its_table_does_not():
    told = {"zeta_L:b": {"sentence": "told"}}
    news = {"redundancy_change:b": {"sentence": "new"}}
    assert sentences(differences({"headline": {**told, **news}}, None)) == (["new"], ["told"])
    assert sentences(differences({"headline": told}, None)) == (["told"], [])


def test_long_lists_of_sentences_are_folded():
    findings = [Shown({"sentence": text}, later=text == "b") for text in "abcd"]
    assert sentences(findings) == (["a", "c", "d"], ["b"])
    assert sentences(findings, most=4) == (["a", "b", "c", "d"], [])
    assert sentences(findings, most=2) == (["a", "c"], ["b", "d"])


def test_the_title_is_the_end_of_a_path():
    assert title({"model": {"name": "/data/runs/a/checkpoint-10"}}) == "a/checkpoint-10"
    assert title({"model": {"name": "org/model"}}) == "org/model"
    assert title({"model": {"name": "/"}}) == "/"


def test_a_result_of_nothing_still_gives_a_page(synthetic):
    results = synthetic.minimal()
    empty = Results(results.table.iloc[:0], {"kind": "measure"})
    made = document(render(empty))
    assert made["sections"] == []
    assert made["title"] == "Unnamed model"
