r"""Predictions of a model at every layer, results of leaving it after chosen layers, and the choice of a threshold.

A sample leaves after the first layer l >= `min_layer` at which its value exceeds the threshold t, else after the last
layer L. With the probabilities :math:`p_1 \ge p_2 \ge \ldots` of the classifier applied to :math:`h_l`, and C classes,
the value is

- `confidence`: :math:`p_1`;
- `margin`: :math:`p_1 - p_2`;
- `entropy`: :math:`1 + \sum_c p_c \log p_c / \log C`;
- `patience`: :math:`r / L`, where the r layers up to this one, all from `min_layer` on, predict the same class.

All are at most 1, so t = 1 is the full model.

Source: "Representation progression and aligned training", Sec. 2.2 (confidence); `execution.decoding`, which
decoding shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.core.number_format import plus_minus
from fulldepth.core.progress import Watcher
from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import advisable, sample
from fulldepth.data import Batch
from fulldepth.execution import capture
from fulldepth.execution.decoding import ExitRule, certainty
from fulldepth.execution.lens import PositionSample
from fulldepth.execution.predictions import losses, read_predictions
from fulldepth.hf import all_finite
from fulldepth.metrics.standard_errors import Mean
from fulldepth.settings.exit import Rule
from fulldepth.settings.loading import LayerReadingSettings
from fulldepth.subject import Subject

CANDIDATES = 200
"""Most thresholds that a calibration tries, besides the given ones."""


@dataclass(frozen=True)
class Exit:
    """A rule with its threshold, for a model of L layers."""

    rule: Rule
    threshold: float
    min_layer: int
    num_layers: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of `generate`, which are also entries in `results.json`."""
        return {"rule": self.rule, "threshold": self.threshold, "min_layer": self.min_layer}

    def layers(self, certainty: Tensor, prediction: Tensor) -> Tensor:
        """[N] layer after which each sample leaves, 1..L.

        Args:
            certainty: `[L, N]` of layers 1..L; not read by `patience`.
            prediction: `[L, N]` predicted classes.
        """
        left = torch.full((prediction.shape[1],), self.num_layers, dtype=torch.int64)
        rule = ExitRule(self.rule, self.threshold, self.num_layers)
        for layer in range(self.min_layer, self.num_layers):
            leaves = rule.decide(certainty[layer - 1], prediction[layer - 1])
            left[leaves & (left == self.num_layers)] = layer
        return left


