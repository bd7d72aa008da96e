"""Floating-point operations of models and of their parts, counted from shapes without running the model.

Only matrix products are counted, with a multiplication and an addition as two operations, as in
`torch.utils.flop_counter.FlopCounterMode`. Of E experts a token visits k, which are counted with their router. Not
counted: norms, softmax, rotary embeddings, activation functions and sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from inspect import signature
from operator import mul
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulldepth.hf import (
    Anatomy,
    Block,
    Classifier,
    anatomy_candidates,
    exit_heads_of,
    image_config,
    is_offloaded,
    layer_config,
    stacked_experts,
    task_of,
)
from fulldepth.hf.scalars import ROLES

TRAINING = 3
"""Cost of a training step relative to a forward pass; the backward pass costs twice as much as the forward pass."""
KEPT_BYTES = 60
"""Approximate bytes that autograd keeps per token, block and channel of the state: 58 in a bfloat16 Llama with an MLP
of 3.5 times the width, 82 in a float32 one, without the scores of eager attention."""
MAX_KEPT_BYTES = 4 << 30
"""Bytes that autograd may keep for all blocks; above this, gradient checkpointing is used."""

Variant = frozenset[Block]
"""A variant of a model: its blocks that are removed."""


def weight_products(module: nn.Module | None) -> float:
    """2 * inputs * outputs of a linear layer, also if packed by GPTQ or AWQ, or a router; 0 for other modules."""
    weight = getattr(module, "weight", None)
    is_router = (
        isinstance(getattr(module, "top_k", None), int) and isinstance(weight, nn.Parameter) and weight.ndim == 2
    )
    if isinstance(module, nn.Linear | Conv1D) or is_router:  # all hold one matrix
        return 2.0 * module.weight.numel()  # type: ignore[union-attr, operator]
    if hasattr(module, "qweight"):
        packed: Any = module
        return 2.0 * float(packed.in_features * packed.out_features)
    return 0.0


def token_products(root: nn.Module, outside: Collection[nn.Module | None] = ()) -> float:
    """Operations of one token in the matrices of a module: 2 * inputs * outputs each, k / E of them for E experts.

    Args:
        root: a block or a model.
        outside: modules inside it that are not counted.
    """
    total = 0.0
    for block in root.modules():
        total += 0.0 if block in outside else weight_products(block)
        for name, experts in block.named_children():
            stacked = stacked_experts(experts)
            if stacked:
                share = _visited(block, experts, len(next(iter(stacked.values()))))
                total += share * sum(2.0 * weight.numel() for weight in stacked.values())
            elif name == "experts" and isinstance(experts, nn.ModuleList):  # counted with `root.modules()`, all of them
                share = _visited(block, None, len(experts))
                total -= (1 - share) * sum(weight_products(part) for part in experts.modules())
    return total


def _visited(block: nn.Module, experts: nn.Module | None, count: int) -> float:
    """Share of a block's experts that one token visits: all, unless the block has a `top_k`.

    Experts that read only the states, as Llama 4's, run on every token, most of them on zeros.
    """
    top_k = next((k for part in block.modules() if isinstance(k := getattr(part, "top_k", None), int)), count)
    reads_all = experts is not None and len(signature(experts.forward).parameters) == 1
    return 1.0 if reads_all else min(top_k, count) / count


def attention_width(config: PreTrainedConfig, attention: nn.Module | None = None) -> int:
    """H d_h: heads times channels of each, from the attention module or else the configuration."""
    heads = getattr(config, "num_attention_heads", None) or 0
    channels = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
    if not isinstance(channels, int):
        channels = getattr(config, "hidden_size", 0) // max(1, heads)
    return heads * channels


class Span(NamedTuple):
    """Which earlier tokens a causal layer sees: all, those of a sliding window, those of its chunk, or none."""

    kind: str = "all"
    """`all`, `window`, `chunk` or `none` (linear attention, convolutions, experts alone)."""
    size: int = 0
    """Tokens of the window or of a chunk."""

    def keys(self, sequence_length: int) -> float:
        """Keys that a token sees, averaged over the positions of a sequence of this length."""
        if self.kind == "none":
            return 0.0
        if self.kind == "chunk":
            whole, rest = divmod(sequence_length, self.size)
            total = whole * _triangle(self.size) + _triangle(rest)
        else:
            first = sequence_length if self.kind == "all" else min(self.size, sequence_length)
            total = _triangle(first) + (sequence_length - first) * first
        return total / sequence_length

    def share(self, sequence_length: int) -> float:
        """The same as a share of the keys that a token sees in a layer that sees all."""
        return self.keys(sequence_length) / Span().keys(sequence_length)


def _triangle(positions: int) -> float:
    return positions * (positions + 1) / 2


def attention_spans(config: PreTrainedConfig) -> list[Span]:
    """Return the span of earlier tokens that each layer of a causal model sees.

    Args:
        config: its `layer_types` state the kind of each layer. Without them all layers have its window, or its chunks,
            if it has any, as in transformers. Kinds that select keys by their content count as full attention.
    """
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    return [_span(layer_config(config, layer), kind) for layer, kind in enumerate(kinds, start=1)]


def _span(config: PreTrainedConfig, kind: str | None) -> Span:
    """Return the span that a layer of this kind sees; without a kind it has the model's window or chunks."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if kind in ("linear_attention", "mamba", "conv", "moe"):
        return Span("none")
    if window and kind in ("sliding_attention", "hybrid_sliding", None):
        return Span("window", window)
    if chunk and kind in ("chunked_attention", None):
        return Span("chunk", chunk)
    return Span()


