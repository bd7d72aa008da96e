"""Figures and pages of `fulldepth skip`: every number is one of the table or of the document."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from numpy.testing import assert_allclose

from fulldepth.core.uncertainty import Difference, score_reach
from fulldepth.execution.heldout import HeldoutLosses
from fulldepth.execution.latency import OtherLoad
from fulldepth.reporting.page import payload, render
from fulldepth.reporting.skip import (
    SkipPart,
    cost_and_saving,
    decoding,
    num_layers_of,
    parts,
    removals,
    timed_models,
    with_error,
)
from fulldepth.reporting.source import PageSource
from fulldepth.reporting.tables import of_record
from fulldepth.reporting.task_changes import task_change_tables, task_sentences
from fulldepth.results import Results, difference_in_words, report, tabulate
from fulldepth.results.pages import together, unique_names
from fulldepth.results.verdict import difference_finding
from fulldepth.skip.bench import bench
from fulldepth.skip.curve import curve
from fulldepth.skip.exports.export import export
from fulldepth.skip.search import search
from refusals import refused
from reporting import skip_folders as folders
from reporting import synthetic
from reporting.plotted import joined
from reporting.synthetic import payload_of, row
from skip.test_curve import pairs
from skip.word_tokenizer import tokenizer
from tiny_models import build

ORDER = ("bench", "curve", "out", "another")
"""Of the folders on the command line; the page shows them in reading order."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The four folders of one model."""
    place = tmp_path_factory.mktemp("skip")
    for name in ORDER:
        getattr(folders, {"out": "search"}.get(name, name))().save(place / name, page=False)
    return place


@pytest.fixture(scope="module")
def every(root):
    """All four on one page."""
    results = together([root / name for name in ORDER])
    return payload_of(results)


def drawn(results, name):
    return results.figures()[name]


def trace(figure, name):
    (found,) = [one for one in figure.data if str(one.name).startswith(name) and one.hoverinfo != "skip"]
    return found


def folders_of(results):
    return parts(PageSource(results.table, results.meta))


def cells(table):
    return {row[0]: dict(zip(table.columns, row[1:], strict=True)) for row in table.rows}


def number(text):
    return float(text.split()[0].strip("×").replace("−", "-").replace(",", ""))


def test_scores_of_a_ranking_and_the_blocks_that_it_removed():
    figure = drawn(folders.ranked(), "ranking")
    expected = {
        "Attention block": [("attention", layer) for layer in range(1, 7)],
        "Removed attention block": [("attention", 3), ("attention", 4)],
        "MLP": [("mlp", layer) for layer in range(1, 7)],
        "Removed MLP": [("mlp", 5)],
    }
    assert [one.name for one in figure.data] == [*expected]
    for one in figure.data:
        shown = [(at, value) for at, value in zip(one.x, one.y, strict=True) if value is not None]
        assert shown == [(layer, folders.score_of(part, layer)) for part, layer in expected[one.name]]
    assert figure.layout.yaxis.type == "log"
    assert "ranking" not in folders.search().figures()


def test_break_point_healed_loss_and_control_stand_beside_the_line():
    figure = drawn(folders.curve(at=5), "removal_loss")
    assert {(shape.type, shape.x0, shape.x1) for shape in figure.layout.shapes} == {("rect", 4, 6), ("line", 5, 5)}
    assert any(one.name == "Break point: 5 (95 %: 4 to 6)" for one in figure.data)
    assert not drawn(folders.curve(at=None), "removal_loss").layout.shapes
    for results, several in ((folders.search(), ""), (joined(), " (out")):
        for mark in ("Healed", "Control: scalars only"):  # where they are: `plotted.json.gz`
            assert len(trace(drawn(results, "removal_loss"), mark + several).x) == 1


def test_lines_that_run_along_each_other_are_drawn_once():
    def lines(results):
        return [str(one.name) for one in drawn(results, "removal_loss").data if one.mode == "lines+markers"]

    assert lines(joined()) == ["Not healed (curve)", "Not healed (another)"]
    removed = removals(folders_of(joined()))
    assert [(one.name, one.blocks) for one in removed] == [
        ("out, folded, fast", folders.BLOCKS),
        ("curve", folders.FARTHER),
        ("another", (7, 8, 4, 11)),
    ]
    table, meta = folders.curve().table, folders.curve().meta
    assert num_layers_of([SkipPart("", "curve", table, meta)]) == max(folders.FARTHER)


