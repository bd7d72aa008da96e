"""Decoders whose class has another loss than that of the next token, against the plain formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from torch.testing import assert_close

import fulldepth
import tiny_models
from evaluation import small_world
from families import zoo
from fulldepth.core.targets import IGNORE
from fulldepth.data.packing import write_tokens
from fulldepth.hf import open_model
from fulldepth.losses import Objective, has_next_token_loss, sees_later_tokens, use_next_token_loss
from refusals import refused

OTHERS = ["bart", "trocr", "git"]
LENGTH = 12


def cross_entropy(logits, labels):
    """Mean over the labels that count of the surprise of the label at t + 1, given the logits at t."""
    surprise = [
        -row[position].log_softmax(-1)[targets[position + 1]]
        for row, targets in zip(logits.double(), labels, strict=True)
        for position in range(len(targets) - 1)
        if targets[position + 1] != IGNORE
    ]
    return torch.stack(surprise).mean()


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mixtral"])
def test_a_loss_of_the_next_token_is_kept(name):
    model = zoo.build(name, "causal-lm")
    model.config.output_router_logits = name == "mixtral"  # adds a balancing loss
    model.train()
    assert has_next_token_loss(model)
    assert not sees_later_tokens(model)
    assert model.training
    torch.nn.init.zeros_(model.get_output_embeddings().weight)  # every label is read alike
    assert has_next_token_loss(model)


def test_a_teacher_reads_a_row_of_documents_that_is_longer_than_its_positions():
    """Each document begins at position 0, so that positions, not the row, must fit."""
    model = zoo.build("llama", "causal-lm")
    teacher = zoo.build("gpt2", "causal-lm", n_positions=8)
    ids = tiny_models.token_ids(1, 24)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(24)[None] % 8, "use_cache": False}
    with Objective(distillation={"teacher": teacher, "weight": 1.0}).attach(model) as objective:
        loss = float(objective(model(**batch), batch)[0].detach())
        with torch.no_grad():
            del batch["labels"]
            ours, theirs = (each(**batch).logits[0, :-1].double().log_softmax(-1) for each in (model, teacher))
        assert loss == pytest.approx(float((theirs.exp() * (theirs - ours)).sum(-1).mean()), rel=1e-5)
        long = {"input_ids": ids, "labels": ids}
        with refused("Rows of 24 tokens do not fit the teacher's 8 positions"):
            objective(model(**long), long)


@pytest.mark.parametrize("name", ["xlnet", "roberta"])
def test_a_model_that_reads_the_next_token_is_found(name):
    model = zoo.build(name, "causal-lm")
    assert sees_later_tokens(model)
    if name == "roberta":
        assert not sees_later_tokens(zoo.build(name, "causal-lm", is_decoder=True))


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_is_replaced(name):
    model = zoo.build(name, "causal-lm").eval()
    assert not has_next_token_loss(model)
    use_next_token_loss(model)
    assert has_next_token_loss(model)
    ids = tiny_models.token_ids(2, LENGTH)
    labels = ids.clone()
    labels[0, 4:7] = IGNORE
    output = model(input_ids=ids, labels=labels)
    expected = cross_entropy(output.logits, labels)
    assert_close(output.loss, expected.float(), rtol=1e-5, atol=0)
    weight = model.get_output_embeddings().weight
    gradients = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (output.loss, expected)]
    assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert model(input_ids=ids).get("loss") is None


ROWS = [(np.arange(LENGTH) + first) % 20 + 5 for first in range(20)]


def train_on_cycles(folder, **changed):
    """Train `start` of a folder with its `tokenizer` on rows of a cycle of tokens."""
    for part in ("train", "held"):
        write_tokens(ROWS, folder / part)
    parts = {"tokens": str(folder / "train"), "validation": str(folder / "held")}
    recipe = {
        "model": {"checkpoint": str(folder / "start")},
        "tokenizer": str(folder / "tokenizer"),
        "data": {**parts, "end_of_text": False, "validation_sequences": 20, **changed.pop("data", {})},
        "steps": 1,
        "eval_every": 60,
        "global_batch_size": 10,
        "sequence_length": LENGTH,
        "learning_rate": 1e-2,
    }
    return fulldepth.train({**recipe, **changed}, folder / "run", progress=False)


def saved(folder, **models):
    """Save models, and a tokenizer whose tokens they have."""
    small_world.tokenizer().save_pretrained(folder / "tokenizer")
    for name, model in models.items():
        model.save_pretrained(folder / name)
        if name == "teacher":
            small_world.tokenizer().save_pretrained(folder / name)


@pytest.mark.parametrize(
    ("start", "teacher", "changed", "named"),
    [
        ("xlnet", None, {}, "XLNetLMHeadModel reads the tokens that it should predict"),
        ("llama", ("gpt2", {"n_positions": 8}), {}, "Rows of 12 tokens do not fit the teacher's 8 positions"),
        ("llama", ("bloom", {}), {"data": {"across_documents": False}}, "Bloom.* takes no position_ids"),
        ("opt", None, {"objective": {"similarity": 0.1}, "model": {"layerdrop": 0.5}}, "layers out at random"),
    ],
)
def test_what_would_teach_something_else_is_refused_before_the_first_step(start, teacher, changed, named, tmp_path):
    size = len(small_world.tokenizer())
    saved(tmp_path, start=zoo.build(start, "causal-lm", vocab_size=size))
    if teacher is not None:
        saved(tmp_path, teacher=zoo.build(teacher[0], "causal-lm", vocab_size=size, **teacher[1]))
        changed = {**changed, "objective": {"distillation": {"teacher": str(tmp_path / "teacher")}}}
    if "model" in changed:
        changed = {**changed, "model": {"checkpoint": str(tmp_path / "start"), **changed["model"]}}
    with refused(named):
        train_on_cycles(tmp_path, **changed)


def test_the_language_model_of_a_model_of_pictures_and_text_is_trained(tmp_path):
    """Its configuration has the vocabulary in a part."""
    model = zoo.build("gemma3", "causal-lm")
    model.resize_token_embeddings(len(small_world.tokenizer()))
    saved(tmp_path, start=model)
    run = train_on_cycles(tmp_path)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(np.stack(ROWS))).logits
    expected = float(cross_entropy(logits, torch.tensor(np.stack(ROWS))))
    assert run.values("validation_loss", "mean")[0] == pytest.approx(expected, rel=1e-4)


def test_a_decoder_of_bart_is_trained_to_predict_the_next_token(tmp_path):
    """Its own loss falls by copying; rows of a cycle of tokens tell the two apart: the next one is certain."""
    tokenizer = small_world.tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    sizes = {"d_model": 32, "decoder_ffn_dim": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
    positions = {"max_position_embeddings": LENGTH, "encoder_layers": 1, "is_encoder_decoder": False}
    config = tf.BartConfig(vocab_size=len(tokenizer), is_decoder=True, **sizes, **positions)
    torch.manual_seed(0)
    tf.BartForCausalLM(config).save_pretrained(tmp_path / "start")
    run = train_on_cycles(tmp_path, steps=60)
    assert any("is not that of the next token" in warning for warning in run.meta["warnings"])
    ids = torch.tensor(np.stack(ROWS))
    for folder, step in (("start", 0), ("run", 60)):
        with torch.no_grad():
            logits = open_model(tmp_path / folder, device="cpu").model.eval()(input_ids=ids, use_cache=False).logits
        expected = float(cross_entropy(logits, ids))
        assert run.values("validation_loss", "mean")[step] == pytest.approx(expected, rel=1e-4)
    assert expected < 0.5
