"""Exports: whole and proven, or not there at all."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import threading
import time
import warnings
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import tiny_models
from families import zoo
from fulldepth import exit
from fulldepth.architectures import TESTED_TRANSFORMERS
from fulldepth.execution import find_anatomy, readers
from fulldepth.hf import skipping
from fulldepth.hf.checkpoint_folder import check_disk_space
from fulldepth.skip.exports import export as exporting
from fulldepth.skip.exports.export import NOTES, export, load
from fulldepth.skip.exports.formats import FORMATS, as_stock, decilm
from fulldepth.skip.exports.formats.format import misread_without
from fulldepth.skip.heal import heal
from fulldepth.skip.least_squares import format_for, refit
from json_files import read_json, write_json
from refusals import refused
from skip import planned
from skip.word_tokenizer import checkpoint, tokenizer


def ids(batch=2, length=12):
    return tiny_models.token_ids(batch, length, seed=2)


@torch.no_grad()
def logits(model):
    return model(input_ids=ids(), attention_mask=torch.ones_like(ids())).logits


def relative(got, expected):
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def prepared(name, blocks, granularity="attention", **options):
    """A model whose stream is larger than eps, its plan, and the logits of the definition in float64."""
    model = tiny_models.build(name, **options)
    model.get_input_embeddings().weight.data.mul_(30.0)
    plan = planned.plan(model, blocks, granularity)
    return model, plan, logits(planned.scaled(model, plan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format", "granularity", "blocks"),
    [
        ("gpt_neox", "folded", "attention", [1, 2, 3]),
        ("gemma3", "fast", "attention", [1, 3]),
        ("qwen2", "decilm", "attention", [1, 3]),
        ("gemma2", "fast", "layer", [2]),
        ("gemma2", "layer", "layer", [3]),
    ],
)
def test_every_format_gives_the_plans_logits_in_a_fresh_process(name, format, granularity, blocks, tmp_path):
    model, plan, expected = prepared(name, blocks, granularity)
    before = copy.deepcopy(model.state_dict())
    report = export(plan, model, format, tmp_path / "made" / "here", tokenizer=tokenizer())
    assert [path.name for path in report.path.parent.iterdir()] == ["here"]
    assert report.logit_error < 1e-4
    assert report.verified or format == "decilm"
    assert report.bytes == sum(path.stat().st_size for path in report.path.iterdir())
    assert tiny_models.same_weights(model, before)
    assert relative(logits(load(report.path)), expected) < 1e-4
    notes = read_json(report.path / NOTES)
    assert (notes["plan"], notes["format"], notes["logit_error"]) == (plan.document(), format, report.logit_error)
    assert AutoTokenizer.from_pretrained(report.path)("w5 w9").input_ids == [15, 19]
    assert (report.path / "generation_config.json").is_file()
    if format == "fast":
        stored = load_file(report.path / "model.safetensors")
        assert not any(f".{block - 1}.self_attn" in name for name in stored for block in blocks)


@pytest.mark.slow
def test_what_a_fresh_process_does_not_load_is_dropped(tmp_path, monkeypatch):
    """The trap of a stock class: without a type of its own, the fast format would load with attention at random."""
    model, plan, _ = prepared("llama", [2])
    write = FORMATS["fast"].write

    def stock_type(draft):
        notes, path = write(draft), draft.folder / "config.json"
        own = {"auto_map", "layer_types", "skipped_attention", "skipped_mlp", "stream_scale"}
        values = {name: value for name, value in read_json(path).items() if name not in own}
        write_json(path, values | {"model_type": "llama"})
        return notes

    monkeypatch.setattr(FORMATS["fast"], "write", stock_type)
    with pytest.raises(readers.NotLoadedError):
        export(plan, model, "fast", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unproven")
def test_a_depth_llama_without_switches_becomes_a_stock_model(tmp_path):
    model, plan, expected = prepared("depth_llama", [2])
    made = load(export(plan, model, "folded", tmp_path / "plain").path)
    assert type(made).__module__.startswith("transformers.")
    assert relative(logits(made), expected) < 1e-5


def test_scaled_norms_become_gains_of_a_stock_model(tmp_path):
    """The factor multiplies the gain in both, so logits are equal to the bit; also proven in a fresh process."""
    model, plan, expected = prepared("depth_llama-scaled", [2])
    stock = as_stock(model)
    assert type(stock) is LlamaForCausalLM
    assert torch.equal(logits(stock), logits(model))
    gains = (each.model.layers[2].input_layernorm.weight for each in (stock, model))
    assert torch.equal(next(gains), next(gains) * 3**-0.5)
    report = export(plan, model, "folded", tmp_path / "plain")
    assert report.verified
    assert relative(logits(load(report.path)), expected) < 1e-5


@pytest.mark.parametrize("name", ["tree", "hyper", "static", "dynamic", "kv"])
def test_a_depth_llama_that_no_stock_class_computes_is_folded_in_its_own_class(name, tmp_path, monkeypatch):
    """Against a copy with zeros in the last matrices, in float64; a fresh process reads one with the folder's code."""
    model = tiny_models.build(f"depth_llama-{name}", dtype=torch.float64)
    plan, expected = planned.plan(model, ["attention 1", "mlp 3"], "any", None), copy.deepcopy(model)
    expected.model.layers[0].self_attn.o_proj.weight.data.zero_()
    expected.model.layers[2].mlp.down_proj.weight.data.zero_()
    for format in FORMATS.keys() - {"folded"}:
        with refused("Use --format folded"):
            export(plan, model, format, tmp_path / f"other{FORMATS[format].suffix or ''}")
    if name != "kv":
        monkeypatch.setattr(exporting, "prove_export", lambda *_: 0.0)
    report = export(plan, model, "folded", tmp_path / "out")
    assert report.logit_error < 1e-6
    assert "fulldepth.skip.load" in (report.path / "README.md").read_text()
    made = load(report.path)
    assert type(made) is type(model)
    assert made.config.switches == model.config.switches
    assert tiny_models.same_weights(made, expected)
    assert relative(logits(made), logits(expected)) < 1e-12
    with skipping(find_anatomy(model), plan.removed, "any"):
        assert relative(logits(model), logits(made)) < 1e-12
    with refused("cannot be healed: .*--format folded"):
        refit(plan, model, [])


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(("name", "block", "counted"), [("gemma2", 2, True), ("gemma2", 3, False), ("gpt2", 2, True)])
def test_the_layer_format_is_shallower_and_every_list_of_the_configuration_with_it(name, block, counted, tmp_path):
    model, plan, expected = prepared(name, [block], "layer")
    model.config.layer_thing, model.config.eos_token_id = ["a", "b", "c"], [2, 3, 4]  # as long as the model is deep
    # Without the last one, lists still follow the period of the original (Gemma 2: sliding, full, sliding).
    if counted:
        with refused("llama.cpp and mlx-lm count .* another model without an error.* --by-list"):
            export(plan, model, "layer", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    report = export(plan, model, "layer", tmp_path / "out", by_list=counted)
    made = load(report.path)
    assert relative(logits(made), expected) < 1e-5
    assert made.config.num_hidden_layers == 2
    assert made.config.layer_thing == [letter for number, letter in enumerate("abc", start=1) if number != block]
    assert made.config.eos_token_id == [2, 3, 4]
    assert len(getattr(made.config, "layer_types", None) or "ab") == 2
    assert made.generate(ids(), max_new_tokens=2, pad_token_id=0).shape[1] <= 14
    assert model.config.num_hidden_layers == 3
    warning = "WARNING: What a layer computes would no longer follow from its number"
    assert report.notes[0].startswith(warning) is counted
    card = (report.path / "README.md").read_text().split("---\n")[-1]
    assert card.split("\n\n")[1].startswith(f"**{warning}") is counted


def test_healing_takes_a_format_that_no_program_misreads():
    for block, format in ((2, "fast"), (3, "layer")):
        model, plan, _ = prepared("gemma2", [block], "layer")
        assert format_for(plan, model) == format


@pytest.mark.parametrize(("depth", "words"), [(46, "number of layers of a gemma2 .* 45 instead of 46"), (44, None)])
def test_layers_whose_attention_llama_cpp_takes_from_their_count(depth, words):
    config = AutoConfig.for_model("gemma2", **tiny_models.PLAIN | {"num_hidden_layers": depth, "head_dim": 8})
    anatomy = find_anatomy(AutoModelForCausalLM.from_config(config))
    said = misread_without(anatomy, range(1, depth))
    assert said is None if words is None else re.search(words, said)


EXPERTS = {
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {
        **{"first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8},
        **{"moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
}


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("family", EXPERTS)
def test_layers_that_the_configuration_names_by_number_are_renumbered(family, tmp_path):
    options = tiny_models.DECODER | {"num_hidden_layers": 6, "num_experts_per_tok": 2} | EXPERTS[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).eval()
    shorter = copy.deepcopy(model)
    for layer in (4, 2):
        del planned.layers(shorter)[layer - 1]
    shorter.config.num_hidden_layers = 4
    with torch.no_grad():
        expected = shorter(input_ids=ids(), use_cache=False).logits
    made = load(export(planned.plan(model, [2, 4], "layer", values=None), model, "layer", tmp_path / "out").path)
    assert relative(logits(made), expected) < 1e-6
    if family == "qwen3_moe":  # layers 1, 3, 5, 6 are left, with experts in 6 alone
        assert (made.config.decoder_sparse_step, made.config.mlp_only_layers) == (1, [0, 1, 2])
    else:
        assert made.config.first_k_dense_replace == 1


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
def test_decilm_speaks_by_the_published_names_also_when_saved_again(name, tmp_path):
    model, plan, expected = prepared(name, [1, 3])
    report = export(plan, model, "decilm", tmp_path / "out")
    config = read_json(report.path / "config.json")
    assert (config["model_type"], config["architectures"]) == ("nemotron-nas", ["DeciLMForCausalLM"])
    blocks = config["block_configs"]
    assert [{part: set(block[part]) for part in block} for block in blocks] == [PUBLISHED] * 3
    assert [block["attention"]["no_op"] for block in blocks] == [False, False, True]
    assert [block["attention"]["n_heads_in_group"] for block in blocks] == [2, 2, None]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["attention_bias"] is (name == "qwen2")
    weights = load_file(report.path / "model.safetensors")
    assert {n.split(".", 3)[3].rpartition(".")[0] for n in weights if ".layers." in n} == LLAMA_NAMES
    assert not any(".2.self_attn" in n or ".2.input_layernorm" in n for n in weights)
    first = weights["model.layers.0.self_attn.o_proj.weight"]  # readers fail on a first layer without attention
    assert not first.any()
    (mult,) = {block["ffn"]["ffn_mult"] for block in blocks}
    assert decilm.intermediate_size(mult, 32) == 256 == weights["model.layers.1.mlp.up_proj.weight"].shape[0]
    made = load(report.path)
    assert relative(logits(made), expected) < 1e-5
    assert not report.verified
    assert report.notes[0] == decilm.CHECKED  # by programs that read this layout: it must not change without them
    made.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(made))


@pytest.mark.parametrize(("size", "width"), [(256, 8192), (4864, 896), (8960, 1536), (11008, 4096)])
def test_every_reader_computes_the_width_that_was_meant(size, width):
    config = tiny_models.build("llama").config
    config.hidden_size = width
    (mult,) = {entry["ffn"]["ffn_mult"] for entry in decilm.block_configs(config, set(), size)}
    for read in (mult, round(mult, 6)):  # mlx-lm rounds
        assert decilm.intermediate_size(read, width) == size


@pytest.mark.usefixtures("unproven")
def test_tokenizer_and_precision_are_those_of_the_search(tmp_path):
    model = tiny_models.build("llama")
    source, words = tmp_path / "runs" / "checkpoint", tmp_path / "words"
    model.save_pretrained(source)
    tokenizer().save_pretrained(words)
    plan = planned.plan(model)

    def copied(name, plan, **options):
        file = export(plan, source, "folded", tmp_path / name, **options).path / "tokenizer.json"
        return file.is_file() and file.read_bytes() == (words / "tokenizer.json").read_bytes()

    settings = {"top_k": 7, "do_sample": False}  # as in some published checkpoints; transformers would not save it
    write_json(source / "generation_config.json", settings)
    assert not copied("none", plan)
    assert read_json(tmp_path / "none" / "generation_config.json")["top_k"] == 7
    assert copied("named", plan, tokenizer=words)
    assert copied("noted", plan.changed(data=plan.data | {"tokenizer": str(words)}))
    tokenizer().save_pretrained(source.parent)
    assert copied("beside", plan)

    plan = planned.plan(model.to(torch.bfloat16))
    plan = plan.changed(cost=plan.cost | {"settings": {"dtype": "bfloat16"}})
    assert load(export(plan, source, "fast", tmp_path / "out").path).dtype == torch.bfloat16
    with refused("weights"):
        export(plan, source, "fast", tmp_path / "other", dtype="float32")


NEGATIVE = planned.scalars([2]) | {"1": dict.fromkeys(planned.NAMES, -0.1)}


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(
    ("name", "format", "granularity", "blocks", "options", "words", "target"),
    [
        ("llama", "folded", "attention", [2], {}, "exists", "there"),
        ("llama", "fats", "attention", [2], {}, "fast", "out"),
        ("llama", "decilm", "layer", [2], {}, "Use --format folded or fast or layer.$", "out"),
        ("llama", "layer", "layer", [1, 2, 3], {}, "3 layers", "out"),
        ("llama", "folded", "attention", [2], {}, "Cannot write", "file/out"),
        ("llama", "fast", "attention", [2], {"seed": 3}, "another LlamaForCausalLM", "deep/out"),
        ("llama", "fast", "attention", [2], {"values": NEGATIVE}, "s_att of layer 1", "deep/out"),
        ("llama", "fast", "attention", [2], {"tokenizer": "/no/such/folder"}, "/no/such/folder", "out"),
        ("gpt2", "layer", "layer", [1], {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse", "out"),
        ("mistral", "decilm", "attention", [2], {}, "mistral. Use --format folded or fast.$", "out"),
        ("llama", "decilm", "attention", [2], {"head_dim": 16}, "head_dim", "out"),
        ("qwen2", "decilm", "attention", [2], {"layer_types": ["sliding_attention"] * 3}, "sliding window", "out"),
        ("llama-classifier", "folded", "attention", [2], {}, "language model", "out"),
    ],
)
def test_what_cannot_be_is_refused(name, format, granularity, blocks, options, words, target, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("a file")
    model, options = tiny_models.build(name), dict(options)
    other = tiny_models.build(name, seed=options.pop("seed", 0))
    plan = planned.plan(other, blocks, granularity, options.pop("values", "fitted"))
    named = {"tokenizer": options.pop("tokenizer", None)}
    for option, value in options.items():
        monkeypatch.setattr(model.config, option, value)
    with refused(words):
        export(plan, model, format, tmp_path / target, **named)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("format", ["fast", "decilm"])
def test_a_refusal_advises_only_formats_that_hold_the_model(format, tmp_path):
    model = zoo.build("stablelm", "causal-lm")
    plan = planned.plan(model, [2], "attention")
    with refused(r"stablelm.* Use --format folded\.$"):
        export(plan, model, format, tmp_path / "out")
    export(plan, model, "folded", tmp_path / "out")


def test_a_folder_that_appears_meanwhile_is_not_replaced_and_an_adapter_is_refused(tmp_path, monkeypatch):
    model, target = tiny_models.build("llama"), tmp_path / "out"
    monkeypatch.setattr(exporting, "prove_export", lambda *_: target.mkdir() or 0.0)
    with refused("exists already"):
        export(planned.plan(model), model, "folded", target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list(target.iterdir())
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).base_model.model
    with refused("merge_and_unload"):
        export(planned.plan(adapted, [2]), adapted, "fast", tmp_path / "fast")


def test_a_full_disk_leaves_nothing_and_is_said(tmp_path):
    model = tiny_models.build("llama")
    with planned.full_disk():
        export(planned.plan(model), model, "fast", tmp_path / "new" / "out")
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
            export(planned.plan(model), model, "folded", tmp_path / "new" / "out")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {path.name for path in tmp_path.iterdir()} == {"reader", "number"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "is not an export"),
        ("{", "fulldepth_skip"),
        ({"schema_version": 9}, "schema_version"),
        ({"format": "decilmm"}, "'decilm'"),
        ({"plan": {"blocks": []}}, "blocks"),
        ({}, r"config\.json"),
    ],
)
def test_load_wants_an_export(change, words, tmp_path):
    model = tiny_models.build("llama")
    notes = {"schema_version": 1, "format": "decilm", "logit_error": 0.0, "parameters": 1, "verified": True}
    notes |= {"notes": [], "versions": {}, "plan": planned.plan(model).document()}
    if change is None:
        model.save_pretrained(tmp_path)
    else:
        (tmp_path / NOTES).write_text(change if isinstance(change, str) else json.dumps(notes | change))
    with refused(words):
        load(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("unproven")
def test_older_code_in_a_folder_is_not_run_and_is_named(tmp_path):
    model, plan, expected = prepared("gpt2", [1, 3])
    folder = export(plan, model, "fast", tmp_path / "fast", tokenizer=tokenizer()).path
    assert f"tested with transformers {', '.join(TESTED_TRANSFORMERS)}." in str(read_json(folder / NOTES)["notes"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder)
    (folder / "modeling_skipped.py").write_text('TESTED_TRANSFORMERS = ("4.57.6", "5.22.1")\nraise SystemExit\n')
    with pytest.warns(UserWarning, match=r"tested with transformers up to 5\.22\.1, not with .*`fulldepth skip apply`"):
        loaded = load(folder)
    assert relative(logits(loaded), expected) < 1e-4


def test_a_tokenizer_that_does_not_load_again_drops_the_export(tmp_path):
    model = checkpoint(tmp_path / "model")
    (model / "tokenizer.json").write_bytes(b'{"version": "1.0", "model": {}}')
    with refused("does not load in a fresh process"):
        export(planned.plan(tiny_models.build("llama")), model, "folded", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("writer", ["apply", "heal", "exit"])
def test_a_disk_that_is_too_small_is_named_before_the_work(writer, tmp_path, monkeypatch):
    model, plan, _ = prepared("llama", [2])
    monkeypatch.setattr("fulldepth.hf.checkpoint_folder.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr("fulldepth.skip.heal.refit", lambda *_, **__: pytest.fail("refitted first"))
    runs = {
        "apply": lambda: export(plan, model, "folded", tmp_path / "made", tokenizer=tokenizer()),
        "heal": lambda: heal(plan, model, ["w1 w2"], tmp_path / "made", steps=0),
        "exit": lambda: exit.export_layers(model, tmp_path / "made", layers=2, tokenizer=tokenizer()),
    }
    with refused(r"needs at least \d+\.\d\d [kM]B, and 1\.00 kB are free"):
        runs[writer]()
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_is_not_there_is_refused_before_weights_are_written(tmp_path, monkeypatch):
    model, plan, _ = prepared("llama", [2])
    monkeypatch.setattr(type(FORMATS["folded"]), "write", lambda *_: pytest.fail("written first"))
    with refused("nowhere"):
        export(plan, model, "folded", tmp_path / "made", tokenizer=str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_the_revision_of_a_model_is_not_that_of_a_tokenizer_that_is_named(tmp_path, monkeypatch):
    """Both lie in the Hub's cache: the model at `older` alone, the tokenizer at `main` alone."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tiny_models.build("llama")
    for repository, branch, contents in (("model", "older", [model]), ("tokenizer", "main", [model, tokenizer()])):
        place = tmp_path / f"models--some--{repository}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / branch).write_text("0" * 40)
        for content in contents:
            content.save_pretrained(place / "snapshots" / ("0" * 40))
    plan = planned.plan(model, [2], "attention", None)
    made = export(plan, "some/model", "folded", tmp_path / "out", tokenizer="some/tokenizer", revision="older")
    assert AutoTokenizer.from_pretrained(made.path).get_vocab() == tokenizer().get_vocab()
    with refused("some/other"):
        export(plan, "some/model", "folded", tmp_path / "other", tokenizer="some/other", revision="older")
    searched = plan.changed(data={**plan.data, "tokenizer": "some/tokenizer"})
    made = export(searched, "some/model", "folded", tmp_path / "searched", revision="older")
    assert AutoTokenizer.from_pretrained(made.path).get_vocab() == tokenizer().get_vocab()


def test_needed_and_free_bytes_differ_in_the_message(tmp_path, monkeypatch):
    free = 10**9
    monkeypatch.setattr("fulldepth.hf.checkpoint_folder.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    check_disk_space(tmp_path, free)
    with refused("needs at least 1,000,000,001 bytes, and 1,000,000,000 bytes are free"):
        check_disk_space(tmp_path, free + 1)
    with refused("needs at least 2.50 GB, and 1.00 GB are free"):
        check_disk_space(tmp_path, 2.5e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_fresh_process_computes_decides(dtype, tmp_path, monkeypatch):
    """Errors are relative to the largest logit, 4; with a cache they may be those of rounding in this precision."""
    expected = torch.tensor([[1.0, -4.0, 0.5]], dtype=dtype)
    found, allowed = {}, {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]

    def read(*_):
        return found["logits"], readers.ReaderReport.model_validate({"class": "Llama", "cache_error": found["cache"]})

    monkeypatch.setattr(readers, "read_export", read)
    other = expected.double() + torch.tensor([[0.0, 0.0, 0.04]])
    cases = [
        (other, 0.9 * allowed, 0.0101, None),
        (
            other,
            0.0,
            0.0099,
            r"loaded again as Llama, its logits miss the model's by 1\.0e-02 of the largest; 9\.9e-03",
        ),
        (torch.full_like(other, torch.nan), 0.0, 0.5, "its logits miss the model's by nan"),
        (other, 1.1 * allowed, 0.5, "loaded again as Llama, it gives other logits with a cache than without"),
        (other, float("nan"), 0.5, "it gives other logits with a cache than without .nan"),
    ]
    for logits_read, cache_error, most, words in cases:
        found |= {"logits": logits_read, "cache": cache_error}
        if words is None:
            assert readers.prove_export(tmp_path, ids(), expected, most, "stock") == pytest.approx(0.01, rel=1e-6)
            continue
        with refused(words):
            readers.prove_export(tmp_path, ids(), expected, most, "stock")
