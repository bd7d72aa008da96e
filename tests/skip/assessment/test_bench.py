"""Benchmarks: bytes by shapes and files, logits without a cache, losses by stock passes, clocks of known ratio."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples, read_examples
from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import PHASES, OtherLoad, Runner, Trial, time_in_rounds
from fulldepth.hf import anatomy_candidates, skipping
from fulldepth.reporting.page import payload
from fulldepth.reporting.skip import parts, timed_models
from fulldepth.reporting.source import Source
from fulldepth.results import Results
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.assessment.bench import _headline, _opened, bench
from fulldepth.skip.assessment.compared import AddedLoss, Cell, HeldoutLosses, Measured
from fulldepth.skip.exports.export import export
from skip import plain
from skip.planned import plan
from skip.word_tokenizer import tokenizer
from tiny_models import LAYERS, VOCAB, build

SMALL = {"batches": [2], "contexts": [12], "new_tokens": 3, "repeats": 2}
KV = 2 * 2 * 8 * 4
"""Bytes of a token's keys and values in one layer of the tiny Llama: two, of 2 heads of 8 float32 numbers."""


@pytest.fixture(scope="module", autouse=True)
def unproven():
    """Exports are not loaded in a fresh process: their own tests do that."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fulldepth.skip.exports.export.prove", lambda *_: 0.0)
        yield


@pytest.fixture(scope="module")
def folders(unproven, tmp_path_factory):
    """A checkpoint, and what two formats make of it without the attention of layers 1 and 3."""
    root = tmp_path_factory.mktemp("bench")
    build("llama").save_pretrained(root / "original")
    model = AutoModelForCausalLM.from_pretrained(root / "original").eval()
    for format in ("folded", "fast"):
        export(plan(model, [3, 1], values=None), model, format, root / format, tokenizer=tokenizer())
    return root


@pytest.fixture(scope="module")
def found(folders):
    return bench(folders / "original", [folders / "folded", folders / "fast"], folders / "out", **SMALL)


def value(results, measure, model, statistic=None, **where):
    table = results.table
    keep = (table.measure == measure) & (table.model == model)
    if statistic is not None:
        keep &= table.statistic == statistic
    for column, wanted in where.items():
        keep &= table[column] == wanted
    (number,) = table[keep]["value"]
    return number


def on_disk(folder):
    """Bytes of the tensors in a checkpoint's files, by their shapes."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            total += sum(int(np.prod(file.get_slice(name).get_shape())) * 4 for name in names)
    return total


def test_bytes_are_those_of_files_and_shapes(found, folders) -> None:
    for name in ("original", "folded", "fast"):
        assert value(found, "parameter_bytes", name) == on_disk(folders / name)
        assert value(found, "kv_bytes_per_token", name) == KV * (1 if name == "fast" else LAYERS)
        assert value(found, "peak_memory", name) > on_disk(folders / name) + 2 * 15 * KV
    assert value(found, "peak_memory", "fast") < value(found, "peak_memory", "original")


def test_the_folder_says_what_was_compared(found, folders) -> None:
    again = Results.load(folders / "out")
    pd.testing.assert_frame_equal(again.table, found.table)
    assert again.meta["kind"] == "bench"
    assert again.meta["settings"] | SMALL == again.meta["settings"]
    assert [entry["label"] for entry in again.meta["models"]] == ["original", "folded", "fast"]
    assert [entry["not_computed"] for entry in again.meta["models"]] == [None, [], [1, 3]]
    assert [entry["baseline"] for entry in again.meta["models"]] == [True, False, False]
    assert again.meta["machine"]["threads"] == torch.get_num_threads()
    assert not any("other weights" in line for line in again.meta["warnings"])
    assert {"times"} == set(again.headline) or {"prefill_time_ratio fast", "decode_time_ratio folded"} <= set(
        again.headline
    )
    assert isinstance(again.figures(), dict)


