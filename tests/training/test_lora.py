"""Runs that train adapters, or go on from a folder of `skip apply`: their checkpoints are ordinary ones."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch.testing import assert_close

from fulldepth.hf import load_checkpoint
from fulldepth.settings import assignments, layer
from fulldepth.settings.train import TrainSettings
from fulldepth.skip.exports import export as exporting
from fulldepth.training import dry_run_lines, export_run, train
from refusals import refused
from skip import planned
from tiny_models import shaken
from training.conftest import GPT2, MODEL, SHORT, interrupted, settings, train_by

TOKENS, RANK, VALIDATION = 400, 4, ("validation_loss", "mean")
RUN = {"steps": 4, "eval_every": 4, "save_every": 2, "learning_rate": 1e-2, "tokenizer": None}


@pytest.fixture
def start(sources, tmp_path):
    """`start(kind)`: a folder with a small model and the tokenizer; no weight of it is at its first value."""

    def save(kind):
        torch.manual_seed(1)
        sizes = {name: value for name, value in (GPT2 if kind == "gpt2" else MODEL).items() if name != "type"}
        config = tf.AutoConfig.for_model(kind, **sizes, vocab_size=TOKENS, bos_token_id=0, eos_token_id=0)
        shaken(tf.AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / kind)
        shutil.copytree(sources[1], tmp_path / kind, dirs_exist_ok=True)
        return tmp_path / kind

    return save


def of(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("kind", "alpha", "scale"), [("llama", 6, 1.5), ("gpt2", None, 2)])
def test_a_checkpoint_holds_the_start_and_the_product_of_its_adapters(kind, alpha, scale, start, recipe, tmp_path):
    """GPT-2's matrices are transposed. Without an alpha it is twice the rank."""
    base, run = start(kind), tmp_path / "run"
    adapted = recipe(**RUN, model={"checkpoint": str(base)}, lora={"rank": RANK, "alpha": alpha})
    losses = train_by(adapted, run).values(*VALIDATION)
    after = train_by(recipe(**RUN, model={"checkpoint": str(run)}), tmp_path / "after").values(*VALIDATION)
    assert losses[4] == pytest.approx(after[0], rel=1e-6)  # with adapters and merged
    last = run / "checkpoint-4"
    adapters, expected = load_file(last / "lora.safetensors"), of(base)
    for name in [name for name in adapters if "lora_A" in name]:
        a, b = adapters[name].double(), adapters[name.replace("lora_A", "lora_B")].double()
        weight = name.replace("lora_A.default.", "")
        change = scale * b @ a
        assert change.any()
        expected[weight] = (expected[weight].double() + (change.T if kind == "gpt2" else change)).float()
    assert of(last).keys() == expected.keys()
    ids = torch.arange(40).view(2, 20)
    reference = tf.AutoModelForCausalLM.from_pretrained(base)
    reference.load_state_dict(expected, strict=False)
    loaded = load_checkpoint(export_run(run, tmp_path / "alone")).model
    assert_close(loaded(ids).logits, reference(ids).logits, rtol=0, atol=1e-5)
    assert not (tmp_path / "alone" / "lora.safetensors").exists()


def test_a_run_with_adapters_and_a_teacher_resumes_to_the_same_bytes(start, recipe, tmp_path):
    base, teacher = start("llama"), shutil.copytree(start("gpt2"), tmp_path / "teacher")
    chosen = settings(
        recipe(
            **{**RUN, "model": {"checkpoint": str(base), "attention_dropout": 0.1}, "lora": {"rank": RANK}},
            objective={"distillation": {"teacher": str(teacher), "weight": 0.8}},
        )
    )
    results = train(chosen, tmp_path / "whole")
    assert results.table[results.table.site == "distillation"].value.item() > 0
    again = interrupted(tmp_path / "whole", 4, tmp_path / "again")
    train(chosen, again, resume=True)
    for file in ("model.safetensors", "lora.safetensors", "optimizer.pt"):
        assert (again / "checkpoint-4" / file).read_bytes() == (tmp_path / "whole" / "checkpoint-4" / file).read_bytes()
    shutil.rmtree(again / "checkpoint-4")
    config = (teacher / "config.json").read_text()
    (teacher / "config.json").write_text(json.dumps({**json.loads(config), "layer_norm_epsilon": 0.1}))
    with refused("The teacher differs"):
        train(chosen, again, resume=True)
    (teacher / "config.json").write_text(config)
    shutil.copy(again / "checkpoint-2" / "model.safetensors", base / "model.safetensors")
    with refused("The model to start from differs"):
        train(chosen, again, resume=True)


