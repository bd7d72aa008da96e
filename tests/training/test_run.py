"""What a run writes down, against the same numbers computed from its checkpoints by other means."""

from __future__ import annotations

import math
import os
import random
import shutil
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

import fulldepth.architectures  # noqa: F401  registers depth_llama
from fulldepth.core.progress import Watcher
from fulldepth.data import pack
from fulldepth.hf import seal
from fulldepth.results import Results, tabulate
from fulldepth.settings import assignments, layer, read
from fulldepth.training import TrainSettings, export_run, train
from fulldepth.training.callback import _headline
from fulldepth.training.plan import dry_run_lines
from golden.tables import MODEL
from refusals import refused
from tiny_models import same_weights
from training.conftest import SHORT, interrupted, settings, train_by


def values(results, measure, step, site=None):
    rows = results.table.query("measure == @measure and step == @step")
    rows = rows if site is None else rows[rows.site == site]
    return rows.sort_values("layer").value.tolist()


def held_out(path, run):
    """The validation windows, packed anew."""
    chosen = settings(path)
    options = {name: getattr(chosen.data, name) for name in ("validation_share", "validation_sequences")}
    tokenizer, length = AutoTokenizer.from_pretrained(chosen.tokenizer), chosen.sequence_length
    packed = pack(chosen.data.name, tokenizer, sequence_length=length, cache=run / "again", seed=chosen.seed, **options)
    return torch.stack([packed.validation[i]["input_ids"] for i in range(len(packed.validation))])


