"""Tiny decoders that can be run layer by layer, besides those of `tiny_models`."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn

import tiny_models as tm
from fulldepth.architectures import SKIPPED

LLAMA = SKIPPED["llama"]
tm.UNLISTED |= {
    "llama-fast": tm.built(LLAMA, **tm.DECODER, skipped_attention=[1], skipped_mlp=[2]),
    "mistral-window": tm.built(tf.MistralForCausalLM, **tm.DECODER, sliding_window=6),
    "mixtral": tm.built(tf.MixtralForCausalLM, **tm.DECODER, num_local_experts=4),
    "bloom": tm.built(
        tf.BloomForCausalLM, vocab_size=tm.VOCAB, hidden_size=tm.WIDTH, n_layer=tm.LAYERS, n_head=tm.HEADS
    ),
    "mamba": tm.built(tf.MambaForCausalLM, vocab_size=tm.VOCAB, hidden_size=tm.WIDTH, num_hidden_layers=tm.LAYERS),
}
DECODERS = [
    *("llama", "qwen2", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_neox-serial", "opt", "phi3", "granite", "olmo2"),
    *("cohere", "falcon", "depth_llama", "depth_llama-hyper", "mistral-window", "mixtral", "bloom"),
    "llama-fast",
]
FLOAT32 = ("gemma2", "bloom", "mixtral")
"""Stock models that fail in float64: NaN from padding in eager attention, or no product of experts."""


def build(name, *, late=1.0, seed=0):
    """A decoder in float64 where possible, without an end of text.

    `late` < 1 shrinks the layers after the first, so that drafts agree.
    """
    torch.manual_seed(seed)
    model = tm.build(name, seed=seed, dtype=torch.float32 if name in FLOAT32 else torch.float64)
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    with torch.no_grad():
        for block in blocks[1:]:
            for part, parameter in block.named_parameters():
                if parameter.ndim > 1 or part.endswith("bias"):
                    parameter.mul_(late)
    model.generation_config.eos_token_id = None
    return model


def prompts(rows=2, length=9, padded=3, seed=2):
    """Prompts of different lengths: row b is padded on the left by `b * padded` positions."""
    ids = tm.token_ids(rows, length, seed)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : min(row * padded, length - 1)] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask}
