"""Benchmarks: bytes by shapes and files, logits without a cache, losses by stock passes, verdicts by closed forms."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from data.conftest import jsonl
from families import zoo
from fulldepth.core.uncertainty import mean_difference
from fulldepth.data.batches import Example
from fulldepth.data.examples import read_examples
from fulldepth.execution.latency import OtherLoad, Runner
from fulldepth.hf import anatomy_candidates, skipping
from fulldepth.hf.caches import CACHE
from fulldepth.results import Results
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.bench import CallTimes, _headline, _opened, bench
from fulldepth.skip.exports.export import export
from fulldepth.skip.plan import HEALED, listing
from fulldepth.skip.timed import Cell
from json_files import change_json
from refusals import refused
from skip import plain
from skip.planned import plan
from skip.word_tokenizer import tokenizer, words
from tiny_models import LAYERS, VOCAB, build, token_ids

SMALL = {"batches": [2], "contexts": [12], "max_new_tokens": 3, "repeats": 1}
NAMES = ("original", "folded", "fast")
KV = 2 * 2 * 8 * 4
"""Bytes of a token's keys and values in one layer of the tiny Llama: two, of 2 heads of 8 float32 numbers."""


@pytest.fixture(scope="module", autouse=True)
def unproven():
    """Exports are not loaded in a fresh process: their own tests do that."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fulldepth.skip.exports.export.prove_export", lambda *_: 0.0)
        yield


@pytest.fixture(scope="module")
def folders(unproven, tmp_path_factory):
    """A checkpoint, and what formats make of it without the attention of layers 1 and 3."""
    root = tmp_path_factory.mktemp("bench")
    build("llama").save_pretrained(root / "original")
    model = AutoModelForCausalLM.from_pretrained(root / "original").eval()
    for format in ("folded", "fast", "decilm"):
        export(plan(model, [3, 1], values=None), model, format, root / format, tokenizer=tokenizer())
    return root


def value(results, measure, model, statistic="value"):
    return results.table.query("measure == @measure and model == @model and statistic == @statistic").value.item()


def test_bytes_are_those_of_files_and_shapes_and_the_folder_says_what_was_compared(folders, monkeypatch):
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    found = bench(folders / "original", [folders / "folded", folders / "fast"], folders / "out", **SMALL)
    for name in NAMES:
        stored = [load_file(path) for path in (folders / name).glob("*.safetensors")]
        size = sum(tensor.nbytes for tensors in stored for tensor in tensors.values())
        assert value(found, "parameter_bytes", name) == size
        assert value(found, "kv_bytes_per_token", name) == KV * (1 if name == "fast" else LAYERS)
        assert value(found, "peak_memory", name) > size + 2 * 15 * KV
    assert value(found, "peak_memory", "fast") < value(found, "peak_memory", "original")
    again = Results.load(folders / "out")
    assert_frame_equal(again.table, found.table)
    assert again.meta["settings"] | SMALL == again.meta["settings"]
    assert again.meta["warnings"] == ["folded (format folded) computes its removed blocks, so no time is saved."]
    entries = again.meta["models"]
    described = [(one["label"], one["baseline"], one["granularity"], one["blocks"]) for one in entries]
    assert described == [
        ("original", True, None, None),
        ("folded", False, "attention", [3, 1]),
        ("fast", False, "attention", [3, 1]),
    ]
    assert set(again.headline) == {f"{p}_time_ratio {n}" for p in ("prefill", "decode") for n in NAMES[1:]}


def test_exports_are_loaded_as_the_original_is(folders):
    """In bfloat16 rotary frequencies stay float32; DeciLM's first layer keeps its attention, as its modules show."""
    exports = [folders / name for name in (*NAMES[1:], "decilm")]
    first, *others = _opened(folders / "original", exports, BenchSettings(dtype="bfloat16"))
    frequencies = first.model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    for entry in others:
        assert entry.model.dtype == torch.bfloat16
        assert torch.equal(entry.model.model.rotary_emb.inv_freq, frequencies)
    names = others[-1].model.state_dict()
    assert [f"model.layers.{index}.self_attn.o_proj.weight" in names for index in range(3)] == [True, True, False]


