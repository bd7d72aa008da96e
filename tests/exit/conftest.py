"""Small labelled data, and models whose layers disagree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny_models
from skip.word_tokenizer import tokenizer, words

LABELS = ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.fixture(scope="session")
def labelled():
    """40 texts of 3 to 12 words in three classes."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(40):
        text = words(*generator.integers(0, 80, int(generator.integers(3, 13))))
        rows.append({"text": text, "label": LABELS[number % 3]})
    return rows


@pytest.fixture(scope="session")
def texts():
    """12 texts of 24 words."""
    generator = np.random.default_rng(1)
    return [words(*generator.integers(0, 80, 24)) for _ in range(12)]


@pytest.fixture
def without_fresh_process(monkeypatch):
    """Leave out the check of an export in a process of its own, where the test loads the folder itself."""
    monkeypatch.setattr("fulldepth.exit.elastic._prove", lambda *_: 0.0)


def sharpened(name, factor, dtype=torch.float64):
    """A tiny model whose last layer's weights are larger, so that probabilities cover (0, 1)."""
    model = tiny_models.build(name, dtype=dtype)
    head = next(module for key, module in model.named_modules() if key in ("classifier", "score", "lm_head"))
    head.weight.data.mul_(factor)
    return model


@torch.no_grad()
def taught(model, rows):
    """The rows with the model's own answers as labels: a model that is right on all of them."""
    logits = (model(**tokenizer()(row["text"], return_tensors="pt", return_token_type_ids=True)).logits for row in rows)
    return [{**row, "label": LABELS[int(each.argmax())]} for row, each in zip(rows, logits, strict=True)]