@pytest.mark.parametrize(("name", "phase"), [("pareto", "decode"), ("pareto:prefill", "prefill")])
def test_quality_against_time_shows_the_ratios_of_the_table(name, phase):
    results = folders.bench()
    figure = drawn(results, name)
    whole = results.table[results.table.batch.isna()]
    for model in ("folded", "fast"):
        point = trace(figure, model)
        keep = (whole.measure == "time_ratio") & (whole.site == phase) & (whole.model == model)
        ratio = whole[keep].set_index("statistic").value
        assert (point.x[0], *point.customdata[0]) == (ratio["median"], ratio["low"], ratio["high"])
    assert not any(str(one.name).startswith("other") for one in figure.data)  # its loss is not known
    unhealed = folders.plan(healed=False)
    added = unhealed["losses"][-1] - unhealed["losses"][0]
    assert trace(drawn(folders.bench(unhealed), name), "fast").y[0] == pytest.approx(added)


def test_models_side_by_side_are_the_rows(every):
    rows = cells(every["models"])
    assert list(rows) == ["base (original)", "folded", "fast", "other"]
    plan, fast = folders.plan(), rows["fast"]
    for phase in ("Prefill", "Decode"):
        said = [float(one) for one in re.findall(r"[\d.]+", fast[phase])]
        assert said == pytest.approx([1 / 0.8, 1 / (0.8 * 1.02), 1 / (0.8 * 0.97)], abs=6e-3)
        assert rows["folded"][phase] == "≈ 1× (0.97 to 1.02)"  # 1.01 times the original's: not told apart
    assert number(fast["Held-out loss"]) == pytest.approx(plan["healed_loss"], abs=6e-5)
    assert number(fast["Loss added"]) == pytest.approx(plan["healed_loss"] - plan["losses"][0], abs=6e-5)
    assert (fast["Weights"], fast["Cache per token"], fast["Peak memory"]) == ("0.90×", "0.67×", "1.00×")
    assert rows["other"]["Held-out loss"] == "–"
    bench = folders.bench()
    twice = timed_models([SkipPart(name, "bench", bench.table, bench.meta) for name in "ab"])
    assert [one.name for one in twice] == [f"{part}: {name}" for part in "ab" for name in bench.table.model.unique()]


def test_a_page_opens_with_one_sentence_and_one_picture(every):
    expected = {"search": "blocks", "curve": "removal", "bench": None, "another": "blocks"}  # None: a table
    made = {name: getattr(folders, name)() for name in expected}
    pages = {name: payload_of(results) for name, results in made.items()} | {"every": every}
    for name, section in (expected | {"every": "removal"}).items():
        opening = [one for one in pages[name]["sections"] if one["first"]]
        assert [one["id"] for one in opening] == [section] * (section is not None)
        assert all(len(first["slots"]) + len(first["tables"]) == 1 for first in opening)
        assert len(pages[name]["story"]["sentences"]) == 1
    assert "other decodes 1.43 times as fast as base (1.40 to 1.47)" in pages["bench"]["story"]["sentences"][0]
    labels = {"search": "out: ", "another": "another: "}  # two folders of one kind
    said = [
        labels.get(name, "") + entry["sentence"]
        for name, results in made.items()
        for entry in results.meta["headline"].values()
    ]
    assert sorted(every["more_sentences"]) == sorted(said)
    assert {card["name"]: card["digits"] + card["unit"] for card in every["cards"]}["Break point"] == "5of 12"
    assert every["warnings"][0] == "The machine was busy."


def test_times_of_few_rounds_have_no_interval_in_the_opening_sentence():
    bench = folders.bench()
    few = Results(bench.table[~bench.table.statistic.isin(["low", "high"])], bench.meta)
    (sentence,) = payload_of(few)["story"]["sentences"]
    assert "other decodes 1.43 times as fast as base (no interval)" in sentence


