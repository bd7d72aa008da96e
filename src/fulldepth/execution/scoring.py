"""Losses of a model and of its variants with skipped parts, per sequence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fulldepth.core.errors import FulldepthError
from fulldepth.core.targets import IGNORE, next_targets
from fulldepth.data.batches import Example, grouped, padded_batch
from fulldepth.execution.flops import Costs, Shape, Variant, costs_of, parts_of
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.execution.predictions import Reduce, log_probabilities, losses, read_predictions, row_parts, tiles
from fulldepth.hf import Anatomy, Block, Classifier, device_of, first_rotation_length
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.hf.truncation import state_at

LOSS = "loss"
SCALED = "scaled"
DIVERGENCE = "kl"
AGREEMENT = "greedy_agreement"
OUTPUT_CHANGE = "output_change"
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


def make_batches(examples: Sequence[Example], batch_size: int, config: Any = None) -> list[ScoredBatch]:
    """Batches of examples, the longest first, in which each has the loss that it has alone.

    Args:
        examples: examples to batch, each once.
        batch_size: sequences in a batch, at most.
        config: of the model; with LongRoPE, examples that it rotates in different ways are kept apart. None = they may
            share a batch.

    Raises:
        FulldepthError: if no token of the examples is predicted.
    """
    groups = grouped(examples, batch_size, first_rotation_length(config))
    scored = [ScoredBatch.of(padded_batch(group, 0), [example.document for example in group]) for group in groups]
    if not any(len(batch.targets) for batch in scored):
        raise FulldepthError("The data are empty: no token counts.")
    return scored


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
        self.anatomy = anatomy
        self.classifier = classifier
        self.switches = switches
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
        references: list[Tensor] = []
        for variant, states in self._last_states(batch, ordered):
            rows = states[batch.where.to(states.device)]
            if divergence and not references:  # the base comes first: `_leaves` visits unskipped branches first
                references = list(predicted(self.classifier, rows))
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
        base: Iterable[Tensor] = (),
    ) -> dict[str, list[float]]:
        """Kind -> B sums over the labelled positions of each sequence, from last states.

        Args:
            states: `[R, D]` last states at the labelled positions.
            batch: on the device.
            kinds: `loss`, and with a base `kl` and `greedy_agreement` (1 where the most likely token is the same).
            base: from `predicted`, of the unmodified model's states.
        """
        columns = read_predictions(self.classifier, states, batch.targets, kept(kinds, base))
        return {kind: batch_sums(values, batch) for kind, values in zip(kinds, columns, strict=True)}

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

    def objective(self, states: Tensor, targets: Tensor) -> Tensor:
        """Summed loss of last states `[R, D]`; logits are computed in parts, and recomputed in the backward pass."""

        def loss(part: Tensor, targets: Tensor) -> Tensor:
            logits = self.classifier.tokens(part)
            return losses(logits, targets.to(logits.device)).sum().to(self.device)

        total: Tensor = torch.zeros((), dtype=torch.float32, device=self.device)
        for rows in row_parts(self.classifier, states):
            total = total + checkpoint(loss, states[rows], targets[rows], use_reentrant=False)
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
        self.switches.skip(variant)
        return state_at(self.anatomy, self.costs.num_layers, batch.inputs)

    def _leaves(self, layer: int, states: Tensor, variants: Sequence[Variant]) -> Iterator[tuple[Variant, Tensor]]:
        """Each variant with its last states, depth first; only the states at branching points are kept."""
        group = list(variants)
        while layer <= self.costs.num_layers:
            branches: dict[tuple[str, ...], list[Variant]] = {}
            for variant in group:
                branches.setdefault(parts_of(variant, layer), []).append(variant)
            *earlier, last = sorted(branches)  # nothing skipped comes first
            for parts in earlier:
                yield from self._leaves(layer + 1, self._block(layer, states, parts), branches[parts])
            states = self._block(layer, states, last)
            group = branches[last]
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


def predicted(classifier: Classifier | None, states: Tensor) -> Iterator[Tensor]:
    """Log-probabilities of the rows that `read_predictions` reads at once, one after another."""
    return (log_probabilities(logits) for _, _, logits in tiles(classifier, states))


def kept(kinds: Sequence[str], base: Iterable[Tensor] = ()) -> Reduce:
    """Return the `reduce` of `read_predictions` that computes these kinds of losses.

    Args:
        kinds: `loss`, and with a base `kl` (KL(base || model)), `greedy_agreement` (1 where the most likely token is
            the same) and `output_change` (Euclidean norm of the difference of the probabilities).
        base: from `predicted`, of the model compared with, at the same rows.
    """
    references = iter(base)

    def keep(logits: Tensor, targets: Tensor) -> list[Tensor]:
        logarithms = log_probabilities(logits)
        reference = next(references, None)
        return [_read(kind, logarithms, targets, reference) for kind in kinds]

    return keep


def _read(kind: str, logs: Tensor, targets: Tensor, base: Tensor | None) -> Tensor:
    """[R] losses, or comparisons with the base, of log-probabilities `[R, V]`."""
    if kind == LOSS:
        return functional.nll_loss(logs, targets, reduction="none")
    assert base is not None
    base = base.to(logs.device)
    if kind == AGREEMENT:
        return (base.argmax(-1) == logs.argmax(-1)).double()
    if kind == OUTPUT_CHANGE:
        return torch.linalg.vector_norm(base.exp() - logs.exp(), dim=-1)
    return (base.exp() * (base - logs)).sum(-1).clamp(min=0)


def batch_sums(values: Tensor, batch: ScoredBatch) -> list[float]:
    """Sum per sequence, in float64, of values `[R]` at the labelled positions of a batch."""
    sums = torch.zeros(len(batch.where), dtype=torch.float64)
    return [float(total) for total in sums.index_add_(0, batch.owners.cpu(), values.detach().cpu().double())]
