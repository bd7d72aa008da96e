"""What the pages are made of, without a browser."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import subprocess
import sys

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulldepth import figures
from fulldepth.errors import FulldepthError
from fulldepth.figures.record import TRAINING, VERBS, Figure, Method, Quantity, Source
from fulldepth.figures.style import figure
from fulldepth.figures.training import thin
from fulldepth.reporting import kinds, render, sections, write
from fulldepth.reporting.findings import Shown, cards, sentences, with_cards
from fulldepth.reporting.lens import PICTURES_LIMIT, Vocabulary, pack
from fulldepth.reporting.measured import differences, side_by_side, title
from fulldepth.reporting.page import embed
from fulldepth.reporting.payload import compact, payload
from fulldepth.reporting.phrases import figure_of, quantity, scaled, seconds, short, visible
from fulldepth.reporting.tables import flatten
from fulldepth.results import Results, tabulate

LIMIT = 2_000_000
"""Bytes of a page of one model."""


def document(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S).group(1))


def unpacked(html, name):
    """The text that an element holds compressed."""
    text = re.search(rf'<script type="application/gzip" id="{name}">(.*?)</script>', html, re.S).group(1)
    return gzip.decompress(base64.b64decode(text)).decode("utf-8")


@pytest.mark.parametrize("layers", [12, 80])
def test_one_light_file_without_an_address_to_fetch_from(synthetic, layers):
    html = render(synthetic.language_model(layers))
    assert len(html.encode()) <= LIMIT
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", html)
    assert "@import" not in html
    assert "url(" not in html
    assert "default-src 'none'" in html
    assert html.count("</script>") == 3
    assert "* plotly.js (cartesian - minified)" in unpacked(html, "plotly")


def test_the_page_is_written_whole_or_not_at_all(synthetic, tmp_path, monkeypatch):
    folder = synthetic.minimal().save(tmp_path / "out")
    path = write(folder)
    before = path.read_text(encoding="utf-8")
    monkeypatch.setattr("fulldepth.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(FulldepthError, match="No space left"):
        write(folder)
    assert path.read_text(encoding="utf-8") == before


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


def test_the_lens_grid_in_numbers():
    words = Vocabulary()
    sample = {"title": "S", "tokens": ["a", "\n"], "targets": ["\n", ""], "saturation": [1, 2]}
    grid = {"samples": [{**sample, "grid": [[["a", 0.25], ["b", None]], [["\n", 1.2], ["a", 0.0004]]]}]}
    (packed,) = pack(grid, words)["samples"]
    assert list(words.index) == ["a", "⏎", "", "b"]
    assert packed["top"] == [[0, 3], [1, 0]]
    assert packed["probability"] == [[250, None], [1000, 0]]
    assert pack(None, words)["samples"] == []


@given(st.text())
def test_visible_text_has_no_character_that_draws_nothing(text):
    shown = visible(text)
    assert not [c for c in shown if c.isspace() and c != "\u3000" and ord(c) < 0x80]
    assert not set(shown) & {"\u202e", "\u202a", "\u2066", "\u200b", "\x00", "\x7f", "\u2028"}


def test_a_comparison_says_first_what_its_table_does_not():
    told = {"zeta_L:b": {"sentence": "told"}}
    news = {"redundancy_change:b": {"sentence": "new"}}
    assert sentences(differences({"headline": {**told, **news}}, None)) == (["new"], ["told"])
    assert sentences(differences({"headline": told}, None)) == (["told"], [])


def test_long_lists_of_sentences_are_folded():
    findings = [Shown({"sentence": text}, later=text == "b") for text in "abcd"]
    assert sentences(findings) == (["a", "c", "d"], ["b"])


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


def test_words():
    assert short("a\nb  c") == "a⏎b  c"
    assert len(short("x" * 10**6)) == 200
    assert figure_of({"value": 12.345, "unit": "%"}) == ("12.3", "%")
    assert figure_of({"value": 9.0, "unit": "layers"}, 12) == ("9", "of 12")
    assert figure_of({"value": 0.0823, "unit": "1"}) == ("0.082", "")
    assert figure_of({"value": None, "unit": "%"}) == ("–", "")
    assert figure_of({"value": 1536.0, "unit": "MiB"}) == ("1.5", "GiB")
    assert (quantity(2_630_784, "1"), quantity(5120.4, "tokens/s"), quantity(None, "s")) == (
        "2.63 M", "5,120 tokens/s", "–",
    )  # fmt: skip
    assert [seconds(one) for one in (0.0123, 90.0, 600, 9000)] == ["12.3 ms", "90.0 s", "10 min", "2.5 h"]
    assert (scaled(9_412_352), scaled(1.2e9), scaled(512), scaled(None)) == ("9.41 M", "1.2 B", "512", "?")
    assert compact({"a": [1 / 3, math.nan, (2, "x")]}) == {"a": [0.333333, None, [2, "x"]]}
    nested = {"a": {"b": 1e-3, "c": None, "d": []}, "e": True, "f": ["x", 2], "g": 2_000_000.0}
    assert flatten(nested) == {"a.b": "0.001", "e": "true", "f": "x, 2", "g": "2000000"}


FAKE = Figure(
    "fake",
    "geometry",
    lambda source: figure([go.Scatter(x=[0], y=[source.layers])], alt="One dot.", xaxis={}, yaxis={}),
    title="A fake figure",
    subtitle="Higher is deeper",
    methods=(
        Method("A fake number", ("displacement",), "Counts layers.", formula="L", source="Nobody."),
        Method("Another", ("mmd",), "Nothing."),
    ),
    curves=(Quantity("displacement", "mean", "Fake", "Fake (1)"),),
    followed=True,
)


def test_one_record_is_a_figure_a_place_and_a_note(synthetic, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", (*figures.FIGURES, FAKE))

    def where(page, name):
        return [section["id"] for section in page["sections"] if any(name in slot for slot in section["slots"])]

    results = synthetic.language_model()
    page, html = payload(results), render(results)
    assert results.figures()["fake"].data[0].y == (12,)
    assert where(page, "fake") == ["geometry"]
    assert (page["figures"]["fake"]["about"]["title"]) == "A fake figure"
    note = '<math display="block"><mi>L</mi></math>\n<p>Counts layers.</p>\n<p class="source">Nobody.</p></details>'
    assert f'<details class="method"><summary>A fake number</summary>\n{note}' in html
    assert "<summary>Another</summary>" not in html  # of a measure that the table lacks
    compared, followed = payload(synthetic.comparison()), payload(synthetic.series())
    assert where(compared, "fake") == where(compared, "difference_fake") == where(followed, "fake") == ["geometry"]
    assert where(followed, "steps_fake") == ["training"]
    one, other = (synthetic.comparison().figures()[name] for name in ("fake", "displacement"))
    assert [trace.y for trace in one.data] == [trace.y for trace in other.data]


@pytest.mark.parametrize("kind", [kind for kind in kinds.PAGES if kind not in VERBS or VERBS[kind] == kind])
def test_every_figure_of_a_kind_has_a_name_of_its_own_and_a_section_that_is_there(kind):
    records = figures.records(kind)
    names = [record.name for record in records]
    assert len(set(names)) == len(names)
    known = {section.id for section in (*kinds.PAGES[kind].sections, sections.OVER_TRAINING)}
    assert {record.name for record in records if record.section not in known} <= {
        name for name in names if kind == TRAINING and name.startswith("steps_")
    }
    arranged = sections.arrange([*names, "new"], kind, kinds.PAGES[kind].sections)
    assert sorted(slot[0] for section in arranged for slot in section["slots"]) == sorted([*names, "new"])
    assert arranged[-1]["id"] == "further"


def test_routers_stand_before_the_figures_of_the_memory():
    routers = [
        {"layer": 3, "source": 0, "head": 1, "tokens": [[" the", 0.8123], ["\n", 0.5], ["<b>\u202e", None]]},
        {"layer": 2, "source": 1, "head": 0, "tokens": [["x" * 100, None]]},
        {"layer": 2, "source": 0, "head": 0, "tokens": []},
    ]
    table = tabulate([("retrieval_weight", "routing", 2, 0, "share", 0.5, 8, "1")])
    meta = {"model": {"num_layers": 3}, "router_tokens": {"routers": routers, "of": 18}}
    (memory,) = (section for section in payload(Results(table, meta))["sections"] if section["id"] == "memory")
    (found,) = memory["tables"]
    assert found["rows"][0] == ["Layer 3, state 0, head 1", "·the ⏎ <b>⟨U+202E⟩", "0.812"]
    assert (len(found["rows"]), len(found["rows"][1][1]), found["rows"][1][2]) == (2, 40, "–")
    assert found["note"].startswith("The 2 of 18 routers")
    assert memory["slots"] == [["retrieval_weight"]]
    (memory,) = payload(Results(table, {"model": {"num_layers": 3}}))["sections"]
    assert memory["tables"] == []


def test_a_page_holds_only_pictures_each_once_and_not_more_than_it_can(synthetic):
    results, words = synthetic.image_classifier(), Vocabulary()
    packed = pack(results.meta["lens_grid"], words)["samples"]
    assert len(words.pictures) == 2
    assert [sample["picture"] for sample in packed[:4]] == [0, 1, 1, 1]
    letters = [f"data:image/png;base64,{number:05}{'A' * 10_000}" for number in range(300)]
    added = [words.add_picture(picture) for picture in letters]
    assert sum(map(len, words.pictures)) <= PICTURES_LIMIT
    assert added[-1] is None
    assert added[0] == words.add_picture(letters[0]) == 2
    bad = ("https://example.org/x.png", "data:image/svg+xml;base64,AAAA", "javascript:1")
    for sample, address in zip(results.meta["lens_grid"]["samples"], bad, strict=False):
        sample["picture"] = address
    page = render(results)
    assert [address for address in bad if address in page] == []
    assert "picture" not in pack({**synthetic.lens_grid(4), "of": "boxes"}, words)["samples"][0]


def value(results, measure, step, **where):
    rows = results.table[(results.table.measure == measure) & (results.table.step == step)]
    for name, wanted in where.items():
        rows = rows[rows[name] == wanted]
    return rows.value.item()


def number(text):
    return float(text.split()[0].strip("×()").replace("−", "-").replace(",", ""))


def test_the_page_of_a_training_run(synthetic):
    made = payload(synthetic.training())
    assert [section["title"] for section in made["sections"]] == [
        "Loss and penalties", "Displacement and jump", "Speed and memory", "Settings",
    ]  # fmt: skip
    assert made["byline"] == "LlamaForCausalLM · 12 layers · 2.63 M parameters · trained on corpus:builtin/train"
    assert [card["name"] for card in made["cards"]] == [
        "Validation loss", "Jump of the last layer", "Tokens per second", "Peak memory",
    ]  # fmt: skip
    about = dict(made["about"])
    assert about["Objective"] == "cross-entropy + jump penalty (weight 1)"
    assert about["Schedule"] == "300 steps × 16 sequences × 128 tokens = 614,400 tokens"
    (settings,) = made["sections"][-1]["tables"]
    assert settings["folded"]
    assert ["objective.jump.weight", "1"] in settings["rows"]
    assert not [row for row in settings["rows"] if row[0] in ("about", "report_to", "objective.aligned")]
    clock = 50 * 0.4 * (3 + 3 * 1.05)
    assert made["sections"][2]["tables"][0]["rows"] == [
        ["Training time", f"{clock / 60:.0f} min"],
        ["Throughput", "5,120 tokens/s at last (4,876 to 5,120)"],
        ["Peak memory", "1.2 GiB"],
    ]


def test_runs_in_one_table_at_the_common_step(synthetic):
    page, runs = payload(synthetic.training_comparison()), synthetic.trainings()
    columns = ["Validation loss", "Difference", "Jump of the last layer", "Displacement", "Peak memory", "Parameters"]
    assert set(columns) <= set(page["models"]["columns"])
    rows = {row[0]: dict(zip(page["models"]["columns"], row[1:], strict=True)) for row in page["models"]["rows"]}
    assert list(rows) == ["tiny-llama (baseline)", "tiny-jreg", "tiny-lime", "half-depth"]
    profiles = [
        one.table[(one.table.measure == "displacement") & (one.table.step == 200)].value.to_numpy() for one in runs[:3]
    ]
    for cells, one in zip(rows.values(), runs, strict=True):
        assert number(cells["Validation loss"]) == pytest.approx(value(one, "validation_loss", 200), abs=5e-4)
        depth = one.meta["model"]["num_layers"]
        assert number(cells["Jump of the last layer"]) == pytest.approx(
            value(one, "jump_rate", 200, layer=depth), abs=0.05
        )
    for cells, one in list(zip(rows.values(), runs, strict=True))[1:]:
        for column, measure, measured in (("Difference", "validation_loss", 0), ("Peak memory", "peak_memory", 1)):
            own, base = (value(result, measure, 200) for result in (one, runs[0]))
            told = re.findall(r"[-−+]?[\d.]+(?=×|$)", cells[column])[-1].replace("−", "-")
            assert float(told) == pytest.approx(own / base if measured else own - base, abs=6e-3)
    change = 100 * np.median(profiles[1] - profiles[0])
    assert number(rows["tiny-jreg"]["Displacement"]) == pytest.approx(change, abs=5e-3)
    ((differing,),) = [section["tables"] for section in page["sections"] if section["id"] == "settings"]
    assert [row[0] for row in differing["rows"]] == [
        "method", "model.num_hidden_layers", "objective.jump.weight", "objective.orthogonality.weight",
        "router_learning_rate",
    ]  # fmt: skip
    assert differing["rows"][-1] == ["router_learning_rate", "–", "–", "0.01", "–"]
    assert [sentence.split(" ")[0] for sentence in page["sentences"]] == ["Validation"] * 3
    about = dict(page["about"])
    assert about["Schedule"].startswith("300 steps")
    assert "Model" not in about  # they differ