def test_a_block_map_says_which_block_went_when_and_what_it_added(every):
    (section,) = [one for one in every["sections"] if one["id"] == "blocks"]
    maps, losses = section["tables"], folders.losses_of(8)
    for shown, blocks in zip(maps, (folders.BLOCKS, (7, 8, 4, 11), folders.FARTHER), strict=True):
        assert [layer for layer, *_ in shown["cells"]] == list(range(1, 13))
        gone = sorted((order, n, number(added)) for n, own in shown["cells"] for order, added in own.values())
        assert [layer for _, layer, _ in gone] == list(blocks)
        assert_allclose([added for *_, added in gone], np.diff(losses)[: len(blocks)], atol=6e-4)
    assert "2.962 nats healed" in maps[0]["note"]


def test_rows_of_all_folders_keep_their_types_and_other_data_are_remarked(root, tmp_path):
    results = together([root / name for name in ORDER])
    assert len(results.table) == sum(len(Results.load(root / name).table) for name in ORDER)
    assert set(results.table.folder) == set(ORDER)
    assert results.table.removed.dtype == "Int64"
    other = folders.search()
    other.meta["data"] = {**other.meta["data"], "hash": "sha256:" + "5" * 64}
    other.save(tmp_path / "other", page=False)
    mixed = together([root / "curve", tmp_path / "other"])
    assert any("different data" in text for text in payload_of(mixed)["warnings"])


def test_what_does_not_belong_together_is_refused(root, tmp_path):
    synthetic.minimal().save(tmp_path / "measured", page=False)
    strange = folders.curve()
    strange.meta["model"]["hash"] = "sha256:" + "77" * 32
    strange.save(tmp_path / "strange", page=False)
    strange.meta["model"] |= {"class": "GPT2LMHeadModel", "hash": folders.HASH}
    strange.save(tmp_path / "classy", page=False)
    for paths, named in (
        ([root / "bench", tmp_path / "measured"], "measured"),
        ([root / "out", tmp_path / "strange"], "strange"),
        ([root / "out", tmp_path / "classy"], "GPT2LMHeadModel"),
        ([root / "out", root / "page" / ".." / "out"], "out"),
        ([root / "out", tmp_path], re.escape(str(tmp_path))),
        ([], "folder"),
    ):
        with refused(named):
            report(paths, tmp_path / "page")
    assert not (tmp_path / "page").exists()
    half = folders.bench()  # another precision has another hash and is allowed
    half.meta["settings"] |= {"dtype": "bfloat16"}
    half.meta["model"]["hash"] = "sha256:" + "66" * 32
    half.save(tmp_path / "half", page=False)
    assert report([root / "out", tmp_path / "half"], tmp_path / "page").is_file()


