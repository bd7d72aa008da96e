"""Floating-point operations of a token, from the shapes of a model that need not exist in memory.

Counted are matrix products, a multiplication and an addition as two operations; norms, softmax, rotary embeddings,
activation functions and sums are not, nor are experts of which a token uses only some.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulldepth.architectures import DepthLlamaConfig

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
    mixing: float
    """LIME: mixtures of the r sources of layers r = 2..L, 2 r H_kv D each; kv: 4 r H_kv^2 d_h."""
    routing: float
    """LIME: a dynamic router's weights, 2 r H_kv D in each of these layers."""
    connections: float
    """Hyper-Connections, twice a layer: 2 n (n + 1) D to mix n streams; dynamic ones 2 n (n + 2) D more."""

    @property
    def forward(self) -> float:
        """Everything, attention with its causal half."""
        return self.linear + self.head + self.attention + self.mixing + self.routing + self.connections

    @property
    def training(self) -> float:
        """Forward and backward pass: three times the forward pass; that LIME's mixtures are made again is left out."""
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
        The sums that `Flops` documents, with D the width, H heads of d_h channels (H_kv for keys and values), L layers,
        V tokens, n streams.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    linear = sum(_products(module) for module in model.modules() if module is not head)
    heads, channels = getattr(config, "num_attention_heads", None) or 0, head_channels(config)
    windows = _windows(config)
    seen = sum(_mean_keys(sequence_length, window) for window in windows)
    width = 4.0 * heads * channels
    return Flops(
        linear=linear,
        head=_products(head),
        attention=width * seen,
        attention_full=width * sequence_length * len(windows),
        mixing=_mixing(config),
        routing=_routing(config),
        connections=_connections(config),
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


def _sources(config: DepthLlamaConfig) -> int:
    """Sum of r over the layers r = 2..L that read a memory."""
    layers = config.num_hidden_layers
    return layers * (layers + 1) // 2 - 1


def _mixing(config: PreTrainedConfig) -> float:
    if not isinstance(config, DepthLlamaConfig) or config.memory == "none":
        return 0.0
    heads = key_value_heads(config)
    if config.memory == "kv":
        return 4.0 * _sources(config) * heads**2 * head_channels(config)
    return 2.0 * _sources(config) * heads * config.hidden_size


def _routing(config: PreTrainedConfig) -> float:
    if not isinstance(config, DepthLlamaConfig) or config.memory != "dynamic":
        return 0.0
    return 2.0 * _sources(config) * key_value_heads(config) * config.hidden_size


def _connections(config: PreTrainedConfig) -> float:
    if not isinstance(config, DepthLlamaConfig) or config.residual != "hyper":
        return 0.0
    streams = config.num_streams
    products = streams + 1 + (streams + 2 if config.hyper_dynamic else 0)
    return 2.0 * config.num_hidden_layers * 2 * streams * products * config.hidden_size
