"""Runs that start from a checkpoint: its configuration is the base, and its weights decide what is tied."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from safetensors.torch import load_file

import tiny_models
from fulldepth.architectures import DepthLlamaConfig
from fulldepth.settings import assignments, layer, names, read
from fulldepth.settings.train import SWITCHES, TrainSettings
from fulldepth.training import train
from fulldepth.training.evaluation import evaluate_held_out
from json_files import read_json, write_json
from refusals import refused
from skip.word_tokenizer import tokenizer

SMALL = ["steps=1", "eval_every=1", "save_every=1", "global_batch_size=2", "sequence_length=16"]


@pytest.fixture
def start(tmp_path):
    """`start(flag, name)`: a model of another width than any recipe, with its own output layer, and a tokenizer."""

    def save(flag, name="llama"):
        model = tiny_models.build(name)
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.save_pretrained(tmp_path / "start")
        tokenizer().save_pretrained(tmp_path / "start")
        path = tmp_path / "start" / "config.json"
        write_json(path, read_json(path) | {"tie_word_embeddings": flag})
        return tmp_path / "start"

    return save


def run_from(folder, recipe, tmp_path, *changes):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{" ".join(f"w{(n + i) % 8}" for i in range(24))}"}}\n' for n in range(40)))
    data = [
        f"data.name={text}",
        "data.across_documents=true",
        "data.validation_share=0.5",
        "data.validation_sequences=4",
    ]
    given = assignments([f"model.checkpoint={folder}", *data, *SMALL, *changes])
    return train(layer(TrainSettings, read(recipe, "train"), given), tmp_path / "run")


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("recipe", ["tiny-llama", "tiny-jreg"])
def test_a_run_starts_from_the_checkpoint_as_it_is(start, tmp_path, recipe, flag, monkeypatch):
    """Whatever its configuration says of tying, and whatever sizes the recipe has for a model from scratch."""
    folder, batches, sizes = start(flag), [], []

    def noting(*given, data, collate, batch_size, shapes):
        assert not shapes
        sizes.append(batch_size)
        batches.append(collate([data[index] for index in range(len(data))]))
        return evaluate_held_out(*given, data=data, collate=collate, batch_size=batch_size)

    monkeypatch.setattr("fulldepth.training.run.evaluate_held_out", noting)
    results = run_from(folder, recipe, tmp_path, "micro_batch_size=2")
    assert sizes == [2, 2], "a run that is sized to fit into memory is evaluated in batches of that size"
    model = tf.LlamaForCausalLM.from_pretrained(folder).eval()
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    last = tmp_path / "run" / "checkpoint-1"
    assert "lm_head.weight" in load_file(last / "model.safetensors")
    assert read_json(last / "config.json")["tie_word_embeddings"] is False
    assert tf.AutoTokenizer.from_pretrained(last).get_vocab() == tokenizer().get_vocab()
    said = [line for line in results.meta["warnings"] if "tie_word_embeddings" in line]
    assert len(said) == flag
    with torch.no_grad():
        logits = model(input_ids=batches[0]["input_ids"]).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1).double(), batches[0]["labels"][:, 1:].flatten())
    assert results.values("validation_loss", "mean")[0] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2"])
def test_an_output_layer_is_found_by_its_name_in_the_file(start, tmp_path, name):
    """GPT-NeoX stores it as `embed_out.weight`."""
    folder = start(True, name)
    results = run_from(folder, "tiny-llama", tmp_path)
    last = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1")
    assert last.config.tie_word_embeddings is False
    assert any("tie_word_embeddings" in line for line in results.meta["warnings"])
    weight = tf.AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    torch.testing.assert_close(last.lm_head.weight, weight, rtol=0, atol=0.05)  # one step away
    assert not torch.allclose(last.get_input_embeddings().weight, weight, rtol=0, atol=0.05)


def test_an_output_layer_of_its_own_is_not_dropped_on_request(start, tmp_path):
    with refused("separate output layer"):
        run_from(start(False), "tiny-llama", tmp_path, "model.tie_word_embeddings=true")


def test_of_a_recipes_model_only_the_switches_apply_to_a_checkpoint():
    own = {field.name for field in fields(DepthLlamaConfig)} - {field.name for field in fields(tf.LlamaConfig)}
    assert own == set(SWITCHES) - {"type"}
    named = {"model": {"checkpoint": "folder", "attention_dropout": 0.5}}
    for recipe in names("train"):
        below = read(recipe, "train")
        made = layer(TrainSettings, below, named)
        ours = below["model"].get("type") == "depth_llama"
        switches = {key for key in SWITCHES if key in below["model"] and ours}
        assert made.model.model_dump(exclude_unset=True).keys() == switches | {"checkpoint", "attention_dropout"}
        assert made.tokenizer is made.processor is None
        assert made.steps == below["steps"]
    same = layer(TrainSettings, named | {"tokenizer": "t"}, named)
    assert same.tokenizer == "t"