def visible_keys(config: PreTrainedConfig, sequence_length: int) -> list[float]:
    """Keys that a token sees in each layer of a causal model, averaged over the positions of a sequence.

    At position t (from 1) it sees t keys, with a sliding window of W at most W, and in chunks of C those of its chunk,
    (t - 1) mod C + 1. Layers without keys have 0.

    Args:
        config: as for `attention_spans`.
        sequence_length: T.
    """
    return [span.keys(sequence_length) for span in attention_spans(config)]


@dataclass(frozen=True)
class TokenFlops:
    """Operations of one token in a forward pass, averaged over the positions of a sequence."""

    linear: float
    """Linear layers except the head: 2 * inputs * outputs each."""
    head: float
    """Output head: 2 D V."""
    attention: float
    """Scores and weighted values over the keys visible to a causal model: 4 H d_h (T + 1) / 2 per layer (fewer keys
    with a sliding window or in chunks, see `visible_keys`), as in kernels that skip the masked half."""
    attention_full: float
    """The same over all T keys, 4 H d_h T per layer that has keys, as in eager attention and most published counts."""
    extra: float
    """Other operations of the architecture: from its configuration (`extra_flops`), or the patches of an image."""

    @property
    def forward(self) -> float:
        """Total, with causal attention."""
        return self.linear + self.head + self.attention + self.extra

    @property
    def training(self) -> float:
        """Forward and backward pass: three times the forward pass, without recomputation by the architecture."""
        return TRAINING * self.forward


