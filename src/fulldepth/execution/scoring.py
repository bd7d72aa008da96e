"""Losses of a model and of its variants with skipped parts, per sequence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fulldepth.core.errors import FulldepthError
from fulldepth.core.targets import IGNORE, next_targets
from fulldepth.execution.flops import Costs, Shape, Variant, costs_of, parts_of
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.hf import Anatomy, Block, Classifier, body_inputs, device_of
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches

CPU_LOGITS, DEVICE_LOGITS = 1 << 22, 1 << 27
"""Number of logits that exist at once on a CPU and on an accelerator."""
LOSS, SCALED, DIVERGENCE, AGREEMENT = "loss", "scaled", "kl", "greedy_agreement"
BASE = Variant()
"""The unmodified model."""


@dataclass(frozen=True)
class ScoredBatch:
    """A padded batch and its labelled positions, whose losses are computed."""

    inputs: Mapping[str, Tensor]
    """`input_ids` and `attention_mask`, `[B, T]`."""
    where: Tensor
    """[B, T] bool: labelled positions, whose next token is a target."""
    targets: Tensor
    """[R] next token of each labelled position."""
    owners: Tensor
    """[R] sequence, 0..B-1, of each labelled position."""
    documents: Sequence[int]
    """[B] document of each sequence (for pairs and chats, the row)."""

    @classmethod
    def of(cls, padded: Mapping[str, Tensor], documents: Sequence[int]) -> ScoredBatch:
        """A batch for scoring from a batch for training.

        Args:
            padded: `input_ids`, `attention_mask` and `labels` (not shifted), `[B, T]`.
            documents: `[B]`.
        """
        targets = next_targets(padded["labels"])
        where = targets != IGNORE
        inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
        return cls(inputs, where, targets[where], where.nonzero()[:, 0], documents)

    @property
    def shape(self) -> Shape:
        """Sequences, positions and labelled positions."""
        rows, length = self.where.shape
        return Shape(rows, length, len(self.targets))

    @property
    def tokens(self) -> list[int]:
        """Number of labelled positions of each sequence."""
        return [int(count) for count in torch.bincount(self.owners, minlength=len(self.where))]

    def to(self, device: torch.device) -> ScoredBatch:
        """The same batch on a device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return ScoredBatch(
            inputs, self.where.to(device), self.targets.to(device), self.owners.to(device), self.documents
        )


