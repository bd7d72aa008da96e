"""What variants of a model with skipped parts lose on a batch, sequence by sequence; shared blocks are run once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fulldepth.data.batches import Example, batches, grouped
from fulldepth.errors import FulldepthError
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.hf import Anatomy, Classifier, device_of
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.skip.selection.flops import Costs, Shape, Variant, costs_of
from fulldepth.targets import IGNORE, next_targets

CPU_LOGITS, DEVICE_LOGITS = 1 << 22, 1 << 27
"""Logits that exist at once on a CPU and on an accelerator, while nothing but their losses is kept."""
LOSS, SCALED, DIVERGENCE = "loss", "scaled", "kl"
BASE = Variant()
"""The model as it is."""


@dataclass(frozen=True)
class Batch:
    """A padded batch and where its losses are read. The model shifts: the state at t predicts the token at t + 1."""

    inputs: Mapping[str, Tensor]
    """`input_ids` and `attention_mask`, `[B, T]`."""
    where: Tensor
    """[B, T] bool: positions whose next token counts."""
    targets: Tensor
    """[R] those next tokens."""
    owners: Tensor
    """[R] the sequence, 0..B-1, of each."""
    documents: Sequence[int]
    """[B] the document (of pairs and chats the row) of each sequence."""

    @property
    def shape(self) -> Shape:
        """What a pass over it costs by."""
        rows, length = self.where.shape
        return Shape(rows, length, len(self.targets))

    @property
    def tokens(self) -> list[int]:
        """Tokens that count in each sequence."""
        return [int(count) for count in torch.bincount(self.owners, minlength=len(self.where))]

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Batch(inputs, self.where.to(device), self.targets.to(device), self.owners.to(device), self.documents)


def make_batches(examples: Sequence[Example], batch_size: int) -> list[Batch]:
    """Batches of examples, the longest first.

    Raises:
        FulldepthError: if no token of the examples is predicted.
    """
    padded = zip(batches(examples, batch_size), grouped(examples, batch_size), strict=True)
    made = [_batch(tensors, [example.document for example in group]) for tensors, group in padded]
    if not sum(len(batch.targets) for batch in made):
        raise FulldepthError("The data are empty: no token counts.")
    return made


def _batch(padded: Mapping[str, Tensor], documents: Sequence[int]) -> Batch:
    following = next_targets(padded["labels"])
    where = following != IGNORE
    inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
    return Batch(inputs, where, following[where], where.nonzero()[:, 0], documents)


class Scorer:
    """Losses of variants of one model.

    Args:
        anatomy: a decoder with a language-model head.
        switches: entered by the caller; what skips parts of the model.
        granularity: what a skipped layer lacks.
        batch: a small batch for the proof that blocks can be run one by one.
        classifier: final norm and head.

    Raises:
        FulldepthError: if the model's layers cannot be run one by one, or it has several residual streams.
    """

    def __init__(
        self, anatomy: Anatomy, classifier: Classifier, switches: Switches, granularity: str, batch: Batch
    ) -> None:
        self.anatomy, self.classifier, self.switches = anatomy, classifier, switches
        self.granularity = granularity
        self.costs: Costs = costs_of(anatomy, classifier, granularity)
        self.device = device_of(anatomy.model)
        if anatomy.has_streams:
            raise FulldepthError(f"{type(anatomy.model).__name__} has several residual streams; none can be searched.")
        self.runner = LayerRunner(anatomy, batch.to(self.device).inputs)

    @torch.no_grad()
    def sums(
        self,
        batch: Batch,
        variants: Collection[Variant],
        *,
        divergence: bool = False,
        done: Callable[[int], None] = lambda count: None,
    ) -> dict[Variant, dict[str, list[float]]]:
        """Summed losses of every sequence under each variant, in nats.

        What variants have in common from the first block on is run once; the head runs at labelled positions only.

        Args:
            batch: B sequences.
            variants: what to skip; with `divergence` the model as it is comes with them.
            divergence: also the divergence of each variant's predictions from the model's own.
            done: told after each variant.

        Returns:
            Variant -> `loss`: B sums of -log q(token), and with `divergence` also `kl`: B sums of KL(base || variant).
        """
        self.plain()
        batch = batch.to(self.device)
        wanted = sorted({*variants, *([BASE] if divergence else [])}, key=sorted)
        found: dict[Variant, dict[str, list[float]]] = {}
        base: list[Tensor] | None = None
        for variant, states in self._leaves(1, self.runner.begin(batch.inputs), wanted):
            rows = states[batch.where.to(states.device)]
            if divergence and base is None:  # the base comes first: unskipped ways are gone before skipped ones
                base = [self.predictions(part) for _, part in self._parts(rows)]
            found[variant] = self._sums(rows, batch, base)
            done(1)
        self.plain()
        return found

    @torch.no_grad()
    def healed_sums(
        self, batch: Batch, variant: Variant, scalars: Scalars | Mapping[str, Any] | None, *, divergence: bool = False
    ) -> dict[str, list[float]]:
        """What `sums` gives, for one variant with scalars (None: without).

        Args:
            batch: B sequences.
            variant: what to skip.
            scalars: made for that variant, as a module or as plain values.
            divergence: also the divergence from the model as it is.
        """
        if isinstance(scalars, Mapping):
            scalars = Scalars.from_dict(scalars, self.costs.num_layers, self.granularity)
        batch = batch.to(self.device)
        base = [self.predictions(part) for _, part in self._parts(self.states(batch, BASE))] if divergence else None
        found = self._sums(self.states(batch, variant, scalars), batch, base)
        self.plain()
        return found

    def plain(self) -> None:
        """Nothing skipped, no scalars."""
        self.switches.scalars = None
        self.switches.skip(())

    def states(
        self, batch: Batch, variant: Variant, scalars: Scalars | None = None, *, checkpointing: bool | None = None
    ) -> Tensor:
        """[R, D] last states of one variant at the labelled positions of a batch on the device; gradients flow.

        They are where the last block is; each block brings what it is given to its own device.

        Args:
            batch: on the device.
            variant: what to skip.
            scalars: made for that variant.
            checkpointing: whether autograd keeps the state before each block only, and runs the block again in the
                backward pass, which must come before anything else is run; None: as `Costs.checkpoints` says.
        """
        self.plain()
        states = self.runner.begin(batch.inputs)
        self.switches.skip(variant)
        self.switches.scalars = scalars
        again = torch.is_grad_enabled() and self.costs.checkpoints(batch.shape, checkpointing)
        run = self._checkpointed if again else self.runner.run
        for layer in range(1, self.costs.num_layers + 1):
            if self.granularity != "layer" or layer not in variant:
                states = run(layer, states)
        return states[batch.where.to(states.device)]

    def _checkpointed(self, layer: int, states: Tensor) -> Tensor:
        """A block that runs again in the backward pass: to its end, so that hooks that unload its weights run, too."""
        after: Tensor = checkpoint(
            self.runner.run, layer, states, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )
        return after

    def predictions(self, rows: Tensor) -> Tensor:
        """[R, V] log-probabilities out of last states `[R, D]`, float32 (float64 for float64 models)."""
        logits = self.classifier.tokens(rows)
        return functional.log_softmax(logits.float() if logits.dtype.itemsize < 4 else logits, dim=-1)

    def objective(self, rows: Tensor, targets: Tensor, base: Tensor | None) -> Tensor:
        """Summed loss of last states `[R, D]`, or with the last states of the base their summed divergence from it.

        Logits are made a part at a time, and again in the backward pass.
        """
        total: Tensor = torch.zeros((), dtype=torch.float32, device=self.device)
        for at, part in self._parts(rows):
            total = total + checkpoint(
                self._part_sum, part, targets[at], None if base is None else base[at], use_reentrant=False
            )
        return total

    def _part_sum(self, rows: Tensor, targets: Tensor, base: Tensor | None) -> Tensor:
        reference = None
        if base is not None:
            with torch.no_grad():
                reference = self.predictions(base)
        return self._read(rows, targets, reference)[-1].sum().to(self.device)

    def _sums(self, rows: Tensor, batch: Batch, base: Sequence[Tensor] | None) -> dict[str, list[float]]:
        """Sums of every sequence, of last states `[R, D]` and the base's log-probabilities, part by part."""
        names = (LOSS,) if base is None else (LOSS, DIVERGENCE)
        parts = [
            self._read(part, batch.targets[at], None if base is None else base[number])
            for number, (at, part) in enumerate(self._parts(rows))
        ]
        columns = [torch.cat(column) for column in zip(*parts, strict=True)] or [rows.new_zeros(0) for _ in names]
        return {name: batch_sums(column, batch) for name, column in zip(names, columns, strict=True)}

    def _read(self, rows: Tensor, targets: Tensor, base: Tensor | None) -> tuple[Tensor, ...]:
        """[R] losses, and divergences from the base's log-probabilities `[R, V]` if they are given."""
        own = self.predictions(rows)
        loss = functional.nll_loss(own, targets.to(own.device), reduction="none")
        if base is None:
            return (loss,)
        return loss, (base.exp() * (base - own)).sum(-1).clamp(min=0)

    def _leaves(self, layer: int, states: Tensor, variants: Sequence[Variant]) -> Iterator[tuple[Variant, Tensor]]:
        """Each variant with its last states, depth first: kept are only the states at which ways part."""
        group = list(variants)
        while layer <= self.costs.num_layers:
            kept = [variant for variant in group if layer not in variant]
            removed = [variant for variant in group if layer in variant]
            if kept and removed:
                yield from self._leaves(layer + 1, self._block(layer, states, skipped=False), kept)
                group = removed
            states = self._block(layer, states, skipped=bool(removed))
            layer += 1
        yield group[0], states

    def _block(self, layer: int, states: Tensor, skipped: bool) -> Tensor:
        """One block with its part skipped or not."""
        if skipped and self.granularity == "layer":
            return states
        wanted = frozenset({layer} if skipped else ())
        if self.switches.skipped != wanted:
            self.switches.skip(wanted)
        return self.runner.run(layer, states)

    def _rows(self) -> int:
        """Positions whose logits exist at once."""
        room = CPU_LOGITS if self.device.type == "cpu" else DEVICE_LOGITS
        return max(1, room // (self.anatomy.vocab_size or 1))

    def _parts(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        step = self._rows()
        return ((slice(start, start + step), rows[start : start + step]) for start in range(0, len(rows), step))


def batch_sums(values: Tensor, batch: Batch) -> list[float]:
    """The sum of each sequence of a batch, in float64, of values `[R]` at labelled positions."""
    sums = torch.zeros(len(batch.where), dtype=torch.float64)
    return [float(total) for total in sums.index_add_(0, batch.owners.cpu(), values.detach().cpu().double())]
