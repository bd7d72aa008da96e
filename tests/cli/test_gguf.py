"""A GGUF file goes through every command as the same model in safetensors does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fulldepth
import gguf_files
from fulldepth.errors import FulldepthError
from fulldepth.hf import load_tokenizer
from fulldepth.skip import export, search
from fulldepth.training import TrainSettings, train
from fulldepth.training.model import build_config
from fulldepth.training.settings import ModelSettings

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


@pytest.mark.slow
def test_searched_and_exported_alike(pair, tmp_path):
    options = {"blocks": 1, "limit": 10, "sequence_length": LENGTH, "fit": False, "device": "cpu"}
    plans = [search(place, "corpus:builtin", **options) for place in pair]
    assert plans[0].blocks == plans[1].blocks
    assert plans[0].losses == pytest.approx(plans[1].losses, rel=1e-5)
    export(plans[0], pair[0], "fast", tmp_path / "fast")
    text = "<|im_start|>the 123 of<|im_end|>"
    own, stock = AutoTokenizer.from_pretrained(tmp_path / "fast"), load_tokenizer(pair[0])
    assert own.encode(text) == stock.encode(text)
    assert own.chat_template == gguf_files.CHAT


@pytest.mark.slow
def test_trained_on_alike(pair, tmp_path):
    losses = []
    for number, place in enumerate(pair):
        settings = TrainSettings.model_validate(
            yaml.safe_load(f"""
            model: {{checkpoint: {place}}}
            tokenizer: {place}
            sequence_length: {LENGTH}
            global_batch_size: 4
            steps: 3
            warmup_steps: 1
            eval_every: 3
            save_every: 3
            """)
        )
        results = train(settings, tmp_path / str(number))
        table = results.table
        losses.append(table[(table.measure == "validation_loss")]["value"].tolist())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0]


def test_no_classifier_starts_from_it(pair):
    with pytest.raises(FulldepthError, match="is a GGUF file, which holds a language model"):
        build_config(ModelSettings(checkpoint=str(pair[0])), task="text-classification", classes=("a", "b"))
