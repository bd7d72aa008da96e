"""The forward passes of `layer_effect`: a part of every layer removed in turn, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from fulldepth.core.distributed import Processes
from fulldepth.core.progress import Watcher
from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import counted
from fulldepth.data import Batch
from fulldepth.execution.flops import token_products
from fulldepth.execution.predictions import read_predictions, row_parts
from fulldepth.execution.removal import PartRemover
from fulldepth.execution.scoring import DIVERGENCE, LOSS, OUTPUT_CHANGE, kept, predicted
from fulldepth.measurement import tokens
from fulldepth.measurement.passes import ESTIMATED, check_finite
from fulldepth.measurement.plan import MeasurePlan, token_head
from fulldepth.metrics import LayerEffect, Removals, relative_change
from fulldepth.metrics.base import POSITION_BITS
from fulldepth.metrics.layer_effect import STRIDE, draw_starts, pairs
from fulldepth.settings.measure import MeasureSettings
from fulldepth.subject import Subject
from fulldepth.subject.open import small_batch

EFFECTS = (DIVERGENCE, OUTPUT_CHANGE, LOSS)
"""What is kept of the predictions without a part."""


@dataclass(frozen=True)
class Intervention:
    """Positions of a batch at which a part is removed, and positions at which the effects are read."""

    scope: str
    """`all` or `future`."""
    removed: Tensor
    """[B, T] bool."""
    read: Tensor
    """[B, T] bool, N positions."""
    keys: Tensor
    """[N] int64, as in `Removals`."""
    scored: Tensor
    """[B, T] bool, M positions whose loss is compared; none in the scope `future`."""


class EffectPass:
    """Removes a part of each layer in turn, on this process's share of the batches, and updates `layer_effect`.

    Args:
        subject: model and data.
        plan: its `layer_effect` is updated in place.
        settings: batch size, number of positions t, first token.
        process: this process.
        watcher: receives the cost in forward passes before the start, the time after the first removed layer, and
            progress by removed layer.
    """

    def __init__(
        self, subject: Subject, plan: MeasurePlan, settings: MeasureSettings, process: Processes, watcher: Watcher
    ) -> None:
        measure = plan.measures["layer_effect"]
        assert isinstance(measure, LayerEffect)
        self.measure = measure
        self.subject = subject
        self.anatomy = subject.anatomy
        self.counting = plan.counting
        self.settings = settings
        self.process = process
        self.watcher = watcher
        self.parts = plan.setup.effect_parts
        self.classifier = token_head(subject)
        self.remover = PartRemover(self.anatomy, subject.inputs(small_batch(subject.sequences).inputs))
        self.batches = len(subject.sequences.groups(settings.batch_size)[process.rank :: process.world])
        self.draws = min(settings.effect_positions, max(0, plan.setup.sequence_length - 1) // STRIDE)
        self.layers = self.anatomy.layers
        self.timed = False
        """Whether the time has been estimated."""
        products = [token_products(block) for block in self.anatomy.blocks]
        self.products = products if all(products) else [1.0] * len(products)
        """Cost of one token in each layer."""

    @torch.no_grad()
    def run(self) -> None:
        """Run all batches.

        Raises:
            FulldepthError: if a state of the whole model is NaN or infinite.
        """
        self._state_cost()
        runs = self.batches * (1 + self.draws) * len(self.parts)
        self.watcher.begin("Removing layers in turn", 2 * runs * len(self.layers))
        sequences = self.subject.sequences
        for batch in sequences.batches(self.settings.batch_size, self.process.rank, self.process.world):
            states = self.remover.begin(self.subject.inputs(batch.inputs))  # L+1 states [B, T, D]
            check_finite(states, batch)
            for intervention in self.interventions(batch, states[0]):
                for part in self.parts:
                    self.measure.update(self.removals(states, batch, intervention, part))

    def interventions(self, batch: Batch, states: Tensor) -> Iterator[Intervention]:
        """The interventions on one batch: at all positions, then before each drawn t."""
        device = states.device
        mask = batch.mask(states.shape[1], device)
        counting = self.counting
        counts = tokens.counted_positions(counting.policy, mask, batch.token_ids, counting.eos, counting.leading)
        position = mask.long().cumsum(1) - 1
        allowed = mask & ((position > 0) | self.settings.effect_first)
        scored = torch.zeros_like(mask)
        if batch.targets is not None and self.classifier is not None:
            scored = mask & (batch.targets.to(device) != IGNORE)
        sequence = batch.sequence.to(device)[:, None] << POSITION_BITS
        read = counts & allowed
        yield Intervention("all", allowed, read, (sequence | position)[read], scored)
        starts = draw_starts(mask.sum(1), batch.sequence, self.draws, self.settings.seed).to(device)  # [draws, B]
        for number, start in enumerate(starts):
            begins = start[:, None]
            read = counts & (position >= begins) & (begins > 0)
            keys = sequence | (position * self.settings.effect_positions + number)
            yield Intervention("future", allowed & (position < begins), read, keys[read], torch.zeros_like(mask))

    def removals(self, states: Sequence[Tensor], batch: Batch, intervention: Intervention, part: str) -> Removals:
        """Remove a part of every layer in turn.

        Args:
            states: L+1 states of the whole model, `[B, T, D]` each.
            batch: the sequences.
            intervention: where parts are removed, and where effects are read.
            part: `layer`, `attention` or `mlp`.
        """
        read = intervention.read
        used = read | intervention.scored  # U positions whose predictions are compared
        later = torch.full((pairs(len(self.layers)).shape[1], int(read.sum())), torch.nan, dtype=torch.float64)
        whole = states[-1][used.to(states[-1].device)]
        last: dict[int, Tensor] = {}
        row = 0
        for layer in self.layers:
            count = len(self.layers) - layer
            if bool(used.any()) and (part == "layer" or self.anatomy.part(layer, part) is not None):
                start = time.perf_counter()
                changed = self.remover.without(layer, part, intervention.removed)
                seconds = time.perf_counter() - start
                last[layer] = changed[-1][used.to(changed[-1].device)]
                if not self.timed:
                    self._state_time(seconds / sum(self.products[layer - 1 :]), whole, last[layer])
                for index in range(count):
                    update, other = (
                        _update(around[index], around[index + 1], read) for around in (states[layer:], changed)
                    )
                    later[row + index] = relative_change(update, other)
            row += count
            self.watcher.advance(1)
        removals = Removals(part, intervention.scope, intervention.keys, later)
        if self.classifier is None:
            self.watcher.advance(len(self.layers))
            return removals
        return self._with_predictions(removals, whole, last, batch, intervention)

    def _with_predictions(
        self,
        removals: Removals,
        whole: Tensor,
        last: Mapping[int, Tensor],
        batch: Batch,
        intervention: Intervention,
    ) -> Removals:
        """The effects on predictions, added to those on later layers.

        The head reads a few positions of the whole model and of every removal at a time, so that the logits of the
        whole model are computed once and never held for all positions.

        Args:
            removals: the effects on later layers.
            whole: `[U, D]` last states of the whole model.
            last: 1-based layer -> `[U, D]` last states without its part.
            batch: the sequences.
            intervention: where effects are read.
        """
        used = intervention.read | intervention.scored
        layers = len(self.layers)
        effects = torch.full((len(EFFECTS), layers, len(whole)), torch.nan, dtype=torch.float64)
        all_targets = torch.zeros_like(used, dtype=torch.int64) if batch.targets is None else batch.targets
        targets = all_targets.to(used.device).clamp(min=0)[used]
        done = 0
        for rows in row_parts(self.classifier, whole) if len(whole) else ():
            parts = {layer: states[rows] for layer, states in last.items()}
            for layer, columns in self._compared(whole[rows], parts, targets[rows]):
                effects[:, layer - 1, rows] = columns
            steps = layers * min(rows.stop, len(whole)) // len(whole) - done
            done += steps
            self.watcher.advance(steps)
        self.watcher.advance(layers - done)
        read = intervention.read[used].cpu()
        scored = intervention.scored[used].cpu()
        owners = batch.sequence.to(used.device)[:, None].expand_as(used)[used].cpu()
        divergence, change, loss_added = effects
        return Removals(
            removals.part,
            removals.scope,
            removals.keys,
            removals.later,
            divergence[:, read],
            change[:, read],
            loss_added[:, scored] if bool(scored.any()) else None,
            owners[scored] if bool(scored.any()) else None,
        )

    def _compared(self, whole: Tensor, last: Mapping[int, Tensor], targets: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each removed layer with the effects `EFFECTS` on the predictions of a few rows, `[3, n]`.

        Args:
            whole: `[n, D]` last states of the whole model, few enough for one reading of the head.
            last: 1-based layer -> `[n, D]` last states without its part.
            targets: `[n]`.
        """
        (base,) = read_predictions(self.classifier, whole, targets, kept((LOSS,)))
        reference = list(predicted(self.classifier, whole))
        for layer, states in last.items():
            *changes, loss = read_predictions(self.classifier, states, targets, kept(EFFECTS, reference))
            yield layer, torch.stack([*changes, loss - base]).double().cpu()

    @property
    def _runs(self) -> int:
        """Number of times that each layer is removed from a batch."""
        return (1 + self.draws) * len(self.parts)

    def _cost(self) -> float:
        """Cost of one token in all layers that run when each layer is removed once."""
        if self.remover.whole_passes:
            return len(self.products) * sum(self.products)
        return sum(sum(self.products[layer - 1 :]) for layer in self.layers)

    def _state_cost(self) -> None:
        """State the cost in forward passes."""
        removed = "" if self.parts == ("layer",) else f"parts ({', '.join(self.parts)}) of "
        layers = f"each of {len(self.layers)} layers in turn" if len(self.layers) > 1 else "the only layer"
        scopes = f" and before {counted(self.draws, 'position')} of each sequence" if self.draws else ""
        passes = 1 + self._runs * self._cost() / sum(self.products)
        reason = ""
        if self.remover.whole_passes:
            reason = " (each removal is a whole pass, because the layers of this model cannot be run one by one)"
        readings = ""
        if self.classifier is not None:
            readings = f", and {1 + self._runs * len(self.layers):,} readings of its predictions"
        self.watcher.say(
            f"layer_effect removes {removed}{layers}, at every token{scopes}: about "
            f"{passes:,.0f} forward passes over the data{reason}{readings}."
        )

    def _state_time(self, seconds: float, whole: Tensor, states: Tensor) -> None:
        """State the time of all removals if it is long.

        Args:
            seconds: time of the first removal over its cost, in the unit of `products`.
            whole: `[U, D]` last states of the whole model.
            states: `[U, D]` last states of that removal, a few of which are read to time the head.
        """
        self.timed = True
        left = seconds * self._cost()
        if self.classifier is not None:
            rows = row_parts(self.classifier, whole)[0]
            start = time.perf_counter()
            list(self._compared(whole[rows], {1: states[rows]}, torch.zeros_like(whole[rows][:, 0], dtype=torch.int64)))
            per_row = (
                (time.perf_counter() - start) / len(whole[rows]) / 2
            )  # the whole model's predictions are read, too
            left += per_row * len(whole) * len(self.layers)
        left *= self._runs * self.batches
        if left >= ESTIMATED:
            self.watcher.say(f"About {timedelta(seconds=round(left))} for layer_effect.")


def _update(before: Tensor, after: Tensor, where: Tensor) -> Tensor:
    """[N, D] update of a layer at N positions, float32 (float64 for float64 states)."""
    before, after = (state[where.to(state.device)].to(after.device) for state in (before, after))
    return after.double() - before.double() if after.dtype == torch.float64 else after.float() - before.float()
