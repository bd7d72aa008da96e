"""What a rule with a threshold gives on some samples, and the choice of a threshold for a target quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulldepth.early_exit.mean import Mean
from fulldepth.early_exit.readings import Readings
from fulldepth.early_exit.rules import Exit
from fulldepth.errors import FulldepthError
from fulldepth.execution.decoding import theoretical_speedup
from fulldepth.settings.exit import Rule
from fulldepth.uncertainty import sample

CANDIDATES = 200
"""Most thresholds that a calibration tries, besides the given ones."""


@dataclass(frozen=True)
class Outcome:
    """A rule and threshold on some samples."""

    exit: Exit
    layers: Tensor
    """[N] layer after which each sample leaves."""
    exits: Tensor
    """[L] number of samples that leave after layers 1..L."""
    scores: dict[str, Mean]
    """`accuracy`, `agreement` (with the full model's predictions), `drop` of accuracy (paired) and `loss`."""

    @property
    def accuracy(self) -> Mean:
        """What early exit may cost."""
        return self.scores["accuracy"]

    @property
    def drop(self) -> Mean:
        """Accuracy of the full model minus this one's."""
        return self.scores["drop"]

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
    layers = readings.layers(exit)
    counts = layers.bincount(minlength=readings.num_layers + 1)[1:]
    return Outcome(exit, layers, counts, readings.scores(layers))


def calibrated(readings: Readings, rule: Rule, min_layer: int, given: Sequence[float], target: float) -> float:
    """The lowest threshold for which quality falls by at most `target`, and for all higher candidates too; 1 if none.

    Candidates are tried from 1 downwards; the first that misses the target ends the search, so that a low threshold
    is not accepted by chance alone.

    Args:
        readings: the samples to choose on.
        rule: name of the rule.
        min_layer: first layer that allows to leave.
        given: further candidates.
        target: largest fall in quality, in [0, 1).
    """
    best, whole = 1.0, readings.value(readings.all_at(readings.num_layers))
    for threshold in sorted(candidates(readings, rule, min_layer, given), reverse=True):
        layers = readings.layers(Exit(rule, threshold, min_layer, readings.num_layers))
        if not whole - readings.value(layers) <= target + 1e-12:
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
    """Two disjoint parts of the samples, divided by the seeded hash of their cluster: `calibration` and `report`.

    The sequences of a single cluster (one short document) are divided themselves; its numbers have no errors.

    Raises:
        FulldepthError: if there is only one sequence.
    """
    unit = readings.cluster if len(readings.cluster.unique()) > 1 else readings.sequence
    present = unit.unique()
    if len(present) < 2:
        raise FulldepthError("A threshold is chosen on one part of the data and reported on another: give two or more.")
    count = min(max(1, round(share * len(present))), len(present) - 1)
    chosen = torch.isin(unit, present[sample(present.tolist(), count, seed)])
    return {"calibration": readings.of(chosen), "report": readings.of(~chosen)}
