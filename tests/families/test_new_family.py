"""A family that a contributor adds: one entry in `hf/families.py` serves measure, train, search and export.

Its only member is a Llama whose modules have other names. What every verb says of it is what it says of the Llama.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaModel, LlamaRMSNorm

import tiny_models
from fulldepth import measure, skip
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import FAMILIES
from fulldepth.hf.families import LLAMA
from losses.trained_step import examples, gradient
from skip.word_tokenizer import tokenizer, words

NAMES = {
    "model.layers": "model.stack",
    "self_attn": "mixer",
    "mlp": "feed",
    "input_layernorm": "before_mixer",
    "post_attention_layernorm": "before_feed",
}
"""Llama's names -> the new family's."""
ROW = replace(
    LLAMA,
    name="renamed",
    blocks="stack",
    attention="mixer",
    mlp="feed",
    attention_norm="before_mixer",
    mlp_norm="before_feed",
    value="mixer.v_proj",
)
PAIRS = [{"prompt": words(n, n + 1), "response": " " + words(*((7 * n + i) % 80 for i in range(4)))} for n in range(10)]


class RenamedConfig(tf.LlamaConfig):
    model_type = "renamed"


class RenamedBlock(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.mixer, self.feed = LlamaAttention(config, index), LlamaMLP(config)
        self.before_mixer, self.before_feed = (LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in "12")

    def forward(self, hidden_states, **kwargs):
        x = hidden_states + self.mixer(hidden_states=self.before_mixer(hidden_states), **kwargs)[0]
        return x + self.feed(self.before_feed(x))


class RenamedModel(LlamaModel):
    config_class = RenamedConfig

    def __init__(self, config):
        super().__init__(config)
        del self.layers
        self.stack = nn.ModuleList(RenamedBlock(config, index) for index in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, *args, **kwargs):
        self.__dict__["layers"] = self.stack  # what the stock forward pass runs through; no second registration
        return super().forward(*args, **kwargs)


class RenamedForCausalLM(tf.LlamaForCausalLM):
    config_class = RenamedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = RenamedModel(config)
        self.post_init()


def renamed(name: str) -> str:
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def pair(dtype=torch.float64):
    """A Llama, and the same model of the new family."""
    llama = tiny_models.build("llama", dtype=dtype)
    made = RenamedForCausalLM(RenamedConfig(**llama.config.to_dict() | {"model_type": "renamed"})).to(dtype).eval()
    made.load_state_dict({renamed(name): weight for name, weight in llama.state_dict().items()})
    return llama, made


def verdicts(model, folder):
    """What measure, a step of training and a search say of a model."""
    texts = [" ".join(pair.values()) for pair in PAIRS]
    rows = measure(model, texts, tokenizer=tokenizer(), sequence_length=16, measures=["displacement", "coherence"])
    step, parts = gradient(model, examples("llama", 4), {"jump": 1.0}, str(folder))
    plan = skip.search(model, PAIRS, 1, tokenizer=tokenizer())
    return rows.table, step, parts, plan


def test_one_entry_serves_every_verb(tmp_path, monkeypatch):
    monkeypatch.setattr("fulldepth.skip.exports.export.prove", lambda *_: 0.0)
    monkeypatch.setattr(RenamedForCausalLM, "__module__", "transformers.models.renamed")  # as if it came with them
    llama, made = pair()
    with pytest.raises(FulldepthError, match="its attention and MLP modules are not known"):
        skip.search(made, PAIRS, 1, tokenizer=tokenizer())
    monkeypatch.setitem(FAMILIES, "renamed", (ROW,))
    assert find_anatomy(made).family is ROW
    expected, got = (verdicts(model, tmp_path / type(model).__name__) for model in (llama, made))
    pd.testing.assert_frame_equal(got[0], expected[0])
    assert got[1].keys() == {renamed(name) for name in expected[1]}
    assert all(torch.equal(got[1][renamed(name)], change) for name, change in expected[1].items())
    assert got[2] == expected[2]
    assert (got[3].blocks, got[3].losses, got[3].scalars) == (
        expected[3].blocks,
        expected[3].losses,
        expected[3].scalars,
    )
    folded = []
    for model, plan in ((llama, expected[3]), (made, got[3])):
        folder = tmp_path / f"folded-{model.config.model_type}"
        skip.export(plan, model, "folded", folder)
        folded.append(type(model).from_pretrained(folder, dtype="auto").state_dict())
    assert all(torch.equal(folded[1][renamed(name)], weight) for name, weight in folded[0].items())
