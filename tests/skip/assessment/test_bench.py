"""Benchmarks: bytes by shapes and files, logits without a cache, losses by stock passes."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from fulldepth.skip.assessment.bench_entries import open_entries
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples, read_examples
from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import Runner, Trial
from fulldepth.execution.memory import cache_bytes
from fulldepth.figures.benchmark import benchmarked_models
from fulldepth.figures.skip_results import parts
from fulldepth.hf import anatomy_candidates, skipping
from fulldepth.results import Results
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.assessment.bench import bench
from fulldepth.skip.exports.export import export
from skip import plain
from skip.planned import plan
from skip.word_tokenizer import tokenizer
from tiny_models import LAYERS, VOCAB, build

SMALL = {"batches": [2], "contexts": [12], "new_tokens": 3, "repeats": 2}
KV = 2 * 2 * 8 * 4
"""Bytes of a token's keys and values in one layer of the tiny Llama: two, of 2 heads of 8 float32 numbers."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
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
    first, *others = open_entries(names, BenchSettings(dtype="bfloat16"))
    frequencies = first.model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    for entry in others:
        assert entry.model.dtype == torch.bfloat16
        assert torch.equal(entry.model.model.rotary_emb.inv_freq, frequencies)
    assert [sorted(entry.skipped_blocks.layers) for entry in others] == [[], [1, 3], [3]]
    names = others[-1].model.state_dict()
    assert [f"model.layers.{index}.self_attn.o_proj.weight" in names for index in range(3)] == [True, True, False]


def test_differences_are_to_the_original(found) -> None:
    table = found.table
    base = table[table.model == "original"].set_index(["measure", "site", "statistic", "batch", "context"])["value"]
    assert table[table.model == "original"]["difference"].isna().all()
    for _, row in table[table.model == "fast"].iterrows():
        key = (row.measure, row.site, row.statistic, row.batch, row.context)
        expected = row["value"] - base[key] if key in base.index else float("nan")
        assert row.difference == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("skipped_blocks", [(), (1,), (1, 2, 3)])
def test_decoding_stands_at_the_right_positions(family, skipped_blocks) -> None:
    model = build(family)
    ids = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), skipping(anatomy_candidates(model)[0], skipped_blocks):
        expected = model(input_ids=ids, use_cache=False).logits[:, -1]
        got = Runner(model).run(ids, 12).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("family", "heads", "width"), [("llama", 2, 8), ("gpt2", 4, 8), ("gpt_neox", 4, 8)])
def test_cache_bytes_follow_from_shapes(family, heads, width) -> None:
    ids = torch.randint(3, VOCAB, (3, 14))
    held = cache_bytes(Runner(build(family)).run(ids, 10).cache)
    assert held == 2 * LAYERS * 3 * 14 * heads * width * 4


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
        part = runs[start : start + 12]  # memory and cache of two models, a warm-up and three rounds of two
        assert {shape for _, shape, _ in part} == {(batch, 7)}
        turns = [[(first, context) for first, _, context in part[n : n + 2]] for n in range(4, 12, 2)]
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"contexts": [62]}, "exceed the model's 64 positions"),
        ({"repeats": 0}, "repeats"),
        ({"batches": []}, "batches"),
        ({"round": 3}, "round"),
    ],
)
def test_nonsense_is_refused(options, words) -> None:
    model = build("llama")
    with pytest.raises(FulldepthError, match=words):
        bench(model, [model], **{**SMALL, **options})


def test_models_that_cannot_be_compared_are_refused(folders) -> None:
    model = build("llama")
    with pytest.raises(FulldepthError, match="one export or more"):
        bench(model, [])
    with pytest.raises(FulldepthError, match="one export or more"):
        bench(model, folders / "fast")
    with pytest.raises(FulldepthError, match="no causal language model"):
        bench(build("bert"), [model])
    bigger = build("llama")
    bigger.resize_token_embeddings(VOCAB + 4)
    with pytest.raises(FulldepthError, match="not the same model"):
        bench(model, [bigger], **SMALL)
    with pytest.raises(FulldepthError, match="No such folder"):
        bench(model, ["/no/such/folder"])


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
        assert rows["difference"]["mean"] == pytest.approx(rate, rel=1e-4)
        assert rows["value"]["difference_stderr"] == pytest.approx(error, rel=1e-4)
        assert rows["count"]["difference_stderr"] == len(by_group) == 4
        finding = results.headline[f"loss_added {name}"]
        assert finding["standard_error"] == pytest.approx(error, rel=1e-4)
        # four documents: Student's t of three degrees
        said = f"{rate:+.4f} against original" if abs(rate) > scipy.stats.t(3).ppf(0.975) * error else "no measurable"
        assert said in finding["sentence"]
    assert abs(value(results, "loss", "fast", "mean") - value(results, "loss", "original", "mean")) > 1e-4
    assert results.meta["data"]["hash"] == examples.meta["hash"]
    shown = {one.name: one for one in benchmarked_models(parts(results.table, results.meta))}
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
    shown = {one.name: one for one in benchmarked_models(parts(found.table, found.meta))}
    assert shown["fast"].stated
    assert (shown["fast"].loss, shown["fast"].base) == (1.0, 1.0)