def test_exports_are_loaded_as_the_original_is(folders, tmp_path) -> None:
    """In bfloat16 rotary frequencies stay float32; DeciLM's first layer keeps its attention, as its modules show."""
    model = AutoModelForCausalLM.from_pretrained(folders / "original").eval()
    export(plan(model, [3, 1], values=None), model, "decilm", tmp_path / "decilm", tokenizer=tokenizer())
    names = [folders / "original", folders / "folded", folders / "fast", tmp_path / "decilm"]
    first, *others = _opened(names, BenchSettings(dtype="bfloat16"))
    frequencies = first.model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    for entry in others:
        assert entry.model.dtype == torch.bfloat16
        assert torch.equal(entry.model.model.rotary_emb.inv_freq, frequencies)
    assert [sorted(entry.skipped_blocks[1]) for entry in others] == [[], [1, 3], [3]]
    names = others[-1].model.state_dict()
    assert [f"model.layers.{index}.self_attn.o_proj.weight" in names for index in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("family", "skipped_blocks"), [("llama", ()), ("gpt2", (1,)), ("gemma2", (1, 2, 3)), ("gpt_neox", (1,))]
)
def test_decoding_stands_at_the_right_positions(family, skipped_blocks) -> None:
    model = build(family)
    ids = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), skipping(anatomy_candidates(model)[0], skipped_blocks):
        expected = model(input_ids=ids, use_cache=False).logits[:, -1]
        got = Runner(model).run(ids, 12).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_models_take_turns(monkeypatch) -> None:
    original, other = build("llama").train(), build("llama", seed=1)
    runs = []

    def run(self, ids, context):
        runs.append((self.model is original, tuple(ids.shape), context))
        return Trial(1.0, 1.0, Nothing(), torch.zeros(1))

    class Nothing:
        layers = ()

    monkeypatch.setattr(Runner, "run", run)
    results = bench(original, [other], batches=[1, 2], contexts=[5], new_tokens=2, repeats=3, warmup=1)
    for batch, start in ((1, 0), (2, 12)):
        part = runs[start : start + 12]  # a warm-up and three rounds of two models, then their memory and cache
        assert {shape for _, shape, _ in part} == {(batch, 7)}
        turns = [[(first, context) for first, _, context in part[n : n + 2]] for n in range(0, 8, 2)]
        assert all(sorted(turn) == [(False, 5), (True, 5)] for turn in turns)
        assert len({tuple(turn) for turn in turns}) == 2
    assert original.training
    assert results.meta["models"][1]["not_computed"] is None


def test_loaded_models_say_what_they_lack(folders) -> None:
    original = AutoModelForCausalLM.from_pretrained(folders / "original").eval()
    fast = AutoModelForCausalLM.from_pretrained(folders / "fast").eval()
    results = bench(original, [fast], **{**SMALL, "repeats": 1})
    assert results.meta["models"][1]["not_computed"] == [1, 3]
    assert value(results, "kv_bytes_per_token", results.meta["models"][1]["label"]) == KV


def test_what_makes_a_comparison_unfair_is_said(folders) -> None:
    other = build("llama", seed=5)
    results = bench(other, [folders / "fast"], **{**SMALL, "repeats": 1})
    assert any("other weights" in line for line in results.meta["warnings"])
    results = bench(build("llama", dtype=torch.bfloat16), [folders / "fast"], **{**SMALL, "repeats": 1})
    assert any("torch.bfloat16" in line for line in results.meta["warnings"])


def bigger():
    model = build("llama")
    model.resize_token_embeddings(VOCAB + 4)
    return model


@pytest.mark.parametrize(
    ("original", "exports", "options", "named"),
    [
        ("llama", ["llama"], {"contexts": [62]}, "64 positions"),
        ("llama", ["llama"], {"repeats": 0}, "repeats"),
        ("llama", ["llama"], {"batches": []}, "batches"),
        ("llama", ["llama"], {"round": 3}, "round"),
        ("llama", [], {}, "one export or more"),
        ("llama", "llama", {}, "one export or more"),
        ("bert", ["llama"], {}, "causal language model"),
        ("llama", [bigger], {}, "vocabulary"),
        ("llama", ["/no/such/folder"], {}, "/no/such/folder"),
    ],
)
def test_what_is_refused(original, exports, options, named) -> None:
    def model(one):
        return one() if callable(one) else one if one.startswith("/") else build(one)

    models = model(exports) if isinstance(exports, str) else [model(one) for one in exports]
    with pytest.raises(FulldepthError, match=named):
        bench(build(original), models, **{**SMALL, **options})