def flops_of(checkpoint, path):
    """Of a Llama's training with recomputed blocks: four passes through the blocks and three through the head."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    chosen = settings(path)
    length = chosen.sequence_length
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if "layers" in name and weight.ndim == 2)
    attention = 2 * model.config.hidden_size * (length + 1) * model.config.num_hidden_layers
    head = 2 * model.get_output_embeddings().weight.numel()
    return chosen.steps * chosen.global_batch_size * length * (4 * (2 * matrices + attention) + 3 * head)


@pytest.mark.filterwarnings("error:.*will be removed in v6:FutureWarning")
def test_the_record_tells_what_the_checkpoints_do(recipe, tmp_path):
    path = recipe(objective={"jump": 0.5}, gradient_checkpointing=True)
    results = train_by(path, tmp_path / "run")
    windows = held_out(path, tmp_path)
    assert sorted(set(results.table.step)) == [0, 3, 6, 8]
    assert results.meta["model"]["training_flops"] == pytest.approx(flops_of(tmp_path / "run" / "checkpoint-8", path))
    for step in (3, 6, 8):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f"checkpoint-{step}").double().eval()
        model.config.tie_last_hidden_states = False
        with torch.no_grad():
            out = model(windows, output_hidden_states=True)
        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
        assert values(results, "validation_loss", step) == pytest.approx([float(loss)], rel=1e-5)
        pairs = pairwise(out.hidden_states)
        psi = [float((1 - torch.cosine_similarity(a, b, dim=-1)).mean() / 2) for a, b in pairs]
        assert values(results, "displacement", step) == pytest.approx(psi, rel=1e-4)
        rises = [max(0.0, after - before) for before, after in pairwise(psi)]
        zetas = [100 * sum(rises[start:]) for start in (0, 1, 2)]  # layers 2, 3, 4
        assert values(results, "jump_rate", step) == pytest.approx(zetas, rel=1e-3, abs=1e-6)
    rates = [values(results, "learning_rate", step)[0] for step in (3, 6, 8)]
    # Trainer reports the rate after step n, before its scheduler moves on: warm-up of 2, then half a cosine over 6.
    assert rates == pytest.approx([3e-3 * (1 + math.cos(math.pi * k / 6)) / 2 for k in (0, 3, 5)], rel=1e-6)
    assert Results.load(tmp_path / "run").meta["kind"] == "training"
    assert values(results, "penalty", 8, "jump")[0] > 0
    card = ModelCard.load(tmp_path / "run" / "checkpoint-6" / "README.md")
    assert card.data.library_name == "transformers"
    assert f"| Validation loss | {values(results, 'validation_loss', 6)[0]:.4g} nats |" in card.text
    assert f"| Tokens | {6 * 4 * 24} |" in card.text
    assert f"of the last evaluation, on a held-out part of {settings(path).data.name}." in card.text


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({0: 4.0}, "4.000 nats at step 0."),
        ({0: 4.0, 3: 2.5, 6: 2.25}, "2.250 nats at step 6, 4.000 before training."),
        ({0: 4.0, 3: 2.25, 6: 2.5}, "2.500 nats at step 6, 4.000 before training; it was lowest at step 3 (2.250)."),
    ],
)
def test_the_headline_names_the_step_of_the_lowest_loss(losses, words):
    key = ("validation_loss", "model", None, None, "mean")
    table = pd.concat([tabulate([(*key, loss, 9, "nats")], step=step) for step, loss in losses.items()])
    assert _headline(table)["validation_loss"].sentence == f"The validation loss is {words}"


@pytest.mark.parametrize(("size", "note"), [(4, True), (3, False), (7, False)])
def test_a_smaller_micro_batch_than_asked_is_said(size, note, recipe, tmp_path):
    """By the run and by the dry run; 7 is only more than there is."""
    path = recipe(**SHORT, global_batch_size=6, micro_batch_size=size)
    sentence = "micro_batch_size=4 does not divide the 6 sequences of a process in a step: forward passes hold 3."
    assert (sentence in train_by(path, tmp_path / "run").meta["warnings"]) is note
    (batch,) = (line for line in dry_run_lines(settings(path)) if line[0] == "batch")
    assert batch[1] == ("1 x 6 x 1" if size == 7 else "1 x 3 x 2")
    assert (sentence in batch[2]) is note


def test_an_infinite_alpha_survives_recipe_record_and_resume(recipe, tmp_path, main):
    """JREG, App. D: the penalty of the last layer alone."""
    path, run = recipe(objective={"jump": {"weight": 0.5, "alpha": math.inf}}), tmp_path / "run"
    results = train_by(path, run)
    for folder in (path, run / "settings.yaml"):
        assert settings(folder).objective.terms["jump"]["alpha"] == math.inf
    assert results.meta["settings"]["objective"]["jump"] == {"weight": 0.5, "alpha": ".inf"}
    assert Results.load(run).meta["settings"] == results.meta["settings"]
    rest = interrupted(run, 8, tmp_path / "rest")
    changes = ("objective.jump.weight=0.5", "objective.jump.alpha=inf")
    assert main("train", str(recipe()), *changes, "--output", str(rest), "--resume")[0] == 0
    first, second = (load_file(folder / "checkpoint-8" / "model.safetensors") for folder in (run, rest))
    assert same_weights(first, second)


@pytest.mark.slow
def test_scaled_norms_are_exported_as_the_gains_of_an_ordinary_llama(recipe, tmp_path, main):
    """A fresh process with transformers alone has loaded it; here the gains are multiplied by hand."""
    depth = {**MODEL, "type": "depth_llama"}
    train_by(recipe(model={**depth, "norm_scaling": True}, **SHORT), tmp_path / "run")
    made = tmp_path / "llama"
    code, _, error = main("train", "export", tmp_path / "run", "--stock", "--output", made)
    assert code == 0, error
    scaled, plain = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2"),
        load_file(made / "model.safetensors"),
    )
    model = LlamaForCausalLM.from_pretrained(made)
    assert not list(made.glob("*.py"))
    assert type(scaled).__name__ == "DepthLlamaForCausalLM"
    ids = torch.arange(40).view(2, 20) + 3
    with torch.no_grad():
        expected, found = scaled(ids).logits, model(ids).logits
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    for number, block in enumerate(scaled.model.layers, start=1):
        for name in ("input_layernorm", "post_attention_layernorm"):
            gain = getattr(block, name).weight.detach() / number**0.5
            assert torch.allclose(plain[f"model.layers.{number - 1}.{name}.weight"], gain, rtol=1e-6)
    AutoTokenizer.from_pretrained(made)
    train_by(recipe(model={**depth, "residual": "tree"}, **SHORT), tmp_path / "tree")
    with refused("residual 'tree' is no stock decoder"):
        export_run(tmp_path / "tree", tmp_path / "none", stock=True)
    assert not (tmp_path / "none").exists()


def test_switches_of_another_type_are_refused_before_a_tokenizer_is_trained(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("fulldepth.training.text.train_tokenizer", lambda *_: pytest.fail("trained a tokenizer"))
    path = recipe(model={**MODEL, "norm_scaling": True}, tokenizer="builtin:300")
    with refused("model.norm_scaling is an option of model.type=depth_llama; llama has none."):
        train_by(path, tmp_path / "run")


def test_an_exported_model_loads_in_its_precision(recipe, tmp_path, capfd):
    train_by(recipe(steps=2, eval_every=2, save_every=1), tmp_path / "run")
    for dtype in (None, "bfloat16"):
        capfd.readouterr()
        made = export_run(tmp_path / "run", tmp_path / str(dtype), step=1, dtype=dtype, progress=False)
        assert "".join(capfd.readouterr()) == ""  # no bars of the library
        model = AutoModelForCausalLM.from_pretrained(made)
        assert model.dtype == (torch.bfloat16 if dtype else torch.float32)
        AutoTokenizer.from_pretrained(made)
        assert not list(made.glob("optimizer*")) + list(made.glob("rng*"))
    cut = shutil.copytree(tmp_path / "run", tmp_path / "cut")
    os.truncate(cut / "checkpoint-2" / "model.safetensors", 5000)
    said = []
    export_run(cut, tmp_path / "first", watcher=Watcher(say=said.append))
    assert said[:2] == [
        f"'checkpoint-2' in {cut} is left out: still being written, interrupted, or damaged.",
        f"Exporting {cut / 'checkpoint-1'}",
    ]
    for run, options, word in (
        (tmp_path / "run", {"output": tmp_path / "None"}, "exists already"),
        (tmp_path / "run", {"output": tmp_path / "new", "step": 5}, "checkpoint-5"),
        (tmp_path / "run", {"output": tmp_path / "new", "dtype": "int3"}, "dtype"),
        (tmp_path, {"output": tmp_path / "new"}, "no complete checkpoint"),
    ):
        with refused(word):
            export_run(run, **options)
    damaged = tmp_path / "run" / "checkpoint-2" / "tokenizer.json"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with refused("tokenizer"):
        export_run(tmp_path / "run", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_model_trained_from_a_run_generates_as_the_first_one_does(recipe, tmp_path, main):
    """The Trainer's switched-off cache is not saved; generation settings of a checkpoint are kept."""
    train_by(recipe(**SHORT), tmp_path / "first")
    first = tmp_path / "first" / "checkpoint-2"
    assert AutoConfig.from_pretrained(first).use_cache
    saved = GenerationConfig.from_pretrained(first)
    saved.update(eos_token_id=[1, 2], max_new_tokens=7)
    saved.save_pretrained(first)
    seal(first)
    train_by(recipe(**SHORT, model={"checkpoint": str(tmp_path / "first")}), tmp_path / "second")
    kept = GenerationConfig.from_pretrained(tmp_path / "second" / "checkpoint-2")
    assert {1, 2} <= set(kept.eos_token_id)  # the Trainer adds the tokenizer's own
    assert (kept.max_new_tokens, kept.use_cache) == (7, True)
    command = ["generate", tmp_path / "second", "--prompt", "The king", "--max-new-tokens", "3"]
    for further in ([], ["--set", "min_layer=2", "--threshold", "0.5"], ["--speculate-from", "2"]):
        assert main(*command, *further)[0] == 0