def forward_flops(model: PreTrainedModel, sequence_length: int, anatomy: Anatomy | None = None) -> TokenFlops | None:
    """Operations of one token in sequences of T tokens (of an image: of one of its T patches and special tokens).

    The head of a classifier of texts or images runs once a sample, unless it reads the last position: then the model is
    causal, and its stock class applies the head to all positions before it selects one. All other classifiers attend to
    all positions.

    Args:
        model: with its weights or on the meta device.
        sequence_length: T.
        anatomy: of a classifier; None = that of the table of families, which holds no head of other families.

    Returns:
        The operations; None for a classifier whose head is not known.
    """
    reads_images = task_of(model) == "image-classification"
    config = image_config(model.config) if reads_images else model.config.get_text_config()
    heads = [model.get_output_embeddings() or nn.Identity()]
    causal = True
    pixels = 0.0
    if task_of(model).endswith("-classification"):
        anatomy = anatomy or anatomy_candidates(model)[0]
        if anatomy.head is None:
            return None
        heads = anatomy.head_modules(anatomy.head)
        causal = anatomy.head.pool == "last"
        size = getattr(config, "patch_size", None)
        patches = (config.image_size // size) ** 2 if isinstance(size, int) else 0
        kernels = sum(2.0 * part.weight.numel() for part in model.modules() if isinstance(part, nn.Conv2d))
        pixels = kernels * patches / sequence_length
    configs = type(config), type(model.config)
    stacks = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    # Text does not pass towers of images or sound.
    towers = [part for part in stacks if model.main_input_name == "input_ids" and type(part.config) not in configs]
    outside = {part for module in (*heads, *exit_heads_of(model).values(), *towers) for part in module.modules()}
    head = sum(weight_products(part) for module in heads for part in module.modules())
    keys = visible_keys(config, sequence_length)
    widths = [4.0 * attention_width(layer_config(config, layer)) for layer in range(1, len(keys) + 1)]
    full = sequence_length * sum(width for width, visible in zip(widths, keys, strict=True) if visible > 0)
    extra = getattr(config, "extra_flops", None)
    return TokenFlops(
        linear=token_products(model, outside),
        head=head if causal else head / sequence_length,
        attention=sum(map(mul, widths, keys)) if causal else full,
        attention_full=full,
        extra=(extra(sequence_length) if extra is not None else 0.0) + pixels,
    )


class Shape(NamedTuple):
    """Shape of a batch, on which its cost depends: sequences, positions, and labelled positions."""

    batch: int
    length: int
    labelled: int


def parts_of(variant: Variant, layer: int) -> tuple[str, ...]:
    """The removed parts of a 1-based layer, in a fixed order; empty if it is whole."""
    return tuple(part for part in ("attention", "layer", "mlp") if Block(layer, part) in variant)


def attends(variant: Variant, layer: int) -> bool:
    """Return True if a 1-based layer keeps its attention."""
    return not {"attention", "layer"} & set(parts_of(variant, layer))


@dataclass(frozen=True)
class Costs:
    """Operations of a model's parts, by 1-based layer."""

    granularity: str
    attention: tuple[float, ...]
    """Per token, in the projections of each layer's attention: 2 * inputs * outputs each."""
    keys: tuple[float, ...]
    """Per token and key, in each layer's attention: 4 H d_h. A layer that sees all tokens has T keys, as in
    `TokenFlops.attention_full`; one with a window or chunks the share of them that its `spans` state."""
    mlp: tuple[float, ...]
    """Per token, in all other products of each block: of experts, those that a token visits."""
    head: float
    """Per token, in the output head: 2 D V."""
    kept: float = 0.0
    """Approximate bytes that autograd keeps per token in all blocks; infinite for a model with offloaded weights,
    because autograd would also keep the weights of every block."""
    able: tuple[Block, ...] = ()
    """Blocks that `granularity` can remove, sorted; a whole layer of `any` is its attention and its MLP."""
    global_layers: frozenset[int] = frozenset()
    """Layers whose attention sees all tokens, of a model that also has sliding windows: one keeps its attention."""
    zeroes: bool = False
    """Whether removed branches are computed and their outputs set to zero (see `Switches`)."""
    whole_passes: bool = False
    """Whether every variant takes a forward pass of its own, because layers cannot be run one by one."""
    spans: tuple[Span, ...] = ()
    """What the attention of each layer sees; empty = all tokens."""

    @property
    def num_layers(self) -> int:
        """L, number of layers."""
        return len(self.mlp)

    def products_of_keys(self, layer: int, length: int) -> float:
        """Per token, scores and weighted values of one layer in sequences of this length."""
        share = self.spans[layer - 1].share(length) if self.spans else 1.0
        return self.keys[layer - 1] * length * share

    def block(self, layer: int, shape: Shape, removed: Collection[str] = ()) -> float:
        """One layer over a batch, without the removed parts (unless `zeroes`)."""
        attention = self.attention[layer - 1] + self.products_of_keys(layer, shape.length)
        left = {"attention": attention, "mlp": self.mlp[layer - 1]}
        tokens = shape.batch * shape.length
        gone = () if self.zeroes else removed
        return tokens * sum(cost for part, cost in left.items() if not {part, "layer"} & set(gone))

    def whole(self, variant: Variant, shape: Shape, *, every_position: bool = False) -> float:
        """A forward pass of a variant; the head runs at labelled positions, or at all as in a stock model."""
        rows = shape.batch * shape.length if every_position else shape.labelled
        layers = range(1, self.num_layers + 1)
        return sum(self.block(layer, shape, parts_of(variant, layer)) for layer in layers) + rows * self.head

    def shared(self, variants: Collection[Variant], shape: Shape) -> float:
        """A pass of several variants that share each block's output as long as they skip the same earlier blocks.

        With `whole_passes` nothing is shared.
        """
        if self.whole_passes:
            return sum(self.whole(variant, shape) for variant in variants)
        layers = range(self.num_layers)
        # Sorted by the removed parts of each layer, neighbours share the longest prefix of layers.
        ordered = sorted({tuple(parts_of(variant, layer + 1) for layer in layers) for variant in variants})
        total = 0.0
        before = None
        cost = {key: self.block(key[0] + 1, shape, key[1]) for removed in ordered for key in enumerate(removed)}
        for removed in ordered:
            start = 0 if before is None else next(layer for layer in layers if removed[layer] != before[layer])
            total += sum(cost[layer, removed[layer]] for layer in layers[start:]) + shape.labelled * self.head
            before = removed
        return total

    def checkpoints(self, shape: Shape, checkpointing: bool | None = None) -> bool:
        """Return True if a training step recomputes blocks in the backward pass; None: above `MAX_KEPT_BYTES`."""
        if checkpointing is not None:
            return checkpointing
        return shape.batch * shape.length * self.kept > MAX_KEPT_BYTES

    def training(self, variant: Variant, shape: Shape, *, checkpointing: bool | None = None) -> float:
        """A forward and a backward pass that trains scalars.

        Products with frozen weights count twice, because these have no gradient. Products of two activations (scores
        and weighted values) count three times; so does the head, whose logits are recomputed in the backward pass. With
        gradient checkpointing, the forward pass of the blocks counts once more.
        """
        head = shape.labelled * self.head
        attending = [layer for layer in range(1, self.num_layers + 1) if attends(variant, layer)]
        of_token = sum(self.products_of_keys(layer, shape.length) for layer in attending)
        scores = shape.batch * shape.length * of_token
        passes = 3 if self.checkpoints(shape, checkpointing) else 2
        return passes * (self.whole(variant, shape) - head) + scores + 3 * head

    def candidates(self, removed: Variant) -> list[Variant]:
        """The variants that lack one more block, or with granularity `any` one more whole layer."""
        more = [{block} for block in self.able if block not in removed]
        if self.granularity == "any":
            layers = [layer for layer, part in self.able if part == "attention"]
            pairs = [{Block(layer, "attention"), Block(layer, "mlp")} for layer in layers]
            more += [pair for pair in pairs if pair <= set(self.able) - removed]
        variants = [removed | blocks for blocks in sorted(more, key=sorted)]
        return [v for v in variants if not self.global_layers or any(attends(v, n) for n in self.global_layers)]


def costs_of(anatomy: Anatomy, classifier: Classifier, granularity: str, keep: Collection[int] = ()) -> Costs:
    """Costs of a model, which may be on the meta device; no block of the layers `keep` can be removed."""
    attention = []
    keys = []
    mlp = []
    for layer in anatomy.layers:
        part = anatomy.part(layer, "attention")
        inside = 0.0 if part is None else token_products(part)
        attention.append(inside)
        width = attention_width(layer_config(anatomy.config, layer), part) or anatomy.width
        keys.append(0.0 if part is None else 4.0 * width)
        mlp.append(token_products(anatomy.blocks[layer - 1]) - inside)
    head = sum(weight_products(module) for path in classifier.modules for module in path.modules())
    kept_bytes = math.inf if is_offloaded(anatomy.body) else float(KEPT_BYTES * anatomy.width * anatomy.num_layers)
    layers: dict[str, Any] = {"layer": anatomy.layers}
    parts = ROLES if granularity == "any" else (granularity,)
    products = {"attention": attention, "mlp": mlp, "layer": [a + m for a, m in zip(attention, mlp, strict=True)]}
    removable = [
        Block(n, part)
        for part in parts
        for n in layers.get(part) or anatomy.layers_with(part)
        if n not in keep and products[part][n - 1] > 0  # an export may lack the part
    ]
    kinds = getattr(anatomy.config, "layer_types", None) or []
    full = frozenset(n for n, kind in enumerate(kinds, start=1) if kind == "full_attention")
    costs = tuple(attention), tuple(keys), tuple(mlp), head, kept_bytes
    spans = tuple(attention_spans(anatomy.config))
    return Costs(
        granularity,
        *costs,
        tuple(sorted(removable)),
        full if len(full) < len(kinds) else frozenset(),
        spans=spans if len(spans) == anatomy.num_layers else (),
    )
