"""A recipe that trains in a second: its own text, its own tokenizer, a model of a few thousand weights."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import yaml

from cli.conftest import main  # noqa: F401
from data.conftest import jsonl
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.settings import layer, read
from fulldepth.settings.train import TrainSettings
from fulldepth.training import train
from fuzz.oracle import TIMED
from golden.tables import MODEL

ENCODER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
ENCODER |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
DETR = {
    "type": "detr",
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_queries": 6,
    "dropout": 0.0,
}
SETTINGS = {
    "model": MODEL,
    "steps": 8,
    "global_batch_size": 4,
    "sequence_length": 24,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "eval_every": 3,
    "save_every": 3,
}
SHORT = {"steps": 2, "eval_every": 2, "save_every": 2}
"""Changes of those settings."""
WORDS = {"bad": ["dull", "bleak", "cold", "sour"], "good": ["fine", "lovely", "bright", "warm"]}


def settings(path):
    """Of a recipe file."""
    return layer(TrainSettings, read(path, "train"))


def train_by(path, folder, **options):
    """Train by a recipe file."""
    return train(settings(path), folder, **options)


def interrupted(folder, step, copy):
    """A copy of a run that has not come to a checkpoint."""
    shutil.rmtree(shutil.copytree(folder, copy) / f"checkpoint-{step}")
    return copy


def without_times(table):
    """The rows that are the same whenever a recipe is run."""
    return table[~table.measure.isin(TIMED)].reset_index(drop=True)


def sentences(path, count, seed=0):
    """Sentences of two to six words, whose class is that of their words."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(count):
        label = sorted(WORDS)[number % 2]
        chosen = " ".join(rng.choice(WORDS[label], 2 + number % 5))
        rows.append({"sentence": f"film {seed} {number} is {chosen}", "label": label})
    return jsonl(path, *rows)


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A text file of many documents and a tokenizer for it."""
    folder = tmp_path_factory.mktemp("sources")
    text = builtin_texts("heldout")[0][:60_000]
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if len(p.split()) > 20]
    train_tokenizer(paragraphs, vocab_size=400).save_pretrained(folder / "tokenizer")
    return jsonl(folder / "text.jsonl", *({"text": paragraph} for paragraph in paragraphs)), folder / "tokenizer"


@pytest.fixture
def recipe(sources, tmp_path):
    """`recipe(**changes)`: a recipe file; a mapping changes single keys, and one with a checkpoint replaces them."""

    def write(**changes):
        text, tokenizer = sources
        settings = {
            **SETTINGS,
            "data": {"name": str(text), "validation_share": 0.2, "validation_sequences": 6},
            "tokenizer": str(tokenizer),
        }
        for key, value in changes.items():
            merged = isinstance(value, dict) and "checkpoint" not in value
            settings[key] = {**settings.get(key, {}), **value} if merged else value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    return write
