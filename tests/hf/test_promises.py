"""Exports and runs do not promise layers for multi-token prediction, which transformers does not load."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import transformers as tf

from families import zoo
from fulldepth import exit
from fulldepth.hf.promises import PREDICTORS, withdraw_promises
from fulldepth.settings.train import ModelSettings
from fulldepth.skip.exports.export import export
from fulldepth.training.model import build_config
from json_files import read_json
from skip import planned
from skip.word_tokenizer import tokenizer


@pytest.mark.parametrize("writer", ["exit", "folded", "layer"])
def test_an_export_promises_only_what_it_holds(writer, tmp_path, monkeypatch):
    monkeypatch.setattr("fulldepth.skip.exports.export.prove_export", lambda *_: 0.0)
    monkeypatch.setattr("fulldepth.exit.elastic._prove", lambda *_: 0.0)
    model = zoo.build("glm4_moe", "causal-lm")
    model.config.num_nextn_predict_layers = 2
    model.generation_config.use_mtp = True
    if writer == "exit":
        made = exit.export_layers(model, tmp_path / "made", layers=2, tokenizer=tokenizer())
    else:
        plan = planned.plan(model, [2], "layer", None)
        made = export(plan, model, writer, tmp_path / "made", tokenizer=tokenizer())
    assert read_json(made.path / "config.json")["num_nextn_predict_layers"] == 0
    assert sum("multi-token prediction" in note for note in made.notes) == 1
    assert model.config.num_nextn_predict_layers == 2
    again = tf.AutoModelForCausalLM.from_pretrained(made.path)
    assert again.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False).shape == (1, 4)


def test_a_run_promises_only_what_it_trains():
    settings = ModelSettings(type="glm4_moe", num_mtp_layers=1)
    config = build_config(settings, vocab_size=96, special_tokens={"pad_token_id": 0})
    assert config.num_mtp_layers == 0


def test_all_names_of_transformers_are_known():
    for kind in map(zoo.CONFIG_MAPPING.__getitem__, zoo.HEADS["causal-lm"]):
        names = (*inspect.signature(kind.__init__).parameters, *kind.attribute_map)
        promised = {name for name in names if re.fullmatch(r"num_.*(mtp|nextn|medusa|eagle).*", name)}
        assert promised <= set(PREDICTORS), kind


@pytest.mark.parametrize("weight", ["model.mtp.0.proj.weight", "model.layers.3.nextn_embed.weight", "mtp_head.weight"])
def test_a_model_that_holds_such_layers_keeps_its_promise(weight):
    config = tf.AutoConfig.for_model("glm4_moe", num_nextn_predict_layers=2)
    assert withdraw_promises(config, ["model.norm.weight", weight]) == []
    assert config.num_nextn_predict_layers == 2