@dataclass(frozen=True)
class Readings:
    """Layers 0..L of N samples with one target each: positions of a text, or labelled sequences; all on the CPU."""

    prediction: Tensor
    """[L+1, N] int64 predicted class or token."""
    certainty: dict[Rule, Tensor]
    """Rule -> [L+1, N] value that is compared with a threshold; `patience` reads the predictions."""
    sequence: Tensor
    """[N] int64: index of the sequence in the data."""
    cluster: Tensor
    """[N] int64: identity of the unit of independence, over which errors are taken (`Sequences.clusters`)."""
    loss: Tensor
    """[L+1, N] float64 cross-entropy of the target in nats."""
    target: Tensor
    """[N] int64."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.prediction) - 1

    @property
    def correct(self) -> Tensor:
        """[L+1, N] bool: whether the prediction is the target."""
        return self.prediction == self.target

    def layers(self, exit: Exit) -> Tensor:
        """[N] layer after which each sample leaves, 1..L."""
        return exit.layers(self.certainty.get(exit.rule, self.loss)[1:], self.prediction[1:])

    def all_at(self, layer: int) -> Tensor:
        """[N] the same layer for all samples."""
        return torch.full_like(self.sequence, layer)

    def depth(self, share: float) -> tuple[int, int, int]:
        """First layer, from 1, after which all samples can stop and keep this share of the full model's quality.

        The layer by the estimates; the first whose shortfall is not above 0 by more than its 95 % interval; and the
        first whose shortfall is shown to be at most 0, because the interval lies below. The last two are an interval of
        the first. L where no layer before it will do.
        """
        every = [self.shortfall(layer, share) for layer in range(1, self.num_layers)]
        ends = [mean.interval or (-math.inf, math.inf) for mean in every]
        plain, low, high = (
            next((at for at, value in enumerate(values, start=1) if value <= 1e-12), self.num_layers)
            for values in ([mean.value for mean in every], [low for low, _ in ends], [high for _, high in ends])
        )
        return plain, low, high

    @cached_property
    def full(self) -> Mean:
        """Accuracy of the full model."""
        return Mean.of(self.correct[-1].double(), self.cluster)

    @cached_property
    def frequent(self) -> Tensor:
        """[N] whether the target is the most frequent one; the mean is the accuracy of the unigram model."""
        return (self.target == self.target.mode().values).double()

    @cached_property
    def lead(self) -> Mean:
        """Accuracy of the full model minus that of always predicting the most frequent target, paired."""
        return Mean.of(self.correct[-1].double() - self.frequent, self.cluster)

    def shortfall(self, layer: int, share: float = 1.0) -> Mean:
        """A share of the full model's accuracy minus that of layer 0..L, paired."""
        return Mean.of(share * self.correct[-1].double() - self.correct[layer].double(), self.cluster)

    def of(self, is_chosen: Tensor) -> Readings:
        """The readings of some samples, given by `[N]` bool."""
        return _combined([self], lambda values: values[0][..., is_chosen])

    def accuracy(self, layers: Tensor) -> float:
        """Accuracy if samples leave after `layers: [N]`."""
        return float(self.correct.gather(0, layers[None])[0].double().mean())

    def scores(self, layers: Tensor) -> dict[str, Mean]:
        """If samples leave after `layers: [N]`: `accuracy`, `loss` in nats, `agreement` (share of samples with the full
        model's class) and `drop`, the full model's accuracy minus this one, paired.
        """
        prediction = self.prediction.gather(0, layers[None])[0]
        full = self.prediction[-1]
        correct = prediction == self.target
        numbers = {
            "accuracy": correct,
            "loss": self.loss.gather(0, layers[None])[0],
            "agreement": prediction == full,
            "drop": (full == self.target).double() - correct.double(),
        }
        return {name: Mean.of(values, self.cluster) for name, values in numbers.items()}


def batch_size_of(subject: Subject, settings: LayerReadingSettings) -> int:
    """Sequences in a batch: the setting, or 64 of a classifier and 8 of a language model."""
    return settings.batch_size or (64 if subject.anatomy.classifies else 8)


def no_advice(subject: Subject, readings: Readings) -> str | None:
    """Why nothing is advised: the full model is not measurably better than a constant prediction; None if it is."""
    lead = readings.lead
    full = readings.full
    if advisable(lead.value, lead.error, lead.groups):
        return None
    right = f"{100 * full.value:.1f} {plus_minus(100 * full.error, 1) if full.error else ''}".rstrip()
    what = ("answering", "class") if subject.anatomy.classifies else ("predicting", "token")
    chance = float(readings.frequent.mean())
    constant = f"not measurably more than always {what[0]} the most frequent {what[1]} ({chance:.1%})"
    if lead.error is None:
        constant = "and the data give no standard error"
    return f"The full model is right on {right} %, {constant}: nothing is advised."


def sampling(subject: Subject, readings: Readings) -> dict[str, Any]:
    """The entry `sampling` of `results.json`: positions (or labelled sequences) that were read, and all with a target;
    `sentence`, None if all were read.
    """
    positions = len(readings.target)
    targets = subject.sequences.num_targets
    sentence = (
        f"Sampled: every layer reads {positions:,} of {targets:,} positions with a target. "
        "--set lens_tokens=null reads all."
    )
    return {
        "lens_positions": positions,
        "lens_targets": targets,
        "sentence": sentence if positions < targets else None,
    }


