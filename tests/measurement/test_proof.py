"""The proofs at load run on the beginnings of two sequences, or on the whole of them where a model needs it."""

from __future__ import annotations

import pytest

import tiny_models
from fulldepth import measure


@pytest.fixture
def model(tokenizer):
    made = tiny_models.build("llama")
    made.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return made


@pytest.fixture
def measured(model, tokenizer, corpus):
    def run(measures):
        options = {"measures": measures, "sequence_length": 48, "max_sequences": 4}
        return measure(model, [corpus[:8000]], tokenizer=tokenizer, **options)

    return run


def test_logits_are_computed_at_16_positions_of_two_sequences(model, measured):
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output[..., 0].numel()))
    assert measured(["displacement"]).meta["data"]["sequence_length"] == 48
    assert 0 < max(rows) <= 2 * 16


def test_a_head_that_does_more_than_the_lens_is_left_out(model, measured):
    def tampered(module, args, output):
        output.logits = 1.01 * output.logits
        return output

    model.register_forward_hook(tampered)
    reasons = {entry["measure"]: entry["reason"] for entry in measured(None).meta["left_out"]}
    assert "misses the model's own logits by" in reasons["lens_loss"]


def test_a_model_that_fails_on_the_beginnings_is_proven_on_the_whole(model, measured):
    def needs_length(module, args, kwargs):
        assert kwargs["input_ids"].shape[1] >= 40

    model.model.register_forward_pre_hook(needs_length, with_kwargs=True)
    found = measured(["displacement"]).values("displacement", "mean", "residual")
    assert len(found) == model.config.num_hidden_layers
