"""A GGUF file goes through every command as the same model in safetensors does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fulldepth
import gguf_files
from fulldepth.hf import load_tokenizer

LENGTH = 32


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same Llama as a GGUF file and as an ordinary checkpoint, with the same tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("pair")
    path = gguf_files.write(folder / "tiny.gguf", model)
    model.save_pretrained(folder / "ordinary")
    load_tokenizer(path).save_pretrained(folder / "ordinary")
    return path, folder / "ordinary"


def test_measured_alike(pair):
    tables = [
        fulldepth.measure(place, "corpus:builtin", max_sequences=4, sequence_length=LENGTH, device="cpu").table
        for place in pair
    ]
    values = [
        table.set_index(["measure", "site", "layer", "other", "statistic"])["value"].sort_index() for table in tables
    ]
    assert values[0].index.equals(values[1].index)
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4, atol=1e-5)
