"""Early exit of classifiers as it is served: samples that leave are removed from the batch, and time is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import order
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.exit.outcome import Outcome
from fulldepth.exit.reading import Readings
from fulldepth.exit.rules import Exit
from fulldepth.exit.subject import Subject

MOST_CHANGED = {torch.float32: 0.01, torch.float64: 0.01}
"""Largest share of samples that may leave elsewhere than in the one pass (rounding near the threshold); 0.05 in half
precision."""
FULL = "full"


@dataclass(frozen=True)
class Timed:
    """Measured times of one rule and threshold."""

    speedup: float
    """Time of the model's own forward pass over the time with early exit: the median of the rounds' ratios."""
    seconds: float
    """Median of the rounds, for all samples."""


class EarlyExit:
    """Runs a classifier layer by layer, and removes samples as soon as they leave.

    Args:
        subject: the model, with data for the check of its layers.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        first = subject.sequences.collate(range(min(2, len(subject.sequences))))
        self.runner = LayerRunner(subject.anatomy, subject.inputs(first.inputs))

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor], exit: Exit) -> tuple[Tensor, Tensor]:
        """[B] predicted classes, and `[B]` the layer after which each sample left.

        Args:
            inputs: a batch on the model's device.
            exit: when to leave.
        """
        runner, anatomy, last = self.runner, self.subject.anatomy, exit.num_layers
        states = runner.begin(inputs)
        rows = torch.arange(len(states), device=states.device)
        prediction, left = torch.zeros_like(rows), torch.full_like(rows, last)
        rule = exit.decision()
        for layer in range(1, last + 1):
            states = runner.run(layer, states)
            if layer < last and (layer < exit.min_layer or exit.is_full):
                continue
            logits = self._logits(layer, anatomy.stream(states), inputs)
            predicted = logits.argmax(-1)
            if layer == last:
                prediction[rows] = predicted
                break
            leaves = rule.leaves(logits)
            if not bool(leaves.any()):
                continue
            prediction[rows[leaves]], left[rows[leaves]] = predicted[leaves], layer
            stays = ~leaves
            if not bool(stays.any()):
                break
            rows, states = rows[stays], states[stays]
            inputs = {name: value[stays] for name, value in inputs.items()}
            rule.keep(stays)
            runner.begin(inputs)
        return prediction, left

    @torch.no_grad()
    def full(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[B] classes that the model's own forward pass predicts."""
        logits: Tensor = self.subject.checkpoint.model(**inputs).logits
        return logits.argmax(-1)

    def _logits(self, layer: int, states: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        mask = inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        classifier = self.subject.classifier
        return classifier.at(layer).sequences(states, classifier.sample_mask(inputs, mask))


def timed(
    subject: Subject,
    outcomes: Sequence[Outcome],
    readings: Readings,
    *,
    rounds: int,
    seed: int,
    advance: Callable[[int], None] = lambda done: None,
) -> tuple[list[Timed], float]:
    """Time early exit against the model's own forward pass, batch by batch and in changing order.

    The classifier at every layer and the removal of samples count as part of early exit. Reading the data does not
    count for either. Classes and layers of every sample are compared with those of `readings`.

    Args:
        subject: a classifier and its data.
        outcomes: the rules and thresholds to time, on the samples of `readings`.
        readings: the samples.
        rounds: passes over the samples, at least 1.
        seed: of the order.
        advance: called with the number of batches completed.

    Returns:
        One result for every outcome, and the median time of the model's own forward pass in seconds.

    Raises:
        FulldepthError: if samples leave elsewhere than in the one pass that gave the readings.
    """
    early, names = EarlyExit(subject), [FULL, *map(str, range(len(outcomes)))]
    groups = _groups(subject, readings)
    seconds = {name: [0.0] * rounds for name in names}
    found = {name: torch.zeros_like(readings.sequence) for name in names[1:]}
    place = {int(sequence): row for row, sequence in enumerate(readings.sequence)}
    for number in range(-1, rounds):
        for index, group in enumerate(groups[:1] if number < 0 else groups):
            inputs = subject.inputs(subject.sequences.collate(group).inputs)
            rows = [place[sequence] for sequence in group]
            for turn in order(len(names), number + index, seed):
                name = names[turn]
                start = _now(subject.device)
                if name == FULL:
                    early.full(inputs)
                else:
                    _, left = early.run(inputs, outcomes[turn - 1].exit)
                elapsed = _now(subject.device) - start
                if number >= 0:
                    seconds[name][number] += elapsed
                if name != FULL:
                    found[name][rows] = left.cpu()
            if number >= 0:
                advance(1)
    for name, expected in zip(names[1:], outcomes, strict=True):
        _check(expected, found[name], subject.checkpoint.model.dtype)
    return [
        Timed(median(full / own for full, own in zip(seconds[FULL], seconds[name], strict=True)), median(seconds[name]))
        for name in names[1:]
    ], median(seconds[FULL])


def batches_of(subject: Subject, readings: Readings) -> int:
    """Number of batches of one timed pass."""
    return len(_groups(subject, readings))


def _groups(subject: Subject, readings: Readings) -> list[list[int]]:
    """Indices of the sequences of each timed batch: full batches of those that the readings hold."""
    present = set(readings.sequence.tolist())
    kept = [index for group in subject.sequences.groups(len(subject.sequences)) for index in group if index in present]
    if subject.sequences.batching == "padded":
        return [kept[start : start + subject.batch_size] for start in range(0, len(kept), subject.batch_size)]
    held = ([index for index in group if index in present] for group in subject.sequences.groups(subject.batch_size))
    return [group for group in held if group]


def _check(outcome: Outcome, left: Tensor, dtype: torch.dtype) -> None:
    """Raise if more samples than rounding explains left after another layer than in the one pass."""
    changed = float((outcome.layers != left).double().mean())
    if changed > MOST_CHANGED.get(dtype, 0.05):
        raise FulldepthError(
            f"{changed:.1%} of the samples leave after another layer when others are removed from their batch (rule "
            f"{outcome.exit.rule}, threshold {outcome.exit.threshold:g}): the model's results depend on the batch. "
            "Time it with --batch-size 1, or not at all (--rounds 0)."
        )


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


__all__ = ["EarlyExit", "Timed", "batches_of", "timed"]
