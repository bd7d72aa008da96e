"""The proofs at load run on the beginnings of two sequences, and are as strict as on all of them."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from fulldepth import measure
from fulldepth.data import builtin_texts, train_tokenizer

TEXT = builtin_texts("heldout")[0][4000:12000]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], vocab_size=320)


def measured(model, tokenizer, measures=("displacement", "coherence")):
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    names = None if measures is None else list(measures)
    return measure(model, [TEXT], tokenizer=tokenizer, measures=names, sequence_length=48, max_sequences=4)


def test_logits_are_computed_at_16_positions_of_two_sequences(tokenizer):
    model, rows = tiny_models.build("llama"), []
    model.resize_token_embeddings(len(tokenizer))
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output[..., 0].numel()))
    results = measured(model, tokenizer)
    assert rows
    assert max(rows) <= 2 * 16
    assert results.meta["data"]["sequence_length"] == 48


@pytest.mark.parametrize(
    "change",
    [lambda logits: 1.01 * logits, lambda logits: 2 * torch.tanh(logits / 2), lambda logits: logits.roll(1, -1)],
)
def test_a_head_that_does_more_than_the_lens_is_left_out(tokenizer, change):
    model = tiny_models.build("llama")

    def tampered(module, args, output):
        output.logits = change(output.logits)
        return output

    model.register_forward_hook(tampered)
    reasons = {entry["measure"]: entry["reason"] for entry in measured(model, tokenizer, None).meta["left_out"]}
    assert "misses the model's own logits by" in reasons["lens_loss"]


def test_a_model_that_fails_on_the_beginnings_is_proven_on_the_whole(tokenizer):
    model = tiny_models.build("llama")

    def needs_length(module, args, kwargs):
        if kwargs["input_ids"].shape[1] < 40:
            raise ValueError("too short")

    model.model.register_forward_pre_hook(needs_length, with_kwargs=True)
    assert len(measured(model, tokenizer).values("displacement", "mean", "residual")) == model.config.num_hidden_layers
