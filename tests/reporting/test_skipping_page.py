"""Pages of `fulldepth skip`: tables and strips as worked out from the rows; in a browser, drawn and inert."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from figures import skip_folders as folders
from fulldepth import cli
from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import OtherLoad
from fulldepth.reporting import write, write_together
from fulldepth.reporting.payload import payload
from fulldepth.reporting.together import names, together
from fulldepth.results import Results
from fulldepth.skip.assessment.bench import bench
from fulldepth.skip.assessment.curve import curve
from fulldepth.skip.assessment.outcome import analyse
from fulldepth.skip.exports.export import export
from fulldepth.skip.selection.search import search
from skip.word_tokenizer import tokenizer, words
from tiny_models import build

EMPTY = """() => [...document.querySelectorAll(".plot")].filter((div) => !div.hidden)
    .filter((div) => !(div.data || []).some((trace) => (trace.y || []).some((value) => value != null)))
    .map((div) => div.dataset.figure)"""
HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "\u202eevil\u202c"]
SECTIONS = ["Removed blocks", "What removal costs", "Inside the model", "Quality against time", "Settings"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The four folders of one model."""
    place = tmp_path_factory.mktemp("skip")
    for name, results in (
        ("out", folders.search()),
        ("curve", folders.curve()),
        ("bench", folders.bench()),
        ("quantised", folders.quantised()),
    ):
        results.save(place / name)
    return place


@pytest.fixture(scope="module")
def every(root):
    """All four on one page, named in another order than they are shown in."""
    return payload(together([root / name for name in ("quantised", "bench", "curve", "out")]))


@pytest.fixture(scope="module")
def page(root):
    """The same as a file."""
    return write_together([root / name for name in ("quantised", "bench", "curve", "out")], root / "page")


def section(made, name):
    (found,) = [one for one in made["sections"] if one["id"] == name]
    return found


def number(text):
    return float(text.split()[0].strip("×").replace("−", "-").replace(",", ""))


def test_the_sections_of_all_and_of_each(every):
    assert [one["title"] for one in every["sections"]] == SECTIONS
    assert every["kind"] == "skips"
    expected = {
        "search": [*SECTIONS[:3], "Settings"],
        "curve": [*SECTIONS[:2], "Settings"],
        "bench": [*SECTIONS[:2], *SECTIONS[3:]],
        "quantised": [*SECTIONS[:2], *SECTIONS[3:]],
    }
    for name, sections in expected.items():
        made = payload(getattr(folders, name)())
        assert [one["title"] for one in made["sections"]] == sections
        placed = [figure for one in made["sections"] for slot in one["slots"] for figure in slot]
        assert sorted(placed) == sorted(made["figures"])


def test_a_strip_says_which_block_went_when_and_what_it_added(every):
    strips = section(every, "blocks")["tables"]
    assert [one["title"] for one in strips] == [
        "out, folded, fast, skipped: 4 attention blocks removed",
        "curve: 8 attention blocks removed",
        "quantised, then skipped: 4 attention blocks removed",
    ]
    losses = folders.losses_of(8)
    for strip, blocks in zip(strips, (folders.BLOCKS, folders.FARTHER), strict=False):
        assert strip["layers"] == 12
        assert [cell[:2] for cell in strip["cells"]] == [[block, n] for n, block in enumerate(blocks, start=1)]
        np.testing.assert_allclose([number(cell[3]) for cell in strip["cells"]], np.diff(losses)[: len(blocks)])
    assert "2.962 nats healed" in strips[0]["note"]
    assert section(payload(folders.search(blocks=(4,), granularity="mlp")), "blocks")["tables"][0]["title"] == (
        "1 MLP removed"
    )