@pytest.mark.parametrize(("family", "skipped_blocks"), [("gpt2", (1,)), ("gemma2", (1, 2, 3))])
@torch.no_grad()
def test_decoding_stands_at_the_right_positions(family, skipped_blocks):
    model = build(family)
    ids = token_ids(2, 17, seed=3)
    with skipping(anatomy_candidates(model)[0], skipped_blocks):
        expected = model(input_ids=ids, use_cache=False).logits[:, -1]
        got = Runner(model).run(ids, 12).logits
    assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_loaded_models_say_what_makes_a_comparison_unfair(folders, tmp_path, monkeypatch):
    other, fast = build("llama", seed=5).train(), AutoModelForCausalLM.from_pretrained(folders / "fast")
    results = bench(other, [fast.eval(), folders / "fast", build("llama", dtype=torch.bfloat16)], **SMALL)
    assert other.training
    remarks = ("was made from other weights", "computes in torch.bfloat16")
    assert len(results.meta["warnings"]) == 2
    assert all(remark in line for remark, line in zip(remarks, results.meta["warnings"], strict=True))
    monkeypatch.setattr(OtherLoad, "share", lambda _: 0.7)
    busy = bench(other, [folders / "fast"], tmp_path / "busy", **SMALL)
    assert "times" in busy.headline
    assert "next" not in busy.meta  # no command names a loaded model


def test_warnings_of_loading_name_the_model_that_they_are_about(folders, tmp_path):
    """A Llama's layer has nine weights: the original's configuration leaves out one, and an export has one too many."""
    shutil.copytree(folders / "original", tmp_path / "original")
    change_json(tmp_path / "original" / "config.json", num_hidden_layers=LAYERS - 1)
    shutil.copytree(folders / "fast", tmp_path / "fast")
    weights = tmp_path / "fast" / "model.safetensors"
    save_file({**load_file(weights), "spare": torch.ones(1)}, weights, {"format": "pt"})
    warnings = bench(tmp_path / "original", [folders / "original", tmp_path / "fast"], **SMALL).meta["warnings"]
    beginnings = [line.split(" (first: ")[0] for line in warnings if "holds" in line]
    unused = "The checkpoint holds {} weights that the model does not use"
    labels = (f"{tmp_path.name}/original", f"{tmp_path.name}/fast")
    assert beginnings == [f"{label}: {unused.format(number)}" for label, number in zip(labels, (9, 1), strict=True)]


def bigger():
    model = build("llama")
    model.resize_token_embeddings(VOCAB + 4)
    return model


@pytest.mark.parametrize(
    ("original", "exports", "options", "named"),
    [
        ("llama", [build("llama")], {"contexts": [62]}, "64 positions"),
        ("llama", [build("llama")], {"batches": []}, "batches"),
        ("llama", [build("llama")], {"round": 3}, "round"),
        ("llama", [build("llama")], {"max_sequences": 3}, "--max-sequences has no effect without --data or --heldout"),
        ("llama", [], {}, "one export"),
        ("llama", build("llama"), {}, "one export"),
        ("bert", [build("llama")], {}, "causal language model"),
        ("llama", [bigger()], {}, "vocabulary"),
        ("llama", [zoo.build("openai-gpt", "causal-lm")], {}, "OpenAIGPTLMHeadModel gives no cache"),
        ("llama", ["/no/such/folder"], {}, "/no/such/folder"),
    ],
)
def test_what_is_refused(original, exports, options, named):
    with refused(named):
        bench(build(original), exports, **{**SMALL, **options})


@pytest.mark.skipif(CACHE != "cache", reason="before transformers 5.24 Mamba's cache has another name")
def test_a_model_of_recurrent_states_is_timed_and_keeps_no_keys_and_values(monkeypatch):
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    mamba = zoo.build("mamba", "causal-lm")
    results = bench(mamba, [mamba], **SMALL | {"repeats": 5})
    assert set(results.table[results.table.measure == "kv_bytes_per_token"].value) == {0.0}
    seconds = results.table[results.table.measure.str.contains("decode")].value
    assert len(seconds)
    assert (seconds > 0).all()