def by_document(count: int) -> Examples:
    """Held-out sequences of unlike lengths, two or three of a document; some have few labels."""
    held = plain.sentences(count, 5)
    spread = [Example(one.input_ids, one.labels, number // 3) for number, one in enumerate(held)]
    return Examples([], spread, {"hash": "sha256:" + "4" * 64, "name": "sentences", "kind": "pairs", "warnings": []})


@torch.no_grad()
def plain_sums(model, examples) -> np.ndarray:
    """[N] float64 nats of each sequence, by stock forward passes of one sequence without padding."""
    model = model.double()
    found = []
    for one in examples:
        targets = one.labels[1:][one.labels[1:] != -100]
        found.append(-float(plain.log_probabilities(model, one).gather(1, targets[:, None]).sum()))
    return np.array(found)


def test_losses_are_those_of_stock_passes_on_the_same_sequences(folders, tmp_path) -> None:
    examples = by_document(11)
    given = {**SMALL, "repeats": 1, "batch_size": 4}
    results = bench(folders / "original", [folders / "folded", folders / "fast"], data=examples, **given)
    names = ("original", "folded", "fast")
    stock = [
        AutoModelForCausalLM.from_pretrained(folders / name, dtype=torch.float64, trust_remote_code=name == "fast")
        for name in names
    ]
    sums = {name: plain_sums(model, examples.heldout) for name, model in zip(names, stock, strict=True)}
    tokens = np.array([one.predicted for one in examples.heldout])
    documents = np.array([one.document for one in examples.heldout])
    for name in names:
        expected = sums[name].sum() / tokens.sum()
        assert value(results, "loss", name, "mean") == pytest.approx(expected, rel=1e-6)
        gap = sums[name] - sums["original"]
        rate = gap.sum() / tokens.sum()
        by_group = [(gap[documents == g] - rate * tokens[documents == g]).sum() for g in np.unique(documents)]
        error = np.sqrt(len(by_group) / (len(by_group) - 1) * np.square(by_group).sum()) / tokens.sum()
        rows = results.table[(results.table.measure == "loss") & (results.table.model == name)].set_index("statistic")
        assert rows["count"]["mean"] == tokens.sum()
        if name == "original":
            assert list(rows.index) == ["mean"]
            continue
        assert rows["value"]["difference_stderr"] == pytest.approx(error, rel=1e-4)
        assert rows["count"]["difference_stderr"] == len(by_group) == 4
        finding = results.headline[f"loss_added {name}"]
        assert finding["standard_error"] == pytest.approx(error, rel=1e-4)
        measurable = abs(rate) > scipy.stats.t(3).ppf(0.975) * error  # four documents: Student's t of three degrees
        assert ("no measurable" not in finding["sentence"]) == measurable
    assert abs(value(results, "loss", "fast", "mean") - value(results, "loss", "original", "mean")) > 1e-4
    assert results.meta["data"]["hash"] == examples.meta["hash"]
    shown = {one.name: one for one in timed_models(parts(Source(results.table, results.meta)))}
    assert shown["fast"].loss == value(results, "loss", "fast", "mean")  # not the plan's, which was made up
    assert shown["fast"].base == value(results, "loss", "original", "mean")
    assert not any(one.stated for one in shown.values())


def test_losses_are_read_from_files_as_a_search_reads_them(folders, tmp_path) -> None:
    texts = [" ".join(f"w{(7 * row + 3 * at) % 80}" for at in range(9 + row)) for row in range(10)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer().save_pretrained(tmp_path / "words")
    words = str(tmp_path / "words")
    searched = read_examples(str(tmp_path / "data.jsonl"), tokenizer(), 64, sequence_length=8, limit=14)
    original = AutoModelForCausalLM.from_pretrained(folders / "original").eval()
    made = plan(original, [1], values=None, data={"hash": searched.meta["hash"]}, search="greedy")
    export(made, original, "fast", tmp_path / "fast", tokenizer=tokenizer())
    given = {**SMALL, "repeats": 1, "tokenizer": words, "sequence_length": 8}
    file = str(tmp_path / "data.jsonl")
    results = bench(folders / "original", [tmp_path / "fast"], data=file, limit=14, **given)
    expected = plain.loss(original, searched.heldout, (), "attention")
    assert value(results, "loss", "original", "mean") == pytest.approx(expected, rel=1e-6)
    assert "Measured on the text that chose the blocks" in results.headline["loss_added fast"]["sentence"]
    whole = bench(folders / "original", [tmp_path / "fast"], heldout=file, **given)
    starts = [(len(text.split()), at) for text in texts for at in range(0, len(text.split()) - 1, 8)]
    count = sum(min(8, length - at) - 1 for length, at in starts)
    assert whole.table[whole.table.measure == "loss"]["count"].iloc[0] == count
    assert "It is not known whether" in whole.headline["loss_added fast"]["sentence"]  # an older plan: no rows


def test_without_data_the_loss_is_stated_by_the_plan(found) -> None:
    assert "loss" not in set(found.table.measure)
    shown = {one.name: one for one in timed_models(parts(Source(found.table, found.meta)))}
    assert shown["fast"].stated
    assert (shown["fast"].loss, shown["fast"].base) == (1.0, 1.0)


CELL = Cell(1, 8)


class Clock:
    """Seconds of runs on one machine, whose speed changes while it runs."""

    def __init__(self, kind: str, rounds: int, seed: int) -> None:
        self.kind, self.rng, self.done = kind, np.random.default_rng(seed), 0
        self.runs = 2 * rounds
        self.slow = self.rng.integers(self.runs)

    def seconds(self) -> float:
        """Of the next run of a model that takes 1 s on a quiet machine."""
        factor = {
            "noise": 1.0,
            "drift": 1 + 0.5 * self.done / self.runs,
            "slow run": 4.0 if self.done == self.slow else 1.0,
            "load in the middle": 1.6 if self.done >= self.runs // 2 else 1.0,
        }[self.kind]
        self.done += 1
        return factor * float(self.rng.lognormal(0, 0.03))


class FakeRunner:
    """A model that takes `ratio` seconds of a clock."""

    def __init__(self, clock: Clock, ratio: float) -> None:
        self.clock, self.ratio = clock, ratio

    def run(self, ids, context) -> Trial:
        seconds = self.ratio * self.clock.seconds()
        return Trial(seconds, seconds, None, torch.zeros(1))


def simulated(kind: str, ratio: float, rounds: int, seed: int) -> Measured:
    clock = Clock(kind, rounds, seed)
    runs = {name: (FakeRunner(clock, value), nullcontext) for name, value in (("original", 1.0), ("other", ratio))}
    timed = time_in_rounds(runs, None, 8, repeats=rounds, warmup=0, seed=seed, advance=lambda done: None)
    times = {(name, CELL, phase): seconds for (name, phase), seconds in timed.seconds.items()}
    return Measured(["original", "other"], {"original": 1, "other": 1}, None, times, {CELL: timed.other_load})


@pytest.fixture
def quiet(monkeypatch) -> None:
    monkeypatch.setattr(OtherLoad, "__init__", lambda self: None)
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)


@pytest.mark.parametrize("draws", [100, pytest.param(3000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", ["noise", "drift", "slow run", "load in the middle"])
def test_equal_models_do_not_differ_and_ten_per_cent_are_found(kind, draws, quiet) -> None:
    same, slower, rounds = 0, 0, 9
    for seed in range(draws):
        same += "no measurable difference" not in said(simulated(kind, 1.0, rounds, seed))
        slower += "no measurable difference" not in said(simulated(kind, 1.1, rounds, seed))
    assert same / draws <= 0.05 + 2 * (0.05 * 0.95 / draws) ** 0.5
    assert slower / draws >= 0.9


def said(measured: Measured) -> str:
    return measured.ratio_text("other", "prefill")


def test_a_ratio_by_hand(quiet) -> None:
    measured = simulated("noise", 1.0, 9, 0)
    measured.times["original", CELL, "decode"] = [10.0] * 9
    measured.times["other", CELL, "decode"] = [8.0, 8.2, 8.4, 8.6, 8.8, 9.0, 9.2, 9.4, 20.0]
    rows = measured.table()
    rows = rows[(rows.measure == "time_ratio") & (rows.site == "decode") & rows.batch.isna()]
    # the second smallest and the second largest of nine: 1 - 2 (1 + 9) / 512 = 0.961
    assert rows.set_index("statistic").value.to_dict() == pytest.approx({"median": 0.88, "low": 0.82, "high": 0.94})
    other = Cell(4, 8)
    measured.other_load[other] = 0.0
    for name, seconds in (("original", 1.0), ("other", 0.9)):  # a round of a grid: the geometric mean of its cells
        measured.times[name, CELL, "prefill"] = [seconds] * 9
        measured.times[name, other, "prefill"] = [5 * seconds**3] * 9
    assert measured.ratio("other", "prefill") == pytest.approx([0.9**2] * 3)


def test_few_rounds_and_a_busy_machine_give_no_verdict(monkeypatch) -> None:
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    measured = simulated("noise", 1.0, 8, 0)
    assert "9 rounds" in said(measured)
    rows = measured.table()
    assert set(rows[rows.measure == "time_ratio"].statistic) == {"median"}
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.35)
    measured = simulated("noise", 1.1, 9, 0)
    assert "time_ratio" not in set(measured.table().measure)
    entries = [SimpleNamespace(label=name) for name in measured.labels]
    ((name, finding),) = _headline(entries, measured, None)
    assert (name, finding.value) == ("times", None)
    assert "35%" in finding.sentence


@pytest.mark.parametrize("grid", [{"contexts": [8]}, {"contexts": [8, 16]}])
def test_headline_table_and_figure_show_one_number(monkeypatch, quiet, grid) -> None:
    original, other = build("llama"), build("llama", seed=1)
    rng, run = np.random.default_rng(5), Runner.run

    def noisy(self, ids, context) -> Trial:
        trial = run(self, ids, context)
        seconds = rng.lognormal(0, 0.3, 2) * (1 if self.model is original else 0.4)
        return trial._replace(prefill=seconds[0], decode=seconds[1])

    monkeypatch.setattr(Runner, "run", noisy)
    heldout = [{"text": " ".join(["one two three"] * 4)}] * 4
    results = bench(original, [other], heldout=heldout, tokenizer=tokenizer(), batches=[1], new_tokens=2, **grid)
    assert results.meta["settings"]["repeats"] == 9
    label = results.meta["models"][1]["label"]
    models = payload(results.table, results.meta)["models"]
    columns = dict(zip(models.columns, models.rows[1][1:], strict=True))
    for phase in PHASES:
        finding = results.headline[f"{phase}_time_ratio {label}"]
        shown = [f"{finding['value']:.3f}", *re.findall(r"interval ([\d.]+) to ([\d.]+)\)", finding["sentence"])[0]]
        assert f"{phase} time" in finding["sentence"]
        assert f": {shown[0]} times the original's" in finding["sentence"]
        assert columns[f"{phase.capitalize()} time"] == "{}× ({} to {})".format(*shown)
        figure = results.figures()["pareto" if phase == "decode" else f"pareto:{phase}"]
        (point,) = [one for one in figure.data if one.mode == "markers" and one.name == label]
        assert [f"{number:.3f}" for number in (point.x[0], *point.customdata[0])] == shown


def losses(gaps, tokens, documents) -> HeldoutLosses:
    sums = {"original": np.zeros(len(gaps)), "other": np.asarray(gaps, dtype=float)}
    return HeldoutLosses(sums, np.asarray(tokens, dtype=float), np.asarray(documents))


def test_one_number_a_document_gives_the_error_of_their_mean() -> None:
    effects = np.random.default_rng(0).normal(0.3, 1, 20)  # every window of a document has its document's loss
    made = losses(np.repeat(effects, 5) * 7, [7] * 100, np.repeat(np.arange(20), 5)).added("other")
    assert made.mean == pytest.approx(effects.mean())
    assert made.error == pytest.approx(scipy.stats.sem(effects))
    assert made.documents == 20
    few = losses([1.0, 2.0, 3.0, 4.0], [5] * 4, np.arange(4) % 2).added("other")
    assert math.isnan(few.error)
    assert not few.measurable
    assert "3 documents" in few.text("original")


@pytest.mark.parametrize(
    ("mean", "error", "documents", "measurable"),
    [
        (0.0201, 0.01, 30, True),
        (0.0199, 0.01, 30, False),
        (-0.0199, 0.01, 30, False),
        (0.03, 0.01, 4, False),  # Student's t of three degrees: 3.18 errors
        (0.04, 0.01, 4, True),
        (0.0, 0.0, 30, False),
    ],
)
def test_the_verdict_is_gated_by_two_errors(mean, error, documents, measurable) -> None:
    assert AddedLoss(mean, error, documents).measurable is measurable
    assert ("no measurable difference" in AddedLoss(mean, error, documents).text("original")) is not measurable