def test_models_side_by_side_are_the_rows(every):
    rows = {row[0]: dict(zip(every["models"]["columns"], row[1:], strict=True)) for row in every["models"]["rows"]}
    corners = [f"quantised: {name}" for name in folders.CORNERS]
    exports = ["bench: base (original)", *(f"bench: {name}" for name in ("folded", "fast", "other"))]
    assert list(rows) == [*exports, f"{corners[0]} (original)", *corners[1:]]
    table, plan = folders.bench().table, folders.plan()
    whole = table[(table.measure == "time_ratio") & table.batch.isna() & (table.model == "fast")]
    fast = rows["bench: fast"]
    for phase in ("prefill", "decode"):
        ratio = whole[whole.site == phase].set_index("statistic").value
        said = [float(one) for one in re.findall(r"[\d.]+", fast[f"{phase.capitalize()} time"])]
        assert said == pytest.approx([ratio["median"], ratio["low"], ratio["high"]], abs=6e-4)
        # 1.01 times the original's, 0.98 to 1.03: not told apart
        assert rows["bench: folded"][f"{phase.capitalize()} time"] == "≈ 1× (0.980 to 1.030)"
    assert number(fast["Held-out loss"]) == pytest.approx(plan["healed_loss"], abs=6e-5)
    assert number(fast["Added"]) == pytest.approx(plan["healed_loss"] - plan["losses"][0], abs=6e-5)
    assert (fast["Weights"], fast["Cache per token"], fast["Peak memory"]) == ("0.90×", "0.67×", "1.00×")
    assert rows["bench: other"]["Held-out loss"] == "–"
    for name, (loss, size, _, decode) in list(folders.CORNERS.items())[1:]:
        row = rows[f"quantised: {name}"]
        assert number(row["Held-out loss"]) == pytest.approx(loss, abs=1e-4)
        assert (row["Weights"], number(row["Decode time"])) == (f"{size:.2f}×", decode)


def test_what_is_said_first(every):
    assert every["story"]["sentences"][0].startswith("Removing 4 blocks")
    assert [one["id"] for one in every["sections"] if one["first"]] == ["blocks"]
    headlines = [
        one.meta["headline"] for one in (folders.search(), folders.curve(), folders.bench(), folders.quantised())
    ]
    said = [entry["sentence"] for headline in headlines for entry in headline.values()]
    assert sorted(every["more_sentences"]) == sorted(said)
    cards = {card["name"]: card["digits"] + card["unit"] for card in every["cards"]}
    assert cards["Break point"] == "5of 12"
    about = dict(every["about"])
    assert about["Search"].startswith("greedy, by loss, attention granularity · 375 forward passes")
    assert about["Machine"] == "cpu · x86_64 · 4 threads"
    assert every["warnings"][0] == "The machine was busy."


def test_a_busy_machine_is_no_quantised_model():
    results = folders.quantised()
    sentence = "The machine was busy: other programs used 35% of its processor. Times are not compared."
    results.meta["headline"]["times"] = {"value": None, "unit": "1", "sentence": sentence}
    results.table = results.table[results.table.measure != "time_ratio"]
    made = payload(results)
    assert sentence in made["more_sentences"]
    assert "pareto" not in {name.partition(":")[0] for name in made["figures"]}


def test_rows_of_all_folders_keep_their_types(root):
    folders_of_page = ("out", "curve", "bench", "quantised")
    table = together([root / name for name in folders_of_page]).table
    assert len(table) == sum(len(Results.load(root / name).table) for name in folders_of_page)
    assert set(table.folder) == set(folders_of_page)
    assert table.removed.dtype == "Int64"


def test_other_data_are_remarked(root, tmp_path):
    other = folders.search()
    other.meta["data"] = {**other.meta["data"], "hash": "sha256:" + "5" * 64}
    other.save(tmp_path / "other")
    made = payload(together([root / "curve", tmp_path / "other"]))
    assert any("different data" in text for text in made["warnings"])