def test_losses_are_those_of_stock_passes_on_the_same_sequences(folders):
    held = [Example(one.input_ids, one.labels, n // 3) for n, one in enumerate(plain.sentences(11, 5))]
    examples = plain.held_out(held, name="sentences", kind="pairs", warnings=[])
    exports = [folders / name for name in NAMES[1:]]
    results = bench(folders / "original", exports, data=examples, batch_size=4, **SMALL)
    assert results.meta["data"]["hash"] == examples.meta["hash"]
    tokens, documents = (np.array([getattr(one, name) for one in held]) for name in ("predicted", "document"))
    losses, every = results.table[results.table.measure == "loss"], {}
    for name in NAMES:
        options = {"dtype": torch.float64, "trust_remote_code": name == "fast"}
        model = AutoModelForCausalLM.from_pretrained(folders / name, **options)
        sums = np.array([plain.loss(model, [one], (), "attention") * one.predicted for one in held])
        every[name] = sums
        rows = losses[losses.model == name].set_index("statistic")
        assert rows["value"]["mean"] == pytest.approx(sums.sum() / tokens.sum(), rel=1e-6)
        assert rows["count"]["mean"] == tokens.sum()
        if name != "original":
            gap, finding = (
                mean_difference(sums - every["original"], tokens, documents, 11),
                results.headline[f"loss_added {name}"],
            )
            assert finding["standard_error"] == pytest.approx(gap.standard_error, rel=1e-4)
            assert rows["value"]["difference_stderr"] == finding["standard_error"]
            assert rows["count"]["difference_stderr"] == gap.documents == 4
            assert ("no measurable" not in finding["sentence"]) == gap.measurable


def test_losses_are_read_from_files_as_a_search_reads_them(folders, tmp_path):
    texts = [" ".join(f"w{(7 * row + 3 * at) % 80}" for at in range(9 + row)) for row in range(10)]
    file = str(jsonl(tmp_path / "data.jsonl", *({"text": text} for text in texts)))
    tokenizer().save_pretrained(tmp_path / "words")
    searched = read_examples(file, tokenizer(), 64, sequence_length=8, limit=14)
    original = AutoModelForCausalLM.from_pretrained(folders / "original").eval()
    made = plan(original, [1], values=None, data={"hash": searched.meta["hash"]}, search="greedy")
    fast = export(made, original, "fast", tmp_path / "fast", tokenizer=tokenizer()).path
    given = {**SMALL, "tokenizer": str(tmp_path / "words"), "sequence_length": 8}
    results = bench(folders / "original", [fast], data=file, max_sequences=14, **given)
    expected = plain.loss(original, searched.heldout, (), "attention")
    assert value(results, "loss", "original", "mean") == pytest.approx(expected, rel=1e-6)
    assert "Measured on the text that chose the blocks" in results.headline["loss_added fast"]["sentence"]


def test_a_fifth_of_the_data_is_that_of_the_search_unless_the_settings_say_otherwise(folders, tmp_path):
    """Losses are those of stock passes over the rows that `read_examples` holds out for the search's settings."""
    texts = [" ".join(f"w{(7 * row + 3 * at) % 80}" for at in range(9 + row)) for row in range(10)]
    file = str(jsonl(tmp_path / "data.jsonl", *({"text": text} for text in texts)))
    original = AutoModelForCausalLM.from_pretrained(folders / "original").eval()
    read = {"seed": 3, "sequence_length": 8}
    searched = read_examples(file, tokenizer(), 64, limit=14, **read)
    entirely = read_examples(file, tokenizer(), 64, seed=0, sequence_length=8)
    noted = {"settings": {**read, "max_sequences": 14}}
    given = {**SMALL, "tokenizer": tokenizer(), "data": file}
    own_heldout = {**searched.meta, "heldout": {"name": "other.jsonl"}}
    cases = {
        "searched": (searched.meta, {}, searched),
        "given": (searched.meta, {"seed": 0, "max_sequences": None}, entirely),
        "heldout": (own_heldout, {}, entirely),
    }
    for name, (data, options, expected) in cases.items():
        made = plan(original, [1], values=None, data=data, search="greedy")
        made = made.changed(cost={**made.cost, **noted})
        fast = export(made, original, "fast", tmp_path / name, tokenizer=tokenizer()).path
        results = bench(folders / "original", [fast], **given, **options)
        loss = results.table.query("measure == 'loss' and model == 'original' and statistic == 'mean'")
        assert loss["count"].item() == sum(row.predicted for row in expected.heldout), name
        assert loss["value"].item() == pytest.approx(plain.loss(original, expected.heldout, (), "attention"), rel=1e-6)
        assert results.meta["settings"]["seed"] == (3 if name == "searched" else 0)


def test_rows_are_read_as_the_plan_read_them_or_it_is_said_that_they_may_be_known(folders, tmp_path):
    original = AutoModelForCausalLM.from_pretrained(folders / "original").eval()
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(words(*((7 * n + i * i) % 80 for i in range(60))) for n in range(12)))
    read = {"seed": 0, "sequence_length": 10}
    chosen = read_examples(None, tokenizer(), 64, heldout=str(text), **read)
    rows = {**listing(chosen.heldout), **chosen.meta, "hash": "sha256:" + "1" * 64}
    made = plan(original, [1], values=None, search="greedy", data=rows)
    made = made.changed(cost={**made.cost, "settings": read})
    older = made.changed(data={name: value for name, value in made.data.items() if name != "heldout_documents"})
    given = {**SMALL, "tokenizer": tokenizer(), "heldout": str(text)}
    known, unknown = "Measured on the text that chose the blocks", "also chose the blocks: rows of 10 tokens did"
    for name, plan_made, expected in (("fast", made, known), ("older", older, unknown)):
        fast = export(plan_made, original, "fast", tmp_path / name, tokenizer=tokenizer()).path
        results = bench(folders / "original", [fast], **given)
        assert known in results.headline[f"loss_added {name}"]["sentence"]
        other = bench(folders / "original", [fast], sequence_length=12, **given)
        assert expected in " ".join([other.headline[f"loss_added {name}"]["sentence"], *other.meta["warnings"]])


def test_rows_that_healed_a_model_are_left_out_and_another_tokenizer_is_refused(folders, tmp_path):
    original = AutoModelForCausalLM.from_pretrained(folders / "original").eval()
    held = plain.sentences(9, 5)
    healed = plan(original, [1], values=None, data={"hash": "sha256:" + "1" * 64, **listing(held[:4], HEALED)})
    fast = export(healed, original, "fast", tmp_path / "fast", tokenizer=tokenizer()).path
    results = bench(folders / "original", [fast], data=plain.held_out(held), **SMALL)
    expected = plain.loss(original, held[4:], (), "attention")
    assert value(results, "loss", "original", "mean") == pytest.approx(expected, rel=1e-6)
    assert "4 of 9 held-out rows healed one of the models, and are left out." in results.meta["warnings"]
    with refused("4 of 4 held-out rows healed"):
        bench(folders / "original", [fast], data=plain.held_out(held[:4]), **SMALL)

    words = (fast / "tokenizer.json").read_text()
    (fast / "tokenizer.json").write_text(words.replace('"w7"', '"x"').replace('"w8"', '"w7"').replace('"x"', '"w8"'))
    file = jsonl(tmp_path / "data.jsonl", *({"text": " ".join(["w7", "w3"] * 9)} for _ in range(4)))
    with refused("fast has another tokenizer: it .* other ids than the given tokenizer. Give that of the exports"):
        bench(folders / "original", [fast], heldout=str(file), tokenizer=tokenizer(), **SMALL)


CELL, OTHER = Cell(1, 8), Cell(4, 8)


def timed(own, load=0.0):
    """Two models, timed in one cell; the original takes 10 s in every round."""
    times = {
        (n, CELL, p): s for n, s in (("original", [10.0] * len(own)), ("other", own)) for p in ("prefill", "decode")
    }
    return CallTimes(dict.fromkeys(("original", "other"), "transformers"), {}, times, {CELL: load})


def ratios(measured):
    rows = measured.table()
    rows = rows[rows.batch.isna()].query("measure == 'time_ratio' and site == 'decode'")
    return rows.set_index("statistic").value.to_dict()


NINE = [8.0, 8.2, 8.4, 8.6, 8.8, 9.0, 9.2, 9.4, 20.0]


def test_a_ratio_is_the_median_of_rounds_with_the_interval_of_its_order_statistics():
    measured = timed(NINE)
    # the second smallest and the second largest of nine: 1 - 2 (1 + 9) / 512 = 0.961
    assert ratios(measured) == pytest.approx({"median": 0.88, "low": 0.82, "high": 0.94})
    assert "0.880" in measured.ratio_text("other", "decode")
    for seconds in (
        [9.0, 9.2, 9.3, 9.4, 9.6, 9.8, 10.0, 10.1, 10.2],
        [9.8, 9.9, 10.0, 10.1, 10.2, 10.3, 10.4, 10.8, 12],
    ):
        text = f"no measurable difference from the original (at most {max(10 - seconds[1], seconds[7] - 10) / 10:.1%})"
        assert timed(seconds).ratio_text("other", "decode") == text
    measured.other_load[OTHER] = 0.0
    for name, seconds in (("original", 1.0), ("other", 0.9)):  # a round of a grid: the geometric mean of its cells
        measured.times[name, CELL, "prefill"] = [seconds] * 9
        measured.times[name, OTHER, "prefill"] = [5 * seconds**3] * 9
    assert measured.ratio("other", "prefill") == pytest.approx([0.9**2] * 3)


def test_few_rounds_and_a_busy_machine_give_no_verdict():
    assert "9 rounds" in timed(NINE[:8]).ratio_text("other", "decode")
    assert set(ratios(timed(NINE[:8]))) == {"median"}
    busy = timed(NINE, load=0.35)
    assert not ratios(busy)
    ((name, finding),) = _headline([SimpleNamespace(label=name) for name in busy.programs], busy, None)
    assert (name, finding.value) == ("times", None)
    assert finding.sentence.startswith("Not timed: other programs used 35 % of the processor.")