class Scorer:
    """Losses of variants of one model.

    Blocks are run one by one, and the common first layers of several variants once. In a model where that misses the
    model's own states (`LayerRunner` refuses it: a tree of layers, a memory of earlier ones), every variant takes a
    forward pass of its own (`costs.whole_passes`), and scalars are refused.

    Args:
        anatomy: a decoder with a language-model head.
        classifier: final norm and head.
        switches: skip parts of the model; entered by the caller.
        batch: a small batch on which running the blocks one by one is verified (see `LayerRunner`).
        keep: 1-based layers of which no block is a candidate.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        classifier: Classifier,
        switches: Switches,
        batch: ScoredBatch,
        *,
        keep: Collection[int] = (),
    ) -> None:
        self.anatomy, self.classifier, self.switches = anatomy, classifier, switches
        self.granularity = switches.granularity
        self.device = device_of(anatomy.model)
        self.runner: LayerRunner | None = None
        try:
            self.runner = LayerRunner(anatomy, batch.to(self.device).inputs)
        except FulldepthError as error:
            switches.no_scalars = switches.no_scalars or str(error).rstrip(".")
        costs = costs_of(anatomy, classifier, switches.granularity, keep)
        self.costs: Costs = replace(costs, zeroes=switches.zeroes, whole_passes=self.runner is None)

    @torch.no_grad()
    def sums(
        self,
        batch: ScoredBatch,
        variants: Collection[Variant],
        *,
        divergence: bool = False,
        advance: Callable[[int], None] = lambda count: None,
    ) -> dict[Variant, dict[str, list[float]]]:
        """Summed losses of every sequence under each variant, in nats.

        Common prefixes of variants are run once where layers run one by one; the head runs at labelled positions only.

        Args:
            batch: B sequences.
            variants: variants to score; `divergence` adds the unmodified model.
            divergence: also return the divergence of each variant's predictions from the unmodified model's.
            advance: called after each variant with 1.

        Returns:
            Variant -> `loss`: B sums of -log q(token), and with `divergence` also `kl`: B sums of KL(base || variant).
        """
        self.plain()
        batch = batch.to(self.device)
        kinds = (LOSS, DIVERGENCE) if divergence else (LOSS,)
        ordered = sorted({*variants, *([BASE] if divergence else [])}, key=sorted)
        sums: dict[Variant, dict[str, list[float]]] = {}
        references: list[Tensor] | None = None
        for variant, states in self._last_states(batch, ordered):
            rows = states[batch.where.to(states.device)]
            if divergence and references is None:  # the base comes first: `_leaves` visits unskipped branches first
                references = list(self.predicted(rows))
            sums[variant] = self.state_sums(rows, batch, kinds, references)
            advance(1)
        self.plain()
        return sums

    @torch.no_grad()
    def healed_sums(
        self, batch: ScoredBatch, variant: Variant, scalars: Scalars | Mapping[str, Any] | None
    ) -> dict[str, list[float]]:
        """The result of `sums` for one variant with scalars (None: without).

        Args:
            batch: B sequences.
            variant: the variant.
            scalars: scalars trained for it, as a module or as plain values.
        """
        if isinstance(scalars, Mapping):
            scalars = Scalars.from_dict(scalars, self.costs.num_layers, self.granularity)
        batch = batch.to(self.device)
        sums = self.state_sums(self.states(batch, variant, scalars), batch)
        self.plain()
        return sums

    def state_sums(
        self,
        states: Tensor,
        batch: ScoredBatch,
        kinds: Sequence[str] = (LOSS,),
        base: Iterable[Tensor | None] | None = None,
    ) -> dict[str, list[float]]:
        """Kind -> B sums over the labelled positions of each sequence, from last states.

        Args:
            states: `[R, D]` last states at the labelled positions.
            batch: on the device.
            kinds: `loss`, and with a base `kl` and `greedy_agreement` (1 where the most likely token is the same).
            base: from `predicted`, of the unmodified model.
        """
        columns: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
        for (at, part), reference in zip(self._parts(states), repeat(None) if base is None else base, strict=False):
            own = self.predictions(part)
            for kind in kinds:
                columns[kind].append(read(kind, own, batch.targets[at], reference))
        return {kind: batch_sums(torch.cat(parts or [states.new_zeros(0)]), batch) for kind, parts in columns.items()}

    def predicted(self, states: Tensor) -> Iterator[Tensor]:
        """Log-probabilities from last states `[R, D]`, part by part."""
        return (self.predictions(part) for _, part in self._parts(states))

    def plain(self) -> None:
        """Restore the unmodified model: nothing skipped, no scalars."""
        self.switches.scalars = None
        self.switches.skip(())

    def states(
        self, batch: ScoredBatch, variant: Variant, scalars: Scalars | None = None, *, checkpointing: bool | None = None
    ) -> Tensor:
        """[R, D] last states of one variant at the labelled positions of a batch, differentiable.

        They are on the device of the last block; each block moves its input to its own device.

        Args:
            batch: on the device.
            variant: the variant.
            scalars: scalars trained for it.
            checkpointing: whether autograd keeps only the state before each block and reruns the block in the backward
                pass, which must come before any other run; None: as in `Costs.checkpoints`.
        """
        self.plain()
        if self.runner is None:
            self.switches.scalars = scalars  # refused unless None
            states = self._whole_pass(batch, variant)
            return states[batch.where.to(states.device)]
        states = self.runner.begin(batch.inputs)
        self.switches.skip(variant)
        self.switches.scalars = scalars
        again = torch.is_grad_enabled() and self.costs.checkpoints(batch.shape, checkpointing)
        run = self.runner.run
        if again:  # the rerun is complete, so that hooks that unload its weights run too
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        for layer in range(1, self.costs.num_layers + 1):
            if self.switches.zeroes or parts_of(variant, layer) != ("layer",):
                states = run(layer, states)
        states = self.anatomy.stream(states)
        return states[batch.where.to(states.device)]

    def predictions(self, rows: Tensor) -> Tensor:
        """[R, V] log-probabilities from last states `[R, D]`, float32 (float64 for float64 models)."""
        logits = self.classifier.tokens(rows)
        return functional.log_softmax(logits.float() if logits.dtype.itemsize < 4 else logits, dim=-1)

    def objective(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Summed loss of last states `[R, D]`; logits are computed in parts, and recomputed in the backward pass."""

        def loss(part: Tensor, targets: Tensor) -> Tensor:
            return read(LOSS, self.predictions(part), targets, None).sum().to(self.device)

        total: Tensor = torch.zeros((), dtype=torch.float32, device=self.device)
        for at, part in self._parts(rows):
            total = total + checkpoint(loss, part, targets[at], use_reentrant=False)
        return total

    def _last_states(self, batch: ScoredBatch, variants: Sequence[Variant]) -> Iterator[tuple[Variant, Tensor]]:
        """Each variant with its last states `[B, T, D]`; the unmodified model comes first."""
        if self.runner is None:
            yield from ((variant, self._whole_pass(batch, variant)) for variant in variants)
        else:
            for variant, states in self._leaves(1, self.runner.begin(batch.inputs), variants):
                yield variant, self.anatomy.stream(states)

    def _whole_pass(self, batch: ScoredBatch, variant: Variant) -> Tensor:
        """[B, T, D] last states of one variant, by a forward pass of the model."""
        last: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            last.append(output[0] if isinstance(output, tuple | list) else output)

        self.switches.skip(variant)
        hook = self.anatomy.blocks[-1].register_forward_hook(keep)
        try:
            self.anatomy.body(**body_inputs(self.anatomy, batch.inputs))
        finally:
            hook.remove()
        return self.anatomy.stream(last[-1])

    def _leaves(self, layer: int, states: Tensor, variants: Sequence[Variant]) -> Iterator[tuple[Variant, Tensor]]:
        """Each variant with its last states, depth first; only the states at branching points are kept."""
        group = list(variants)
        while layer <= self.costs.num_layers:
            branches: dict[tuple[str, ...], list[Variant]] = {}
            for variant in group:
                branches.setdefault(parts_of(variant, layer), []).append(variant)
            *others, last = sorted(branches)  # nothing skipped comes first
            for parts in others:
                yield from self._leaves(layer + 1, self._block(layer, states, parts), branches[parts])
            states, group = self._block(layer, states, last), branches[last]
            layer += 1
        yield group[0], states

    def _block(self, layer: int, states: Tensor, removed: tuple[str, ...]) -> Tensor:
        """One block without these parts."""
        if removed == ("layer",) and not self.switches.zeroes:
            return states
        assert self.runner is not None
        variant = Variant(Block(layer, part) for part in removed)
        if self.switches.skipped != variant:
            self.switches.skip(variant)
        return self.runner.run(layer, states)

    def _parts(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The rows in parts small enough for their logits to exist at once."""
        step = max(1, (CPU_LOGITS if self.device.type == "cpu" else DEVICE_LOGITS) // (self.anatomy.vocab_size or 1))
        return ((slice(start, start + step), rows[start : start + step]) for start in range(0, len(rows), step))


def read(kind: str, own: Tensor, targets: Tensor, base: Tensor | None) -> Tensor:
    """[R] losses, or comparisons with the base, of log-probabilities `[R, V]`."""
    if base is None or kind == LOSS:
        return functional.nll_loss(own, targets.to(own.device), reduction="none")
    if kind == AGREEMENT:
        return (base.argmax(-1) == own.argmax(-1)).double()
    return (base.exp() * (base - own)).sum(-1).clamp(min=0)


def batch_sums(values: Tensor, batch: ScoredBatch) -> list[float]:
    """Sum per sequence, in float64, of values `[R]` at the labelled positions of a batch."""
    sums = torch.zeros(len(batch.where), dtype=torch.float64)
    return [float(total) for total in sums.index_add_(0, batch.owners.cpu(), values.detach().cpu().double())]
