"""Memory of one training process, estimated from shapes."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.execution.flops import head_channels, key_value_heads, weight_products
from fulldepth.training.settings import TrainSettings

WEIGHT = {"float32": 4, "autocast": 4, "bfloat16": 2}
"""Precision -> bytes of a weight, a gradient, and each of AdamW's two states."""
PRODUCT = {"float32": 4, "autocast": 2, "bfloat16": 2}
"""Precision -> bytes of an input or output of linear layers and attention."""
NORM = {"float32": 12, "autocast": 13, "bfloat16": 8}
"""Precision -> bytes per channel that a norm keeps for the backward pass: input, normalised input, and output.
Statistics are float32; autocast copies the output for each matrix product, three in attention, two in the MLP."""


HEADER = {"weight": 106, "moment": 270, "token": 60}
"""Overhead in bytes: of a tensor in a safetensors file, of a tensor in `optimizer.pt`, and of a token in
`tokenizer.json`."""
RANDOM_STATE, DOCUMENTS = 15_000, 20_000
"""Bytes of one process's random states; bytes of the JSON files, schedule and record of a short run."""


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of one checkpoint on disk, over all of its files, sharded or not."""

    weights: int
    optimiser: int
    """AdamW's two moments of every trained weight, in the type of the weights."""
    rest: int
    """Headers, tokenizer, random states and documents, estimated."""

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.optimiser + self.rest


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at the start of a backward pass, without fragmentation of the allocator."""

    weights: int
    """P weights; under autocast also a bfloat16 copy of the matrices."""
    gradients: int
    optimiser: int
    """AdamW's two moments."""
    activations: int
    """What the forward pass keeps for the backward pass, without the logits."""
    logits: int
    """B T V log-probabilities (B C of a classifier) in float32, which the loss keeps for the backward pass."""
    loss_gradients: int
    """The gradients of these and of the logits, in float32, with which the backward pass begins."""

    @property
    def total(self) -> int:
        """The sum."""
        states = self.weights + self.gradients + self.optimiser
        return states + self.activations + self.logits + self.loss_gradients


def estimate_memory(model: PreTrainedModel, settings: TrainSettings, *, micro_batch: int, processes: int = 1) -> Memory:
    """Estimate the memory of one process.

    Weights, gradients and optimiser are `P` (trainable) parameters times the bytes of the precision; with FSDP2 each
    process has its share (the gathered weights of the current layer are ignored). Activations per token, with D
    channels, MLP width F, heads of d_h channels, and c bytes per product:

    - a layer: two norms (8 to 13 bytes D), attention `c (2 H + 2 H_kv) d_h` for queries, keys, values and output
      (eager: and `H T` weights), MLP `4 c F` (right with a gate; without one, 2 to 8 by activation function);
    - additional activations of the architecture, from its configuration (`extra_activation_bytes`);
    - the head: one norm.

    For Llama and `depth_llama` the estimate is within a quarter of what autograd keeps, for others within a factor of
    two (dropout and some activation functions keep more).

    Gradient checkpointing keeps each layer's input (`num_residual_streams` states if the configuration has them, else
    one) and all activations of one layer at a time. Penalties are ignored: JREG keeps scalars, aligned training chunks
    of logits, CR up to ten states of each of its layers.

    Args:
        model: on the meta device.
        settings: precision, attention, checkpointing, FSDP and sequence length are used.
        micro_batch: sequences in a forward pass.
        processes: number of processes.
    """
    precision = settings.precision
    shards = processes if settings.fsdp else 1
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    held = WEIGHT[precision]
    copies = 2 * _product_weights(model) if precision == "autocast" else 0
    config = model.config.get_text_config()
    tokens = micro_batch * settings.sequence_length
    return Memory(
        weights=((trainable + frozen) * held + copies) // shards,
        gradients=trainable * held // shards,
        optimiser=2 * trainable * held // shards,
        activations=int(tokens * _activations(config, settings)),
        logits=4 * _scores(config, settings, micro_batch),
        loss_gradients=2 * 4 * _scores(config, settings, micro_batch),
    )


def checkpoint_size(model: PreTrainedModel, settings: TrainSettings, *, processes: int = 1) -> CheckpointSize:
    """Estimate the size of a checkpoint: weights and two moments of each trained one, times the bytes of the precision.

    Args:
        model: on the meta device; tied weights are stored, and counted, once.
        settings: the precision is used.
        processes: number of processes, each of which saves its random states.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    held = WEIGHT[settings.precision]
    headers = HEADER["weight"] * len(parameters) + 3 * HEADER["moment"] * len(trained)  # two moments and a counter
    tokenizer = HEADER["token"] * getattr(model.config.get_text_config(), "vocab_size", 0)
    return CheckpointSize(
        weights=held * sum(p.numel() for p in parameters),
        optimiser=2 * held * sum(p.numel() for p in trained),
        rest=headers + tokenizer + RANDOM_STATE * processes + DOCUMENTS,
    )


def _scores(config: PreTrainedConfig, settings: TrainSettings, micro_batch: int) -> int:
    """Logits of a forward pass."""
    if settings.task.endswith("-classification"):
        return micro_batch * (config.num_labels or 0)
    return int(micro_batch * settings.sequence_length * config.vocab_size)


def _activations(config: PreTrainedConfig, settings: TrainSettings) -> float:
    """Activation bytes per token, without the logits."""
    precision, layers = settings.precision, config.num_hidden_layers
    layer = _layer(config, settings)
    own = getattr(config, "extra_activation_bytes", None)
    sizes = {"product": PRODUCT[precision], "norm": NORM[precision], "state": WEIGHT[precision]}
    extra = own(**sizes) if own is not None else 0.0
    last = NORM[precision] * config.hidden_size
    if settings.gradient_checkpointing:
        state = WEIGHT[precision] * config.hidden_size * getattr(config, "num_residual_streams", 1)
        return layers * state + layer + extra / layers + last
    return layers * layer + extra + last


def _layer(config: PreTrainedConfig, settings: TrainSettings) -> float:
    """Activation bytes per token of one plain layer."""
    product, width, channels = PRODUCT[settings.precision], config.hidden_size, head_channels(config)
    heads = getattr(config, "num_attention_heads", None) or 0
    attention = product * 2 * (heads + key_value_heads(config)) * channels
    if settings.attention == "eager":
        attention += heads * settings.sequence_length * (4 if product == 4 else 4 + product)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width
    return 2 * NORM[settings.precision] * width + attention + product * 4 * inner


def _product_weights(model: PreTrainedModel) -> int:
    """Parameters that autocast copies: those of linear layers (one multiplication and one addition each)."""
    return int(sum(map(weight_products, model.modules())) / 2)
