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
from fulldepth.losses import has_next_token_loss, use_next_token_loss

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
    assert model.training


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


def test_a_decoder_of_bart_is_trained_to_predict_the_next_token(tmp_path):
    """Its own loss falls by copying; rows of a cycle of tokens tell the two apart: the next one is certain."""
    tokenizer = small_world.tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    sizes = {"d_model": 32, "decoder_ffn_dim": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
    positions = {"max_position_embeddings": LENGTH, "encoder_layers": 1, "is_encoder_decoder": False}
    config = tf.BartConfig(vocab_size=len(tokenizer), is_decoder=True, **sizes, **positions)
    torch.manual_seed(0)
    tf.BartForCausalLM(config).save_pretrained(tmp_path / "start")
    rows = [(np.arange(LENGTH) + first) % 20 + 5 for first in range(20)]
    for part in ("train", "held"):
        write_tokens(rows, tmp_path / part)
    run = fulldepth.train(
        {
            "model": {"checkpoint": str(tmp_path / "start")},
            "data": {
                "tokens": str(tmp_path / "train"),
                "validation": str(tmp_path / "held"),
                "end_of_text": False,
                "validation_sequences": 20,
            },
        },
        tmp_path / "run",
        tokenizer=str(tmp_path / "tokenizer"),
        steps=60,
        eval_every=60,
        global_batch_size=10,
        sequence_length=LENGTH,
        learning_rate=1e-2,
        progress=False,
    )
    assert any("is not that of the next token" in warning for warning in run.meta["warnings"])
    ids = torch.tensor(np.stack(rows))
    for folder, step in (("start", 0), ("run", 60)):
        with torch.no_grad():
            logits = open_model(tmp_path / folder, device="cpu").model.eval()(input_ids=ids, use_cache=False).logits
        expected = float(cross_entropy(logits, ids))
        assert run.values("validation_loss", "mean")[step] == pytest.approx(expected, rel=1e-4)
    assert expected < 0.5