def test_where_the_page_goes(root, tmp_path):
    place = tmp_path / "new" / "place"
    made = [report(root / "out"), report([root / "out"]), report([root / "out"], place)]
    made.append(report([root / "curve", root / "out"]))
    assert made == [folder / "report.html" for folder in (root / "out", root / "out", place, root / "curve")]
    assert all("results.parquet of each result folder" in path.read_text() for path in made)
    assert (root / "curve" / "report.html").is_file()
    (tmp_path / "file").write_text("")
    with refused("file"):
        report([root / "out"], tmp_path / "file")
    assert unique_names([Path("/a/out"), Path("/a/curve")]) == ["out", "curve"]
    assert unique_names([Path("/a/out"), Path("/b/out")]) == ["a/out", "b/out"]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What the verbs themselves leave, of a tiny model."""
    place, data = tmp_path_factory.mktemp("real"), pairs(30)
    build("llama").eval().save_pretrained(place / "model")
    options = {"tokenizer": tokenizer(), "batch_size": 4}
    plan = search(str(place / "model"), data, 1, fit_batch_size=8, epochs=1, output=place / "out", **options)
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
    results = together([real.place / name for name in ("out", "curve", "bench")])
    made = payload_of(results)
    assert {"removal_loss", "kl", "greedy_agreement", "pareto", "pareto:prefill"} == set(made["figures"])
    (section,) = [one for one in made["sections"] if one["id"] == "blocks"]
    gone = [layer for layer, own in section["tables"][0]["cells"] if own]
    assert gone == real.plan.blocks
    loss = next(row for name, row in cells(made["models"]).items() if name.endswith("fast"))["Held-out loss"]
    assert number(loss) == pytest.approx(real.plan.healed_loss, abs=6e-5)
    (removed,) = real.plan.blocks
    assert section["tables"][0]["modules"] == f"model.layers.{removed - 1}.self_attn"
    page = render(results.table, results.meta)
    assert page.count("so layer 7 is <code>model.layers[6]</code>") == 1
    assert f"In transformers: <bdi>model.layers.{removed - 1}.self_attn</bdi>" in page


@pytest.mark.parametrize("kind", ["skip", "curve", "bench"])
def test_what_is_missing_leaves_out_its_figure_only(kind):
    results = getattr(folders, {"skip": "search"}.get(kind, kind))()
    for measure in results.table.measure.unique():
        assert isinstance(Results(results.table[results.table.measure != measure], results.meta).figures(), dict)
    assert isinstance(Results(results.table, {"kind": kind}).figures(), dict)
    made = payload(results.table.iloc[:0], {"kind": kind})
    assert (made["sections"], made["title"]) == ([], "Unnamed model")


def test_a_layer_that_lost_two_blocks_shows_both_losses_and_intros_are_html():
    planned = folders.plan(
        ("attention 7", "layer 3", "mlp 7"),
        healed=False,
        losses=[2.0, 2.1, 2.3, 2.7],
        scalars={},
        granularity="attention",
    )
    planned["granularity"] = "any"
    results = folders.search()
    results.meta["plan"] = planned
    page = render(results.table, results.meta)
    added = re.findall(
        r'<li title="Layer (\d+):.*?<span class="added" aria-hidden="true">(.*?)</span></li>', page, re.S
    )
    assert [(layer, text.split("<br>")[:-1]) for layer, text in added] == [
        ("3", ["+0.200"]),
        ("7", ["+0.100", "+0.400"]),
    ]
    assert "4 blocks removed" in page
    (loss,) = (figure for name, figure in results.figures().items() if name.startswith("removal_loss"))
    assert list(loss.data[0].x) == [0, 1, 3, 4]
    healed = Results.load(Path(__file__).parents[2] / "docs" / "gallery" / "smaller-healed")
    page = render(healed.table, healed.meta)
    assert "<code>fulldepth evaluate</code>" in page
    assert "&lt;code&gt;" not in page


def test_commands_in_sentences_are_code_and_other_backticks_stay():
    results = folders.search()
    hostile = "`fulldepth skip bench --heldout <b>` times `<i>it</i>`."
    results.meta["headline"]["target_speedup"] = {"value": 1.2, "unit": "1", "sentence": hostile}
    results.meta["warnings"] = [hostile]
    page = render(results.table, results.meta)
    shown = "<code>fulldepth skip bench --heldout &lt;b&gt;</code> times `&lt;i&gt;it&lt;/i&gt;`."
    assert page.count(shown) >= 2
    assert "<i>it" not in page


def test_a_healing_opens_with_its_tasks_by_what_their_errors_carry():
    """A difference is clear beyond two errors, to which one example is added, as in the sentences of `skip heal`."""
    scores = {
        "clear": (0.50, 0.62, 0.70, 500),
        "within": (0.50, 0.53, 0.56, 500),
        "of ten": (0.50, 0.60, 0.60, 10),  # two errors are 0.04, and an example is 0.1
        "unpaired": (0.50, 0.40, None, 500),
    }
    errors = {"clear": 0.02, "within": 0.02, "of ten": 0.02, "unpaired": None}
    tables, headline = [], {}
    for task, (original, healed, control, count) in scores.items():
        models = {"original": original, "trained": healed, "control": control}
        for model, value in models.items():
            if value is not None:
                rows = [row("task_score", None, value, "acc", task, count=count)]
                if model != "original":
                    rows.append(row("task_score", None, 9.0, "difference_stderr", task, count=count))
                tables.append(tabulate(rows, model=model))
        for kind, reference in (("task", original), ("task_cost", control)):
            if reference is not None:
                finding = {"value": healed - reference, "unit": "1", "sentence": "Long."}
                headline[f"{kind} {task}"] = finding | {"standard_error": errors[task]}
    table = pd.concat(tables)
    assert task_sentences(table, headline) == [
        "Tasks against the original: clear +0.120 ± 0.020; no measurable difference in within and of ten; no standard "
        "error is known in unpaired.",
        "Tasks against the original trained on the same tokens: clear −0.080 ± 0.020; no measurable difference in "
        "within and of ten.",
    ]
    two_errors = scipy.stats.t.ppf(scipy.stats.norm.cdf(2), 499)
    assert score_reach(0.02, 500) == pytest.approx(((two_errors * 0.02) ** 2 + 0.004**2) ** 0.5)
    (shown,) = task_change_tables(table, headline)
    assert shown.rows[0] == ["clear", "0.500", "0.620", "+0.120 ± 0.020", "0.700", "−0.080 ± 0.020", "500"]
    assert shown.rows[3] == ["unpaired", "0.500", "0.400", "−0.100", "–", "–", "500"]
    assert task_change_tables(table, {"net_cost": {"value": 0.1}}) == []
    healed = Results.load(Path(__file__).parents[2] / "docs" / "gallery" / "smaller-healed")
    said = payload_of(healed)["story"]["sentences"]
    assert [sentence.split(":")[0] for sentence in said[:3]] == [
        "Tasks against the original",
        "Tasks against the original trained on the same tokens",
        "Net cost of removal",
    ]


def test_a_note_explains_shown_columns_only():
    columns = {"As good from": [], "Above chance": []}
    for cells in ({"whole": "0.5", "above": "yes"}, {"whole": "0.5", "above": "yes", "as_good": "layer 2 of 3"}):
        table = of_record("tasks", [("arc", cells)])
        shown = {name for name in columns if f"{name}:" in table.note}
        assert shown == {*columns} & {*table.columns}


@pytest.mark.parametrize(("documents", "groups"), [(8, None), (100, None), (100, 3.0)])
def test_an_added_loss_is_measurable_by_students_t_of_its_documents(documents, groups):
    """2.22 standard errors are measurable of 100 documents, and not of eight, nor where three have nearly all tokens.

    Tables of earlier versions do not state `difference_groups`: all of their documents count.
    """
    results = folders.bench()
    losses = {"base": 3.0, "other": 3.0222}  # the fastest one
    tables = [tabulate([row("loss", None, loss, "mean", "model")], model=name) for name, loss in losses.items()]
    rows = [row("loss", None, 0.01, "difference_stderr", "model", count=documents)]
    if groups is not None:
        rows.append(row("loss", None, groups, "difference_groups", "model", count=documents))
    table = pd.concat([results.table, *tables, tabulate(rows, model="other")], ignore_index=True)
    part = SkipPart("", "bench", table[table["model"].isin(losses)], results.meta)
    [sentence] = decoding([part])
    cost = cost_and_saving([part])[0]
    expected = Difference(0.0222, 0.01, 0.01, documents, documents, 0.1, independent=groups)
    assert "loss added: +0.0222 ± 0.01 nats" in sentence
    assert "changes the held-out loss by +0.0222 ± 0.01 nats" in cost
    for text in (sentence, cost):
        assert ("no measurable difference" in text) is not expected.measurable


def test_decoding_is_shown_in_milliseconds_a_token():
    """`folders.bench` decodes a token of one sequence in 2 ms with the original."""
    bench = folders.bench()
    shown = {model.name: model.decoding for model in timed_models([SkipPart("", "bench", bench.table, bench.meta)])}
    seconds = bench.table.query("measure == 'decode_time' and batch == 1").groupby("model")["value"].median()
    assert shown == pytest.approx({str(name): 1000 * value for name, value in seconds.items()})
    assert 0.1 < shown["base"] < 10


def test_the_page_calls_a_loss_measurable_where_the_headline_does():
    """One document of 2,000 tokens and nine of 10: Student's t of about one effective document."""
    tokens, documents = np.array([2000.0] + [10.0] * 9), np.arange(10)
    gap = 0.05 + np.r_[0, np.random.default_rng(0).normal(0, 0.3, 9)]
    losses = HeldoutLosses({"original": 2 * tokens, "fast": (2 + gap) * tokens}, tokens, documents)
    added = losses.added("fast")
    part = SkipPart("", "bench", tabulate([*losses.rows("fast")], model="fast"), {})
    error, groups = (part.value("loss", name, model="fast") for name in ("difference_stderr", "difference_groups"))
    assert groups == pytest.approx(added.groups)
    assert groups < 2
    stated = difference_in_words(added, "original", "documents")
    assert stated.endswith("against original (one of 10 documents has nearly all tokens: no error is stated)")
    assert "no measurable" in with_error(added.mean, error, groups)
    assert difference_finding(added, stated, "documents").standard_error is None