def test_a_loss_that_is_not_finite_stops_the_run(recipe, tmp_path, monkeypatch):
    from fulldepth.training import run as room

    build = room.build_model

    def broken(*arguments):
        model = build(*arguments)
        model.model.layers[1].mlp.register_forward_hook(
            lambda mlp, _, output: output * (math.inf if mlp.training else 1)
        )
        return model

    monkeypatch.setattr(room, "build_model", broken)
    with refused(r"Step 1: .*ce.*layer 2") as stopped:
        train_by(recipe(objective={"jump": 0.5}), tmp_path / "run")
    assert "not taken" in str(stopped.value)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


BAD = {
    "lerning_rate=1": "learning_rate",
    "model.hiden_size=8": "hidden_size",
    "method=jerg": "jreg",
    "objective.jump.alhpa=1": "alpha",
    "data.name=/nowhere.txt": "nowhere",
    "data.name=EMPTY": "empty",
    "tokenizer=null": "tokenizer",
    "router_learning_rate=1e-3": "router_learning_rate has no effect",
    "objective.coherence.layers=[40]": "0 to 3",
    "task=detection": "text.jsonl",
}
"""Changes of a recipe -> what the refusal names."""


@pytest.mark.parametrize("changes", BAD)
def test_bad_settings_are_refused_before_the_first_step(changes, recipe, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    given = assignments(changes.replace("EMPTY", str(tmp_path / "empty.jsonl")).split())
    with refused(BAD[changes]):
        train(layer(TrainSettings, read(recipe(), "train"), given), tmp_path / "run")
    assert not list(tmp_path.rglob("checkpoint-*"))


CONTRADICTING = {
    "warmup_steps=9": "warmup_steps is 9. Expected at most steps, which is 8.",
    "min_learning_rate=1": "min_learning_rate (1.0) is above learning_rate (0.003).",
    "warmup=0.5 warmup_steps=2": "warmup=0.5 and warmup_steps=2 both state the warm-up's length. Leave one out.",
    "schedule=linear min_learning_rate=1e-4": "min_learning_rate has no effect with schedule=linear; it applies to "
    "cosine.",
    "milestones=0.3": "milestones has no effect with schedule=cosine; it applies to multistep.",
    "log_every=3": "log_every has no effect without report_to.",
    "backbone_learning_rate=1e-4": "backbone_learning_rate has no effect with task=causal-lm; it applies to detection.",
    "processor=folder": "processor has no effect with task=causal-lm; it applies to image-classification and "
    "detection.",
    "data.truncate=true": "data.truncate has no effect with task=causal-lm; it applies to text-classification.",
    "task=text-classification data.streaming=true": "data.streaming has no effect with task=text-classification; it "
    "applies to causal-lm.",
    "stage=sft data.column=text": "data.column has no effect with stage=sft; it applies to pretrain.",
    "task=detection fsdp=true": "fsdp=true is for task: causal-lm; leave it out for task: detection.",
}
"""Changes of a recipe that contradict each other or have no effect -> the refusal."""


@pytest.mark.parametrize("changes", CONTRADICTING)
def test_contradicting_settings_are_refused_by_a_dry_run_too(changes, recipe, main):
    code, _, error = main("train", str(recipe()), "--dry-run", *changes.split())
    assert (code, error.strip().removeprefix("Error: ")) == (2, CONTRADICTING[changes])


def test_a_later_warm_up_or_schedule_replaces_an_earlier_one():
    steps = [{"warmup_steps": 5}, {"warmup": 0.5}, {"warmup_steps": 7}]
    assert [layer(TrainSettings, *steps[:count]).warmup_length for count in (1, 2, 3)] == [5, 100, 7]
    cosine = {"schedule": "cosine", "min_learning_rate": 1e-5}
    assert layer(TrainSettings, cosine, {"schedule": "linear"}).min_learning_rate == 0


@pytest.mark.parametrize(("arguments", "named"), [(["tiny-lama"], "tiny-llama"), (["tiny-llama"], "--output")])
def test_a_mistake_in_the_command_is_one_message_and_code_2(arguments, named, main):
    code, _, error = main("train", *arguments)
    assert (code, named in error) == (2, True), error


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_training_leaves_the_random_states_alone_and_runs_in_any_gradient_mode(mode, recipe, tmp_path):
    path = recipe(steps=2, eval_every=2, save_every=2, objective={"jump": 0.5})
    torch.manual_seed(5)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    with mode():
        inside = train_by(path, tmp_path / "inside")
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before
    assert values(inside, "validation_loss", 2) == values(train_by(path, tmp_path / "plain"), "validation_loss", 2)
