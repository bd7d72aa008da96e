"""Readers besides transformers give the logits of the exports, wherever they are installed."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest
import torch

import tiny_models
from fulldepth.execution.readers import read
from fulldepth.skip.exports.export import export, load
from skip import planned
from skip.exports.test_export import ids, logits, relative
from skip.exports.test_older_transformers import KINDS

PLACES = {"mlx": "FULLDEPTH_MLX", "llama.cpp": "FULLDEPTH_LLAMA_CPP", "vllm": "FULLDEPTH_VLLM"}
"""Reader -> variable with the path of a Python that has it; for llama.cpp a colon and that of its converter follow."""
WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
"""vLLM wants heads of 32 channels or more."""


def place(reader):
    """The arguments by which a reader runs; the test is skipped without."""
    if found := os.environ.get(PLACES[reader]):
        interpreter, *further = found.split(":")
        return further, interpreter
    if reader == "mlx" and find_spec("mlx_lm"):
        return [], sys.executable
    return pytest.skip(f"{PLACES[reader]} names no Python that has it")


def wide(name, rope):
    """A model with heads of 32 channels, and attention that is far from uniform."""
    plain = tiny_models.build(name)
    config = type(plain.config).from_dict(plain.config.to_dict() | WIDE | {"rope_parameters": rope})
    torch.manual_seed(1)
    model = type(plain)(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30.0)
        for weight_name, weight in model.named_parameters():
            if any(part in weight_name for part in ("q_proj", "k_proj")):
                weight.mul_(12.0)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("format", "kind"), [("folded", "llama3"), ("decilm", "llama3"), ("decilm", "qwen2")])
@pytest.mark.parametrize("reader", list(PLACES))
def test_a_reader_gives_the_logits_of_transformers(reader, format, kind, tmp_path, monkeypatch):
    further, interpreter = place(reader)
    monkeypatch.setattr("fulldepth.skip.exports.export.prove", lambda *_: 0.0)
    model = wide(*KINDS[kind])
    folder = export(planned.plan(model, [1, 3]), model, format, tmp_path / "out").path
    found, said = read(folder, ids(), reader, *further, interpreter=interpreter)
    assert relative(found, logits(load(folder))) < 1e-5
    assert said.cache_error < 1e-5


@pytest.mark.parametrize(("blocks", "said"), [([2], True), ([3], False)])
def test_layers_that_no_longer_follow_the_period_are_named(blocks, said, tmp_path, monkeypatch):
    monkeypatch.setattr("fulldepth.skip.exports.export.prove", lambda *_: 0.0)
    model = tiny_models.build("gemma2")  # sliding, full, sliding
    notes = export(planned.plan(model, blocks, "layer", values=None), model, "layer", tmp_path / "out").notes
    assert any("another model without an error" in note for note in notes) is said
