"""Checkpoints with the first layers: loaded by stock transformers, against final norm and head on `h_E`."""

from __future__ import annotations

import re

import pytest
import torch
import transformers as tf
from torch.testing import assert_close

import tiny_models
from exit.conftest import sharpened, taught
from families import zoo
from fulldepth import exit
from fulldepth.hf import anatomy_candidates, truncated
from refusals import refused
from skip.word_tokenizer import checkpoint, tokenizer


def loaded_as_its_card_says(folder):
    """The model that the code of a checkpoint's card loads."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(code.replace("PATH", str(folder)), names)
    return names["model"]


@pytest.mark.slow
@torch.no_grad()
def test_a_decoder_is_written_with_its_tokenizer_and_card(tmp_path):
    model = tiny_models.build("gemma3")
    made = exit.export_layers(model, tmp_path / "two", layers=2, tokenizer=tokenizer())
    again = loaded_as_its_card_says(tmp_path / "two")
    assert type(again) is type(model)
    assert again.config.layer_types == model.config.layer_types[:2]
    ids = torch.arange(3, 15).view(1, 12)
    states = model.model(ids, output_hidden_states=True).hidden_states
    assert_close(again(ids).logits, model.lm_head(model.model.norm(states[2])), rtol=1e-4, atol=1e-4)
    assert (made.layers, made.num_layers) == (2, 3)
    assert made.parameters == sum(p.numel() for p in again.parameters())
    assert made.logit_error < 1e-5
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "two").get_vocab() == tokenizer().get_vocab()
    card = (tmp_path / "two" / "README.md").read_text()
    assert "the first 2 of 3 layers" in card
    assert "pipeline_tag: text-generation" in card


@torch.no_grad()
def test_a_model_of_this_package_carries_its_code(tmp_path):
    model = tiny_models.build("depth_llama-tree")
    made = exit.export_layers(model, tmp_path / "two", layers=2, tokenizer=tokenizer())
    assert made.logit_error < 1e-5
    assert (tmp_path / "two" / "modeling_depth_llama.py").is_file()
    again = loaded_as_its_card_says(tmp_path / "two")
    ids = torch.arange(3, 15).view(1, 12)
    assert_close(again(ids).logits, truncated(anatomy_candidates(model)[0], 2)(ids).logits)


def test_the_accuracy_chooses_the_layers(labelled, tmp_path, without_fresh_process):
    model = sharpened("bert-classifier", 2.0, torch.float32)
    known = taught(model, labelled)
    results = exit.sweep(model, known, tokenizer=tokenizer(), repeats=0, threshold=[1.0])
    for share, most in ((0.05, results.headline["effective_depth"]["value"]), (0.025, 3), (0.9, 2)):
        options = {"effective_depth": share, "data": known, "tokenizer": tokenizer()}
        made = exit.export_layers(model, tmp_path / f"c{share}", **options)
        assert made.layers == most if share == 0.05 else made.layers <= most
        kept = {0.05: "95 %", 0.025: "97.5 %", 0.9: "10 %"}[share]
        assert f"at least {kept} of the full model's accuracy" in (tmp_path / f"c{share}" / "README.md").read_text()
        cut = tf.AutoModelForSequenceClassification.from_pretrained(made.path)
        right = [row["label"] == answered["label"] for row, answered in zip(known, taught(cut, known), strict=True)]
        share_right = f"{100 * sum(right) / len(right):.1f}".removesuffix(".0")
        assert f"({share_right} % and 100 %; by the estimates alone" in made.notes[0]
    assert sum(right) < len(right)
    with refused("nothing is advised"):
        exit.export_layers(model, tmp_path / "d", effective_depth=0.1, data=labelled, tokenizer=tokenizer())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"layers": 4}, "first 4"),
        ({"layers": 2, "effective_depth": 0.1, "data": ["a text"]}, "--layers or --effective-depth, got both"),
        ({"effective_depth": 0.1}, "--effective-depth .* needs --data"),
        ({}, "layers"),
        ({"layers": 2, "score": "all"}, "score has no effect without --effective-depth"),
        ({"layers": 2, "output": "."}, "exists already"),
    ],
)
def test_what_cannot_be_exported_is_refused(tmp_path, options, name):
    with refused(name):
        exit.export_layers(tiny_models.build("llama"), **{"output": tmp_path / "x", **options})


def test_a_damaged_tokenizer_is_not_copied(tmp_path, without_fresh_process):
    file = checkpoint(tmp_path / "model") / "tokenizer.json"
    content = bytearray(file.read_bytes())
    content[300:302] = b"\xe7 "  # no UTF-8
    file.write_bytes(content)
    with refused(r"tokenizer\.json"):
        exit.export_layers(tmp_path / "model", tmp_path / "x", layers=1)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_is_refused_before_it_is_measured(tmp_path, texts, monkeypatch):
    monkeypatch.setattr("fulldepth.exit.elastic.read_exits", lambda *_: pytest.fail("the model was measured first"))
    options = {"effective_depth": 0.1, "data": texts, "tokenizer": tokenizer()}
    with refused("embed_tokens_per_layer"):
        exit.export_layers(zoo.build("gemma4_text", "causal-lm"), tmp_path / "x", **options)
