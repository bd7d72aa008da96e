"""What a rule with a threshold gives on some samples, and the choice of a threshold for a target accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.execution.decoding import theoretical_speedup
from fulldepth.exit.reading import Readings
from fulldepth.exit.rules import Exit
from fulldepth.metrics.jackknife import group_sizes, ratio_error
from fulldepth.metrics.reservoir import priority
from fulldepth.settings.exit import Rule

CANDIDATES = 200
"""Most thresholds that a calibration tries, besides the given ones."""


@dataclass(frozen=True)
class Mean:
    """A mean over samples, with its standard error over sequences (delete-group jackknife); None for one sequence."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: Tensor, sequence: Tensor) -> Mean:
        """The mean of `values: [N]`, which belong to sequences `[N]`."""
        present, index = sequence.unique(return_inverse=True)
        sizes = group_sizes(len(present))
        group = index % len(sizes)
        sums = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, group, values.double())
        error = float(ratio_error(sums, group.bincount(minlength=len(sizes)), sizes))
        return cls(float(values.double().mean()), error if math.isfinite(error) else None)


@dataclass(frozen=True)
class Outcome:
    """A rule and threshold on some samples."""

    exit: Exit
    layers: Tensor
    """[N] layer after which each sample leaves."""
    exits: Tensor
    """[L] number of samples that leave after layers 1..L."""
    accuracy: Mean
    loss: Mean
    agreement: Mean
    """Share of samples with the full model's prediction."""
    drop: Mean
    """Accuracy of the full model minus this one's, paired."""

    @property
    def speedup(self) -> float:
        """Theoretical speed-up."""
        return theoretical_speedup(self.exits)

    @property
    def layers_run(self) -> float:
        """Mean number of layers that a sample runs through."""
        return len(self.exits) / self.speedup


def outcome(readings: Readings, exit: Exit) -> Outcome:
    """What a rule and threshold give on samples; at least one sample."""
    certainty = readings.certainty.get(exit.rule)
    if certainty is None:
        certainty = torch.zeros(readings.prediction.shape, dtype=torch.float64)
    layers = exit.layers(certainty[1:], readings.prediction[1:])
    chosen = layers[None]
    prediction, loss = readings.prediction.gather(0, chosen)[0], readings.loss.gather(0, chosen)[0]
    correct, full = prediction == readings.target, readings.prediction[-1]
    means = {
        "accuracy": correct,
        "loss": loss,
        "agreement": prediction == full,
        "drop": (full == readings.target).double() - correct.double(),
    }
    return Outcome(
        exit,
        layers,
        layers.bincount(minlength=readings.num_layers + 1)[1:],
        **{name: Mean.of(values, readings.sequence) for name, values in means.items()},
    )


def calibrated(readings: Readings, rule: Rule, min_layer: int, given: Sequence[float], target: float) -> float:
    """The lowest threshold for which accuracy falls by at most `target`, and for all higher candidates too; 1 if none.

    Candidates are tried from 1 downwards; the first that misses the target ends the search, so that a low threshold
    is not accepted by chance alone.

    Args:
        readings: the samples to choose on.
        rule: name of the rule.
        min_layer: first layer that allows to leave.
        given: further candidates.
        target: largest fall in accuracy, in [0, 1).
    """
    best = 1.0
    for threshold in sorted(candidates(readings, rule, min_layer, given), reverse=True):
        found = outcome(readings, Exit(rule, threshold, min_layer, readings.num_layers))
        if found.drop.value > target + 1e-12:
            break
        best = threshold
    return best


def candidates(readings: Readings, rule: Rule, min_layer: int, given: Sequence[float]) -> set[float]:
    """Thresholds that a calibration tries, in (0, 1]: quantiles of the values that occur, or every patience."""
    layers = readings.num_layers
    if rule == "patience":
        return {1.0, *((number - 0.5) / layers for number in range(1, layers))}
    values = readings.certainty[rule][min_layer:layers].flatten()
    found = {1.0, *given}
    if len(values):
        at = (torch.arange(1, CANDIDATES, dtype=torch.float64) / CANDIDATES * (len(values) - 1)).long()
        quantiles = values.sort().values[at].tolist()
        found |= {math.floor(value * 1e4) / 1e4 for value in quantiles}
    return {threshold for threshold in found if 0 < threshold <= 1}


def splits(readings: Readings, share: float, seed: int) -> dict[str, Readings]:
    """Two disjoint parts of the samples, divided by sequence: `calibration` and `report`.

    Raises:
        FulldepthError: if there is only one sequence.
    """
    present = readings.sequence.unique()
    if len(present) < 2:
        raise FulldepthError("A threshold is chosen on one part of the data and reported on another: give two or more.")
    count = min(max(1, round(share * len(present))), len(present) - 1)
    order = present[priority(present, seed).argsort()]
    chosen = torch.isin(readings.sequence, order[:count])
    return {"calibration": readings.of(chosen), "report": readings.of(~chosen)}


def layer_means(readings: Readings) -> Iterator[tuple[str, int, Mean, str]]:
    """`lens_loss` and `lens_accuracy` of layers 0..L: measure, layer, mean and unit."""
    for layer in range(readings.num_layers + 1):
        yield "lens_loss", layer, Mean.of(readings.loss[layer], readings.sequence), "nats"
        yield "lens_accuracy", layer, Mean.of(readings.correct[layer], readings.sequence), "1"