@torch.no_grad()
def read_exits(subject: Subject, rules: Sequence[Rule], settings: LayerReadingSettings, watcher: Watcher) -> Readings:
    """Run the data through the model once, and apply its classifier to all layers, for all rules and thresholds.

    Args:
        subject: model and data.
        rules: whose values are computed.
        settings: most positions of a language model, and the seed of their sample.
        watcher: receives progress.

    Raises:
        FulldepthError: if states are NaN or infinite.
    """
    watcher.begin(f"Reading the layers of {Path(subject.checkpoint.name).name}", len(subject.sequences))
    lens_tokens = None if subject.anatomy.classifies else settings.lens_tokens
    sample = PositionSample(subject.sequences, lens_tokens, settings.seed)
    parts: list[Readings] = []
    with capture(subject.anatomy, ["residual"]) as activations:
        for batch in subject.sequences.batches(batch_size_of(subject, settings)):
            inputs = subject.inputs(batch.inputs if batch.masked_inputs is None else batch.masked_inputs)
            subject.anatomy.run_body(inputs)
            states = activations["residual"]
            if not all(map(all_finite, states)):
                raise FulldepthError(
                    "Activations are NaN or infinite; the weights are broken or the precision is too low (try --dtype "
                    "float32)."
                )
            parts.append(_read_batch(subject, batch, states, rules, sample))
            activations.clear()
            watcher.advance(len(batch))
    return _combined(parts, lambda values: torch.cat(list(values), dim=-1))


def _combined(parts: Sequence[Readings], combine: Callable[[Sequence[Tensor]], Tensor]) -> Readings:
    """Readings each of whose tensors is made of those of the parts, of which the last axis is that of samples."""
    names = [field.name for field in fields(Readings) if field.name != "certainty"]
    columns = {name: combine([getattr(part, name) for part in parts]) for name in names}
    rules = parts[0].certainty
    return Readings(certainty={rule: combine([part.certainty[rule] for part in parts]) for rule in rules}, **columns)


def _read_batch(
    subject: Subject, batch: Batch, states: Sequence[Tensor], rules: Sequence[Rule], sample: PositionSample
) -> Readings:
    """The readings of one batch of texts, or of labelled texts or images."""
    targets = batch.labels if subject.anatomy.classifies else batch.targets
    assert targets is not None  # there are targets in the data
    targets = sample.targets(targets, batch.sequence)
    is_read = targets != IGNORE
    target = targets[is_read]
    mask = None
    if subject.anatomy.classifies:
        mask = subject.classifier.sample_mask(batch.inputs, batch.mask(states[0].shape[1]))[is_read]
    named = [rule for rule in rules if rule != "patience"]

    def keep(logits: Tensor, expected: Tensor) -> list[Tensor]:
        values = [losses(logits, expected), *(certainty(logits, rule) for rule in named)]
        return [logits.argmax(-1).cpu(), *(value.double().cpu() for value in values)]

    layers = [
        read_predictions(subject.classifier.at(layer), state[is_read.to(state.device)], target, keep, mask)
        for layer, state in enumerate(states)
    ]
    prediction, loss, *certainties = (torch.stack(column) for column in zip(*layers, strict=True))
    sequence = batch.sequence[is_read.nonzero()[:, 0]]
    clusters = subject.sequences.clusters
    cluster = torch.tensor(clusters, dtype=torch.int64)[sequence] if clusters else sequence
    if subject.sequences.no_error:  # of a single cluster there is no error
        cluster = torch.zeros_like(sequence)
    return Readings(prediction, dict(zip(named, certainties, strict=True)), sequence, cluster, loss, target)


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
    whole = readings.accuracy(readings.all_at(readings.num_layers))
    for threshold in sorted(candidates(readings, rule, min_layer, given), reverse=True):
        layers = readings.layers(Exit(rule, threshold, min_layer, readings.num_layers))
        if not whole - readings.accuracy(layers) <= target + 1e-12:
            break
        best = threshold
    return best


def candidates(readings: Readings, rule: Rule, min_layer: int, given: Sequence[float]) -> set[float]:
    """Thresholds that a calibration tries, in (0, 1]: quantiles of the values that occur, or every patience."""
    layers = readings.num_layers
    if rule == "patience":
        return {1.0, *((number - 0.5) / layers for number in range(1, layers))}
    values = readings.certainty[rule][min_layer:layers].flatten()
    thresholds = {1.0, *given}
    if len(values):
        at = (torch.arange(1, CANDIDATES, dtype=torch.float64) / CANDIDATES * (len(values) - 1)).long()
        thresholds |= {math.floor(value * 1e4) / 1e4 for value in values.sort().values[at].tolist()}
    return {threshold for threshold in thresholds if 0 < threshold <= 1}


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
    is_calibration = torch.isin(unit, present[sample(present.tolist(), count, seed)])
    return {"calibration": readings.of(is_calibration), "report": readings.of(~is_calibration)}
