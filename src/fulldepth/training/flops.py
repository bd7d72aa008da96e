"""Floating-point operations of a token, from the shapes of a model that need not exist in memory.

Counted are matrix products, a multiplication and an addition as two operations; norms, softmax, rotary embeddings,
activation functions and sums are not, nor are experts of which a token uses only some.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

TRAINING = 3
"""A training step over a forward pass: the backward pass multiplies by weights and by activations, twice as much."""


@dataclass(frozen=True)
class Flops:
    """Operations of one token in a forward pass, averaged over the positions of a sequence."""

    linear: float
    """Linear layers but the head: 2 * inputs * outputs each."""
    head: float
    """Output head: 2 D V."""
    attention: float
    """Scores and weighted values over the keys that a causal model may see: 4 H d_h (T + 1) / 2 a layer (fewer keys
    with a sliding window). Kernels that skip the masked half do just this."""
    attention_full: float
    """The same over the full square, 4 H d_h T a layer, as eager attention and most published counts have it."""
    extra: float
    """What the architecture computes besides, as its configuration says (`extra_flops`)."""

    @property
    def forward(self) -> float:
        """Everything, attention with its causal half."""
        return self.linear + self.head + self.attention + self.extra

    @property
    def training(self) -> float:
        """Forward and backward pass: three times the forward pass; what an architecture makes again is left out."""
        return TRAINING * self.forward

    @property
    def checkpointed(self) -> float:
        """What gradient checkpointing computes again: everything but the head."""
        return self.forward - self.head


def forward_flops(model: PreTrainedModel, sequence_length: int) -> Flops:
    """Operations of one token in sequences of T tokens.

    Args:
        model: with its weights or on the meta device.
        sequence_length: T.

    Returns:
        The sums that `Flops` documents, with D the width, H heads of d_h channels and V tokens.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    linear = sum(_products(module) for module in model.modules() if module is not head)
    heads, channels = getattr(config, "num_attention_heads", None) or 0, head_channels(config)
    windows = _windows(config)
    seen = sum(_mean_keys(sequence_length, window) for window in windows)
    width = 4.0 * heads * channels
    extra = getattr(config, "extra_flops", None)
    return Flops(
        linear=linear,
        head=_products(head),
        attention=width * seen,
        attention_full=width * sequence_length * len(windows),
        extra=extra(sequence_length) if extra is not None else 0.0,
    )


def head_channels(config: PreTrainedConfig) -> int:
    """d_h: channels of one attention head."""
    heads = getattr(config, "num_attention_heads", None)
    given: int | None = getattr(config, "head_dim", None)
    return given or (config.hidden_size // heads if heads else 0)


def key_value_heads(config: PreTrainedConfig) -> int:
    """H_kv: heads of keys and values; as many as there are heads unless the configuration says otherwise."""
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None) or 0


def _products(module: nn.Module | None) -> float:
    """2 * inputs * outputs of a linear layer, 0 of anything else."""
    if isinstance(module, nn.Linear | Conv1D):  # both hold one matrix
        return 2.0 * module.weight.numel()
    return 0.0


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """Keys at most that each layer sees; None = all."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [getattr(config, "sliding_window", None) if "sliding" in kind else None for kind in kinds]


def _mean_keys(length: int, window: int | None) -> float:
    """Keys that a causal position sees, averaged over positions 1..T: min(position, window)."""
    seen = min(length, window or length)
    return (seen * (seen + 1) / 2 + (length - seen) * seen) / length
