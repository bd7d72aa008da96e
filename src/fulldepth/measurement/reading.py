"""How a run reads predictions: the sampled positions, the lens grid, and the error of half-precision products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulldepth.data import Batch
from fulldepth.distributed import Processes, add_up
from fulldepth.execution import read_and_show, read_sequences
from fulldepth.hf import Classifier
from fulldepth.measurement.grid import SAMPLES, grid_of, shown_positions
from fulldepth.measurement.sample_grid import SampleGrid
from fulldepth.measurement.subject import Subject
from fulldepth.metrics import Readout
from fulldepth.metrics.reservoir import priority
from fulldepth.processor import check_bfloat16
from fulldepth.settings.measure import MeasureSettings
from fulldepth.targets import IGNORE

CHECKED = 128
"""Positions that are read in both precisions if the lens reads in another one than the model's."""


class LensReader:
    """Applies the last layer's classifier to every layer at a seeded sample of positions, batch by batch.

    The lens grid is made of the same readings: of a token head from the first batch, of a sequence head from all.

    Args:
        subject: model and data.
        settings: sizes of the sample and the grid, seed, precision.
        process: this process; the first one makes the lens grid.
    """

    def __init__(self, subject: Subject, settings: MeasureSettings, process: Processes) -> None:
        self.subject, self.seed = subject, settings.seed
        halved = settings.lens_precision == "bfloat16" and subject.checkpoint.model.dtype != torch.bfloat16
        if halved and subject.checkpoint.model.device.type == "cpu":
            check_bfloat16()
        self.dtype = torch.bfloat16 if halved else None
        self.threshold, self.checked = _thresholds(subject, settings, check=halved)
        self.process = process
        self.samples = SAMPLES if settings.grid_samples is None else settings.grid_samples
        self.samples = self.samples if process.is_main else 0
        self._of_tokens: dict[str, Any] | None = None
        classifier = subject.verified.classifier
        self._of_samples = None if classifier is None or classifier.per_token else SampleGrid(subject, settings)
        layers = subject.anatomy.num_layers + 1
        self.errors = torch.zeros(layers, 3, dtype=torch.float64)
        """For each layer: sums of loss errors, of absolute loss errors, and of changed top predictions."""
        self.compared = torch.zeros(1, dtype=torch.float64)

    def read(
        self,
        classifier: Classifier,
        batch: Batch,
        states: Tensor,
        targets: Tensor,
        mask: Tensor,
        inner: Tensor | None = None,
    ) -> Readout:
        """The lens at the sampled positions of a batch.

        Args:
            classifier: the model's head.
            batch: the sequences.
            states: `[L+1, B, T, D]` residual stream.
            targets: `[B, T]` for token heads, `[B]` for sequence heads.
            mask: `[B, T]` bool, False = padding.
            inner: `[L, B, T, D]` stream after the attention of layers 1..L, if the lens reads it.
        """
        if self._of_samples is not None:
            present = classifier.sample_mask(batch.inputs, mask)
            readout, top = read_sequences(classifier, states, targets, present, inner=inner)
            row = readout.row.cpu()
            self._of_samples.add(batch.sequence[row], targets.cpu()[row], top)
            return readout
        ranks = priority(_keys(targets, batch.sequence), self.seed)
        chosen = targets if self.threshold is None else targets.where(ranks <= self.threshold, IGNORE)
        if self.dtype is not None:
            self._compare(classifier, states, targets.where(ranks <= self.checked, IGNORE))
        shown = shown_positions(self.subject, mask, self.samples)
        self.samples = 0
        readout, top = read_and_show(classifier, states, chosen, shown, dtype=self.dtype, inner=inner)
        if bool(shown.any()):
            self._of_tokens = grid_of(self.subject, batch, shown, top)
        return readout

    def _compare(self, classifier: Classifier, states: Tensor, targets: Tensor) -> None:
        """Read some positions in both precisions."""
        where = targets != IGNORE
        (full, its_top), (half, other_top) = (
            read_and_show(classifier, states, targets, where, dtype=dtype) for dtype in (None, self.dtype)
        )
        error = (half.loss.double() - full.loss).cpu()
        changed = (its_top.token != other_top.token).cpu()
        self.errors += torch.stack([error.sum(1), error.abs().sum(1), changed.double().sum(1)], dim=1)
        self.compared += where.sum().cpu()

    def grid(self) -> dict[str, Any] | None:
        """The lens grid as plain data; None if there is none. Every process must call this."""
        return self._of_tokens if self._of_samples is None else self._of_samples.grid(self.process)

    def measured_error(self) -> dict[str, float] | None:
        """Error of the products' precision over all processes; None if it is the model's own."""
        if self.dtype is None:
            return None
        total = torch.cat([self.errors.flatten(), self.compared])
        if self.process.world > 1:
            add_up(total)
        mean, absolute, changed = (total[:-1].view_as(self.errors) / total[-1]).abs().amax(0).tolist()
        return {
            "lens_precision_mean_loss_error": round(mean, 6),
            "lens_precision_loss_error": round(absolute, 6),
            "lens_precision_changed_predictions": round(changed, 6),
            "lens_precision_positions": int(total[-1]),
        }


def _thresholds(subject: Subject, settings: MeasureSettings, *, check: bool) -> tuple[int | None, int]:
    """Largest priorities of the positions that the lens reads (None = all), and of those read in both precisions."""
    limit, targets = settings.lens_tokens, subject.sequences.num_targets
    limit = None if limit is None or targets <= limit else limit
    most = max(limit or 0, CHECKED if check else 0)
    if not most:
        return None, -1
    smallest = torch.empty(0, dtype=torch.int64)
    for batch in subject.sequences.batches(64):
        if batch.targets is not None:
            keys = _keys(batch.targets, batch.sequence)[batch.targets != IGNORE]
            smallest = torch.cat([smallest, priority(keys, settings.seed)]).sort().values[:most]
    if not len(smallest):
        return None, -1
    return None if limit is None else int(smallest[limit - 1]), int(smallest[:CHECKED][-1])


def _keys(targets: Tensor, sequence: Tensor) -> Tensor:
    """[B, T] key of every position, unique over the data set."""
    return (sequence.to(targets.device)[:, None] << 24) | torch.arange(targets.shape[1], device=targets.device)