def test_what_does_not_belong_together_is_refused(root, tmp_path, synthetic):
    synthetic.minimal().save(tmp_path / "measured")
    for folder in ([root / "bench", tmp_path / "measured"], [tmp_path / "measured", root / "out"]):
        with pytest.raises(FulldepthError, match=r"measured holds a measurement, .*skip, curve, bench, quantise"):
            write_together(folder, tmp_path / "page")
    strange = folders.curve()
    strange.meta["model"]["hash"] = "sha256:" + "77" * 32
    strange.save(tmp_path / "strange")
    with pytest.raises(FulldepthError, match=r"out and strange|strange and out"):
        write_together([root / "out", tmp_path / "strange"], tmp_path / "page")
    strange.meta["model"] |= {"class": "GPT2LMHeadModel", "hash": folders.HASH}
    strange.save(tmp_path / "strange")
    with pytest.raises(FulldepthError, match="GPT2LMHeadModel"):
        write_together([root / "out", tmp_path / "strange"], tmp_path / "page")
    with pytest.raises(FulldepthError, match="named twice"):
        write_together([root / "out", root / "page" / ".." / "out"], tmp_path / "page")
    with pytest.raises(FulldepthError, match="not a result folder"):
        write_together([root / "out", tmp_path])
    with pytest.raises(FulldepthError, match="at least one"):
        write_together([])
    assert not (tmp_path / "page").exists()


def test_another_precision_has_another_hash_and_is_allowed(root, tmp_path):
    half = folders.bench()
    half.meta["settings"] |= {"dtype": "bfloat16"}
    half.meta["model"]["hash"] = "sha256:" + "66" * 32
    half.save(tmp_path / "half")
    assert write_together([root / "out", tmp_path / "half"], tmp_path / "page").is_file()


