"""A recipe that trains in a second: its own text, its own tokenizer, a model of a few thousand weights."""

from __future__ import annotations

import json

import pytest
import yaml

from fulldepth.data import builtin_texts, train_tokenizer

MODEL = {
    "type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
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


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A text file of many documents and a tokenizer for it."""
    folder = tmp_path_factory.mktemp("sources")
    text = builtin_texts("heldout")[0][:60_000]
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if len(p.split()) > 20]
    rows = "\n".join(json.dumps({"text": paragraph}) for paragraph in paragraphs)
    (folder / "text.jsonl").write_text(rows + "\n", encoding="utf-8")
    train_tokenizer(paragraphs, vocab_size=400).save_pretrained(folder / "tokenizer")
    return folder / "text.jsonl", folder / "tokenizer"


@pytest.fixture
def recipe(sources, tmp_path):
    """`recipe(**changes)` writes a recipe file and gives its path; a mapping changes single keys."""

    def write(**changes):
        text, tokenizer = sources
        settings = {
            **SETTINGS,
            "data": {"name": str(text), "validation_share": 0.2, "validation_sequences": 6},
            "tokenizer": str(tokenizer),
        }
        for key, value in changes.items():
            settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return path

    return write
