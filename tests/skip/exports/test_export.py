"""Exports: whole and proven, or not there at all."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.execution import readers
from fulldepth.skip.exports.export import NOTES, export, load
from fulldepth.skip.exports.formats import FORMATS, decilm
from skip import planned

EXPORT = "fulldepth.skip.exports.export"


@pytest.fixture
def unproven(monkeypatch):
    """Exports without the fresh process, for tests of what is written."""
    monkeypatch.setattr(f"{EXPORT}.prove", lambda *_: 0.0)


def ids(batch=2, length=12):
    return torch.randint(3, tiny_models.VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits(model):
    return model(input_ids=ids(), attention_mask=torch.ones_like(ids())).logits


def relative(got, expected):
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, tiny_models.VOCAB)}
    found = Tokenizer(models.WordLevel(words, unk_token="w3"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def prepared(name, blocks, granularity="attention", **options):
    """A model whose stream is larger than eps, its plan, and the logits of the definition in float64."""
    model = tiny_models.build(name, **options)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30.0)
    plan = planned.plan(model, blocks, granularity)
    return model, plan, logits(planned.scaled(model, plan))


PROVEN = [
    ("gpt_neox", "folded", "attention", [1, 2, 3]),
    ("gemma3", "fast", "attention", [1, 3]),
    ("qwen2", "decilm", "attention", [1, 3]),
    ("gemma2", "layer", "layer", [2]),
]


@pytest.mark.slow
def test_a_tokenizer_that_does_not_load_again_drops_the_export(tmp_path):
    model, plan, _ = prepared("llama", [2])
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(b'{"version": "1.0", "model": {}}')
    with pytest.raises(FulldepthError, match="does not load in a fresh process"):
        export(plan, tmp_path / "model", "folded", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "format", "granularity", "blocks"), PROVEN)
def test_every_format_gives_the_plans_logits_in_a_fresh_process(name, format, granularity, blocks, tmp_path):
    model, plan, expected = prepared(name, blocks, granularity)
    before = {n: w.clone() for n, w in model.state_dict().items()}
    report = export(plan, model, format, tmp_path / "made" / "here", tokenizer=tokenizer())
    assert report.path.is_dir()
    assert [path.name for path in report.path.parent.iterdir()] == ["here"]
    assert report.logit_error < 1e-4
    assert report.verified or format == "decilm"
    assert report.bytes == sum(path.stat().st_size for path in report.path.iterdir())
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())
    assert relative(logits(load(report.path)), expected) < 1e-4
    notes = json.loads((report.path / NOTES).read_text())
    assert notes["plan"] == plan.document()
    assert (notes["format"], notes["logit_error"]) == (format, report.logit_error)
    assert AutoTokenizer.from_pretrained(report.path)("w5 w9").input_ids == [5, 9]
    assert (report.path / "generation_config.json").is_file()


@pytest.mark.slow
def test_what_transformers_would_load_without_its_code_is_dropped(tmp_path, monkeypatch):
    """The trap of a stock class: without a type of its own, the fast format would load with attention at random."""
    model, plan, _ = prepared("llama", [2])
    write = FORMATS["fast"].write

    def stock_type(draft):
        notes = write(draft)
        path = draft.folder / "config.json"
        values = json.loads(path.read_text())
        for name in ("auto_map", "layer_types", "skipped_attention", "skipped_mlp", "stream_scale"):
            del values[name]
        path.write_text(json.dumps(values | {"model_type": "llama"}))
        return notes

    monkeypatch.setattr(FORMATS["fast"], "write", stock_type)
    with pytest.raises(readers.NotLoadedError, match="without its code"):
        export(plan, model, "fast", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("name", planned.FAMILIES)
def test_fast_is_exact_whatever_the_norms_eps(name, tmp_path):
    """Streams hardly larger than eps, where folding alone is not: the class's norms follow the scale."""
    model, blocks = tiny_models.build(name), [1, 3]
    plan = planned.plan(model, blocks)
    expected = logits(planned.scaled(model, plan))
    report = export(plan, model, "fast", tmp_path / "out")
    made = load(report.path)
    assert relative(logits(made), expected) < 5e-6
    assert type(made).__name__.startswith("Skipped")
    removed = (
        sum(w.numel() for n, w in model.state_dict().items() if "attn" in n or "attention." in n) / 3 * len(blocks)
    )
    assert report.parameters <= sum(p.numel() for p in model.parameters()) - removed
    stored = load_file(report.path / "model.safetensors")
    assert not any(f".{block - 1}.{part}" in n for n in stored for block in blocks for part in ("self_attn", "attn."))


