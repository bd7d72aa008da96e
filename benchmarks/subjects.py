"""What the benchmarks run on: random Llamas of the two sizes that the goals name, and real text."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fulldepth.data import Sequences, builtin_texts, open_source, prepare, train_tokenizer
from fulldepth.measurement import MeasureSettings
from fulldepth.subject import Subject

SIZES = {"12 x 256": (12, 256), "6 x 768": (6, 768)}
LENGTH, VOCABULARY, BATCH = 256, 8192, 8


@cache
def sequences(count: int) -> Sequences:
    """`count` windows of 256 tokens of the built-in corpus, vocabulary 8192."""
    tokenizer = train_tokenizer(builtin_texts("train")[:3], vocab_size=VOCABULARY)
    source = open_source("corpus:builtin")
    return prepare(source, task="causal-lm", tokenizer=tokenizer, max_sequences=count, sequence_length=LENGTH)


def subject(size: str, count: int, **options: Any) -> tuple[Subject, MeasureSettings]:
    """A verified random Llama with its data."""
    layers, width = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=LENGTH,
    )
    settings = MeasureSettings(batch_size=BATCH, max_sequences=count, **options)
    model = LlamaForCausalLM(config).eval()
    return opened(model, sequences(count), settings), settings


def opened(model: Any, data: Any, settings: MeasureSettings, tokenizer: Any = None) -> Subject:
    """A model in evaluation mode with its data, proven."""
    with Subject.open(model, data, settings, tokenizer=tokenizer, device="cpu") as it:
        return it
