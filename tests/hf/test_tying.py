"""Weights that the configuration ties and that the checkpoint holds apart: they count, in all that is written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from torch.testing import assert_close

import tiny_models
from fulldepth import exit
from fulldepth.evaluation.harness import layered_model
from fulldepth.execution import find_anatomy
from fulldepth.hf import load_checkpoint
from fulldepth.skip.exports.export import export
from json_files import read_json, write_json
from skip import planned
from skip.word_tokenizer import tokenizer


@pytest.fixture(params=["llama", "gemma2"])
def mislabelled(request, tmp_path):
    """A folder whose `config.json` ties embeddings and output layer, beside weights that differ."""
    model = tiny_models.build(request.param)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    write_json(path, read_json(path) | {"tie_word_embeddings": True})
    return tmp_path / "model"


@pytest.fixture
def unproven(monkeypatch):
    """Exports without the fresh process that loads them; the tests load them by transformers."""
    for module in ("skip.exports.export", "exit.elastic"):
        monkeypatch.setattr(f"fulldepth.{module}.{'_prove' if module[0] == 'e' else 'prove_export'}", lambda *_: 0.0)


@torch.no_grad()
def logits(model, blocks=None):
    """Of the whole model, or of its first blocks with its norm and head."""
    ids = tiny_models.token_ids(2, 12, seed=2)
    model = model.double()
    if blocks is not None:
        model.model.layers = model.model.layers[:blocks]
        model.config.num_hidden_layers = blocks
    return model(input_ids=ids, use_cache=False).logits


def stock(folder):
    return tf.AutoModelForCausalLM.from_pretrained(folder)


def test_the_weights_decide_and_a_warning_says_so(mislabelled):
    loaded = load_checkpoint(mislabelled)
    assert loaded.model.config.tie_word_embeddings is False
    assert "tie_word_embeddings" in loaded.warnings[0]
    assert_close(logits(loaded.model), logits(stock(mislabelled)))


@pytest.mark.parametrize("passed", ["folder", "model"])
@pytest.mark.parametrize("format", ["folded", "fast", "layer"])
def test_exports_of_plans_keep_the_output_layer(mislabelled, unproven, tmp_path, format, passed):
    loaded = stock(mislabelled)
    whole = format == "layer"  # the last layer: Gemma 2 without another one is misread by programs that count layers
    removed = loaded.config.num_hidden_layers if whole else 2
    plan = planned.plan(loaded, [removed], "layer" if whole else "attention", None)
    made = export(plan, mislabelled if passed == "folder" else loaded, format, tmp_path / "made", tokenizer=tokenizer())
    assert read_json(made.path / "config.json")["tie_word_embeddings"] is False
    assert any("tie_word_embeddings" in note for note in made.notes)
    again = tf.AutoModelForCausalLM.from_pretrained(made.path, trust_remote_code=True)
    assert_close(again.lm_head.weight, loaded.lm_head.weight)
    assert_close(again.model.embed_tokens.weight, loaded.model.embed_tokens.weight)


@pytest.mark.parametrize("passed", ["folder", "model"])
def test_exports_of_first_layers_keep_the_output_layer(mislabelled, unproven, tmp_path, passed):
    given = mislabelled if passed == "folder" else stock(mislabelled)
    made = exit.export_layers(given, tmp_path / "two", layers=2, tokenizer=tokenizer())
    assert read_json(made.path / "config.json")["tie_word_embeddings"] is False
    assert any("tie_word_embeddings" in note for note in made.notes)
    assert_close(logits(stock(made.path)), logits(stock(mislabelled), blocks=2))


def test_the_harness_ties_no_weights_of_a_model_that_is_passed_in(mislabelled):
    model = stock(mislabelled).eval()
    before = logits(model)
    head = model.lm_head.weight
    reader = SimpleNamespace(anatomy=find_anatomy(model), layers=[model.config.num_hidden_layers])
    layered_model(reader, tokenizer(), {}, batch_size=1)
    assert model.lm_head.weight is head
    assert_close(logits(model), before)
    model.config.tie_word_embeddings = True
    model.tie_weights()  # as before the evaluation
    assert model.lm_head.weight is model.model.embed_tokens.weight