@pytest.mark.usefixtures("unproven")
def test_a_depth_llama_without_switches_becomes_a_stock_model(tmp_path):
    model, plan, expected = prepared("depth_llama", [2])
    made = load(export(plan, model, "folded", tmp_path / "plain").path)
    assert type(made).__module__.startswith("transformers.")
    assert relative(logits(made), expected) < 1e-5


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_the_layer_format_is_shallower_and_every_list_of_the_configuration_with_it(name, tmp_path):
    model, plan, expected = prepared(name, [2], "layer")
    model.config.layer_thing, model.config.eos_token_id = (
        ["a", "b", "c"],
        [2, 3, 4],
    )  # both as long as the model is deep
    made = load(export(plan, model, "layer", tmp_path / "out").path)
    assert relative(logits(made), expected) < 1e-5
    assert made.config.num_hidden_layers == 2
    assert made.config.layer_thing == ["a", "c"]
    assert made.config.eos_token_id == [2, 3, 4]
    assert len(getattr(made.config, "layer_types", None) or "ab") == 2
    assert made.generate(ids(), max_new_tokens=2, pad_token_id=0).shape[1] <= 14
    assert model.config.num_hidden_layers == 3


PUBLISHED = {
    "attention": {
        *("n_heads_in_group", "no_op", "num_sink_tokens", "replace_with_linear", "sparsify", "unshifted_sink"),
        *("use_prefill_window_in_sink_attention", "window_length"),
    },
    "ffn": {"ffn_mult", "no_op", "replace_with_linear", "sparsify"},
}
"""Names in the published configuration of Llama-3_1-Nemotron-51B."""
LLAMA_NAMES = {
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"),
}


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_decilm_speaks_by_the_published_names(name, tmp_path):
    model, plan, expected = prepared(name, [1, 3])
    report = export(plan, model, "decilm", tmp_path / "out")
    config = json.loads((report.path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("nemotron-nas", ["DeciLMForCausalLM"])
    assert [{part: set(block[part]) for part in block} for block in config["block_configs"]] == [PUBLISHED] * 3
    assert [block["attention"]["no_op"] for block in config["block_configs"]] == [False, False, True]
    assert [block["attention"]["n_heads_in_group"] for block in config["block_configs"]] == [2, 2, None]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["attention_bias"] is (name == "qwen2")
    weights = load_file(report.path / "model.safetensors")
    assert {n.split(".", 3)[3].rpartition(".")[0] for n in weights if ".layers." in n} == LLAMA_NAMES
    assert not any(".2.self_attn" in n or ".2.input_layernorm" in n for n in weights)
    assert not weights[
        "model.layers.0.self_attn.o_proj.weight"
    ].any()  # readers fail on a first layer without attention
    mult = {block["ffn"]["ffn_mult"] for block in config["block_configs"]}
    assert len(mult) == 1
    assert decilm.intermediate_size(mult.pop(), 32) == 256 == weights["model.layers.1.mlp.up_proj.weight"].shape[0]
    assert relative(logits(load(report.path)), expected) < 1e-5
    assert not report.verified
    assert "UNVERIFIED" in report.notes[0]


@pytest.mark.parametrize(("size", "width"), [(256, 8192), (4864, 896), (8960, 1536), (11008, 4096), (18944, 3584)])
def test_every_reader_computes_the_width_that_was_meant(size, width):
    config = tiny_models.build("llama").config
    config.hidden_size = width
    (mult,) = {entry["ffn"]["ffn_mult"] for entry in decilm.block_configs(config, set(), size)}
    for read in (mult, round(mult, 6)):  # mlx-lm rounds
        assert decilm.intermediate_size(read, width) == size


REFUSED = [
    ("llama", "folded", "attention", [2], {}, "exists", "there"),
    ("llama", "fats", "attention", [2], {}, "fast", "out"),
    ("llama", "layer", "attention", [2], {}, "layer", "out"),
    ("llama", "fast", "layer", [2], {}, "fast", "out"),
    ("llama", "decilm", "mlp", [2], {}, "decilm", "out"),
    ("llama", "layer", "layer", [1, 2, 3], {}, "3 layers", "out"),
    ("llama", "folded", "attention", [2], {}, "Cannot write", "file/out"),
    ("gpt2", "layer", "layer", [1], {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse", "out"),
    ("mistral", "decilm", "attention", [2], {}, "mistral", "out"),
    ("llama", "decilm", "attention", [2], {"head_dim": 16}, "head_dim", "out"),
    ("qwen2", "decilm", "attention", [2], {"layer_types": ["sliding_attention"] * 3}, "sliding window", "out"),
    ("llama-classifier", "folded", "attention", [2], {}, "language model", "out"),
]


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(("name", "format", "granularity", "blocks", "options", "words", "target"), REFUSED)
def test_what_cannot_be_is_refused(name, format, granularity, blocks, options, words, target, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("a file")
    model = tiny_models.build(name)
    plan = planned.plan(model, blocks, granularity)
    for option, value in options.items():
        monkeypatch.setattr(model.config, option, value)
    with pytest.raises(FulldepthError, match=words):
        export(plan, model, format, tmp_path / target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_plans_of_other_models_and_scalars_that_do_not_fold_are_refused(tmp_path):
    model, values = tiny_models.build("llama"), planned.scalars([2])
    values["1"]["s_mlp"] = -0.1
    for plan in (planned.plan(tiny_models.build("llama", seed=3), [2]), planned.plan(model, [2], values=values)):
        with pytest.raises(FulldepthError, match=r"another LlamaForCausalLM|s_mlp of layer 1"):
            export(plan, model, "fast", tmp_path / "deep" / "er" / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    model = tiny_models.build("llama")
    target = tmp_path / "out"
    monkeypatch.setattr(f"{EXPORT}.prove", lambda *_: target.mkdir() or 0.0)
    with pytest.raises(FulldepthError, match="exists already"):
        export(planned.plan(model, [2]), model, "folded", target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list(target.iterdir())


def test_a_full_disk_leaves_nothing_and_is_said(tmp_path):
    """The system refuses to write more than 20,000 bytes into any file."""
    model = tiny_models.build("llama")
    plan, limits = planned.plan(model, [2]), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(FulldepthError, match=r"Cannot write the export to .*out: .*[Ff]ile too large"):
            export(plan, model, "fast", tmp_path / "new" / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())


def test_a_terminated_export_leaves_no_folder_and_no_process(tmp_path, monkeypatch):
    """The command line raises SystemExit on SIGTERM; the fresh process that reads the export ends, too."""
    model, number = tiny_models.build("llama"), tmp_path / "number"
    reader = tmp_path / "reader"
    reader.write_text(f"#!/bin/sh\necho $$ > {number}.part; mv {number}.part {number}; exec sleep 100")
    reader.chmod(0o755)
    monkeypatch.setattr(readers, "sys", SimpleNamespace(executable=str(reader)))

    def terminate():
        while not number.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    def leave(*_):
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        threading.Thread(target=terminate).start()
        with pytest.raises(SystemExit):
            export(planned.plan(model, [2]), model, "folded", tmp_path / "new" / "out")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {path.name for path in tmp_path.iterdir()} == {"reader", "number"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


BROKEN = [
    (None, "is not an export"),
    ({"schema_version": 9}, "schema_version"),
    ("{", "fulldepth_skip"),
    ({"notes": None}, "notes"),
    ({"format": "decilmm"}, "'decilm'"),
    ({"plan": {"blocks": []}}, "blocks"),
    ({}, r"config\.json"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_load_wants_an_export(change, words, tmp_path):
    notes = {"schema_version": 1, "format": "decilm", "logit_error": 0.0, "parameters": 1, "verified": True}
    notes |= {"notes": [], "versions": {}, "plan": planned.plan(tiny_models.build("llama"), [2]).document()}
    if change is not None:
        text = change if isinstance(change, str) else json.dumps(notes | change)
        (tmp_path / NOTES).write_text(text)
    with pytest.raises(FulldepthError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(("blocks", "said"), [([2], True), ([3], False)])
def test_layers_that_no_longer_follow_the_period_are_named(blocks, said, tmp_path, unproven):
    model = tiny_models.build("gemma2")  # sliding, full, sliding
    notes = export(planned.plan(model, blocks, "layer", values=None), model, "layer", tmp_path / "out").notes
    assert any("another model without an error" in note for note in notes) is said