@pytest.mark.parametrize(
    ("format", "granularity", "kind"),
    [
        ("fast", "attention", "SkippedLlamaForCausalLM"),
        ("folded", "mlp", "LlamaForCausalLM"),
        ("layer", "layer", "LlamaForCausalLM"),
    ],
)
@pytest.mark.parametrize("rank", [None, RANK])
def test_a_run_from_an_export_keeps_its_class_and_what_was_removed(
    rank, format, granularity, kind, start, recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(exporting, "prove_export", lambda *_: 0.0)  # in a fresh process
    base, small, run = start("llama"), tmp_path / "small", tmp_path / "run"
    model = tf.AutoModelForCausalLM.from_pretrained(base)
    exporting.export(planned.plan(model, [2, 3], granularity, None), model, format, small, tokenizer=str(base))
    train_by(recipe(**RUN, model={"checkpoint": str(small)}, lora={"rank": rank}), run)
    before, after = of(small), of(run / "checkpoint-4")
    assert after.keys() == before.keys()
    removed = {name for name, weight in before.items() if not weight.any()}
    assert len(removed) == 2 * (format == "folded")
    assert removed == {name for name, weight in after.items() if not weight.any()}
    assert not any(torch.equal(after[name], before[name]) for name in after if ".0." in name and "proj" in name)
    loaded = load_checkpoint(run / "checkpoint-4").model
    assert type(loaded).__name__ == kind
    assert loaded.config.num_hidden_layers == (2 if format == "layer" else 4)
    exported, further = tmp_path / "exported", tmp_path / "further"
    export_run(run, exported)
    train_by(recipe(**RUN, model={"checkpoint": str(exported)}, lora={"rank": rank}), further)
    assert removed == {name for name, weight in of(further / "checkpoint-4").items() if not weight.any()}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["lora.rank=4"], "model.checkpoint"),
        (["lora.alpha=4"], "lora.rank"),
        (["lora.rank=0"], "lora.rank"),
        (["lora.rank=4", "lora.target_modules=qproj", "model.checkpoint=BASE"], "qproj"),
        (
            ["lora.rank=4", "lora.target_modules=q_proj,embed_tokens", "model.checkpoint=BASE"],
            "class Embedding",
        ),
        (["lora.rank=4", "model.checkpoint=BASE", "absent"], r"peft: pip install 'fulldepth\[lora\]'"),
        (["lora.rank=4", "method=multi-exit", "model.checkpoint=BASE"], "the heads of multi_exit would stay"),
        (
            ["lora.rank=4", "model.checkpoint=BASE", "model.type=depth_llama", "model.memory=static"],
            "lacks 6 weights of the model's switches .*memory_norm",
        ),
        (["objective.distillation.teacher=BASE", "tokenizer=builtin:400"], "teacher .*llama has another vocabulary"),
    ],
)
def test_what_cannot_be_trained_is_refused(given, words, start, recipe, tmp_path, monkeypatch):
    if "absent" in given:
        monkeypatch.setitem(sys.modules, "peft", None)
    chosen = [each.replace("BASE", str(start("llama"))) for each in given if each != "absent"]
    with refused(words):
        train(recipe(**RUN), tmp_path / "run", settings=layer(TrainSettings, assignments(chosen)))


def test_a_rate_of_routers_that_adapters_freeze_is_refused(recipe, tmp_path):
    depth = {**MODEL, "type": "depth_llama", "memory": "static"}
    train_by(recipe(model=depth, **SHORT), tmp_path / "run")
    given = {"model": {"checkpoint": str(tmp_path / "run")}, "lora": {"rank": RANK}, "router_learning_rate": 0.5}
    with refused("router_learning_rate has no effect: .* this model trains none"):
        train_by(recipe(**{**RUN, **given}), tmp_path / "adapted")


def test_a_dry_run_counts_what_is_trained(start):
    chosen = layer(TrainSettings, assignments([f"model.checkpoint={start('llama')}", f"lora.rank={RANK}"]))
    sizes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]  # of a layer's matrices
    trained = 4 * RANK * sum(map(sum, sizes))
    assert f"{trained:,} parameters are trained" in dry_run_lines(chosen)[0][2]


def test_a_tied_head_with_adapters_is_saved_as_a_weight_of_its_own(start, recipe, tmp_path):
    config = tf.AutoConfig.from_pretrained(start("llama"), tie_word_embeddings=True)
    model = shaken(tf.AutoModelForCausalLM.from_config(config))
    shutil.copytree(tmp_path / "llama", tmp_path / "tied")
    model.save_pretrained(tmp_path / "tied")
    given = {"model": {"checkpoint": str(tmp_path / "tied")}, "lora": {"rank": RANK, "target_modules": ["lm_head"]}}
    train_by(recipe(**{**RUN, **given}), tmp_path / "run")
    last = tmp_path / "run" / "checkpoint-4"
    adapters, embeddings = load_file(last / "lora.safetensors"), model.model.embed_tokens.weight
    a, b = (adapters[f"lm_head.lora_{part}.default.weight"].double() for part in "AB")
    assert_close(of(last)["model.embed_tokens.weight"], embeddings.detach(), rtol=0, atol=0)
    assert_close(of(last)["lm_head.weight"].double(), embeddings.double() + 2 * b @ a, rtol=0, atol=1e-6)
    assert json.loads((last / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = tf.AutoModelForCausalLM.from_pretrained(last)
    assert_close(loaded.lm_head.weight, of(last)["lm_head.weight"], rtol=0, atol=0)