def test_where_the_page_goes_and_what_it_says_of_its_rows(root, tmp_path, monkeypatch, capsys):
    def where(path):
        text = path.read_text(encoding="utf-8")
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
        return json.loads(found.group(1))["where"]

    assert write(root / "out") == root / "out" / "report.html"
    assert where(root / "out" / "report.html") == "The file results.parquet beside this page holds all rows."
    assert write_together([root / "out"]) == root / "out" / "report.html"
    assert where(root / "out" / "report.html") == "The file results.parquet beside this page holds all rows."
    alone = write_together([root / "out"], tmp_path / "new" / "place")
    assert where(alone) == "The file results.parquet in out holds all of them."
    assert write_together([root / "curve", root / "out"]) == root / "curve" / "report.html"
    assert where(root / "curve" / "report.html") == "The files results.parquet in curve and out hold all of them."
    (tmp_path / "file").write_text("")
    with pytest.raises(FulldepthError, match="Cannot write"):
        write_together([root / "out"], tmp_path / "file")
    monkeypatch.setattr(
        "sys.argv", ["fulldepth", "report", *(str(root / n) for n in ("out", "bench")), "-o", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code in (0, None)
    assert f"Page: {tmp_path / 'report.html'}" in capsys.readouterr().out.replace("\n", "")


def test_labels_are_as_short_as_can_be():
    assert names([Path("/a/out"), Path("/a/curve")]) == ["out", "curve"]
    assert names([Path("/a/out"), Path("/b/out")]) == ["a/out", "b/out"]


def pairs(count, seed):
    generator = np.random.default_rng(seed)
    draw = lambda least, most: words(*generator.integers(0, 80, generator.integers(least, most)).tolist())  # noqa: E731
    return [{"prompt": draw(2, 6), "response": draw(1, 7)} for _ in range(count)]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What the verbs themselves leave, of a tiny model."""
    place, data = tmp_path_factory.mktemp("real"), pairs(30, 0)
    model = build("llama").eval()
    model.save_pretrained(place / "model")
    options = {"tokenizer": tokenizer(), "batch_size": 4}
    plan = search(str(place / "model"), data, 1, fit_batch_size=8, epochs=1, **options)
    analyse(str(place / "model"), plan, data, tokenizer=tokenizer(), output=place / "out")
    curve(str(place / "model"), data, blocks=2, output=place / "curve", **options)
    export(plan, str(place / "model"), "fast", place / "fast", tokenizer=tokenizer())
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OtherLoad, "share", lambda self: 0.0)
        grid = {"batches": [1], "contexts": [8, 16], "max_new_tokens": 2}
        bench(place / "model", [place / "fast"], place / "bench", **grid)
    return SimpleNamespace(place=place, plan=plan)


def test_real_folders_fill_their_page(real):
    assert all((real.place / name / "report.html").is_file() for name in ("out", "curve", "bench"))
    made = payload(together([real.place / name for name in ("out", "curve", "bench")]))
    assert [one["title"] for one in made["sections"]] == SECTIONS
    assert {"removal_loss", "kl", "greedy_agreement", "mmd", "pareto", "pareto:prefill"} == set(made["figures"])
    strip = section(made, "blocks")["tables"][0]
    assert [cell[0] for cell in strip["cells"]] == real.plan.blocks
    assert strip["layers"] == 3
    loss = next(row for row in made["models"]["rows"] if row[0] == "bench: fast" or row[0] == "fast")[1]
    assert number(loss) == pytest.approx(real.plan.healed_loss, abs=6e-5)


@pytest.mark.browser
def test_every_figure_is_drawn_and_nothing_scrolls_sideways(page, visit, ready):
    opened = visit(page)
    assert opened.locator(".plot").count() == 5
    assert opened.evaluate(EMPTY) == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1280
    strip = opened.locator("ol.strip").first
    assert strip.locator("li").count() == 12
    assert strip.locator(".gone").all_inner_texts() == ["3", "1", "2", "4"]  # by depth: layers 3, 7, 8, 11
    tops = strip.locator("li").evaluate_all("(all) => all.map((one) => Math.round(one.getBoundingClientRect().top))")
    assert len(set(tops)) == 1
    for width in (390, 320):
        opened.set_viewport_size({"width": width, "height": 844})
        opened.wait_for_timeout(300)
        ready(opened)
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
    cut = opened.locator(".strip .added").evaluate_all(
        "(all) => all.filter((one) => one.scrollWidth > one.clientWidth)"
    )
    assert cut == []


@pytest.mark.browser
def test_the_browser_shows_the_numbers(page, visit):
    opened = visit(page, color_scheme="dark")
    line = opened.evaluate(
        "document.querySelector('[data-figure=removal_loss]').data.find((one) => one.name === 'Not healed (curve)').y"
    )
    table = folders.curve().table
    expected = table[(table.measure == "loss_added") & (table.statistic == "mean")].value
    np.testing.assert_allclose(line, expected, rtol=1e-5, atol=1e-9)
    assert "results.parquet in quantised, bench, curve and out" in opened.locator("#foot").inner_text()
    opened.locator("#method details.fold > summary").click()
    methods = opened.locator(".method:not([hidden]) summary").all_inner_texts()
    assert {"Block removed", "Break point", "Time over the original’s"} <= set(methods)
    opened.emulate_media(media="print")
    opened.wait_for_function("() => !document.querySelector('.method:not([open]):not([hidden])')")
    assert opened.locator("ol.strip").first.is_visible()


@pytest.mark.browser
def test_hostile_text_stays_text(visit, tmp_path):
    results = folders.bench()
    results.table["model"] = results.table["model"].replace({"fast": HOSTILE[0]})
    meta = json.loads(json.dumps(results.meta))
    meta["models"][2] |= {"label": HOSTILE[0], "granularity": HOSTILE[1]}
    meta["model"]["name"] = meta["machine"]["name"] = HOSTILE[1]
    meta["warnings"] = HOSTILE
    meta["headline"] = {f"prefill_time_ratio {HOSTILE[0]}": {"value": 0.1, "unit": HOSTILE[1], "sentence": HOSTILE[2]}}
    meta["settings"][HOSTILE[0]] = HOSTILE[1]
    Results(results.table, meta).save(tmp_path / "bench")
    folders.search().save(tmp_path / "out")
    opened = visit(write_together([tmp_path / "bench", tmp_path / "out"], tmp_path))
    assert opened.locator("script").count() == 3
    assert opened.locator("main img").count() == 0
    assert opened.locator("h1").inner_text() == "runs/llama-12x256"
    assert HOSTILE[0] in opened.locator("#cards .verdict-table").inner_text()
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1280


def test_empty_folders_still_give_a_page():
    for kind in ("skip", "curve", "bench", "quantise"):
        results = folders.search()
        made = payload(Results(results.table.iloc[:0], {"kind": kind}))
        assert made["sections"] == []
        assert made["title"] == "Unnamed model"
