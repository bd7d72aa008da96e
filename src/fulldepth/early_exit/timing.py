"""Measured times of early exit beside the model's own forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from fulldepth.early_exit.costs import flops_of
from fulldepth.early_exit.outcome import Outcome
from fulldepth.early_exit.readings import Readings
from fulldepth.early_exit.running import EarlyExit
from fulldepth.early_exit.subject import Subject
from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import order

MOST_CHANGED = {torch.float32: 0.01, torch.float64: 0.01}
"""Largest share of samples that may leave elsewhere than in the one pass (rounding near the threshold); 0.05 in half
precision."""


@dataclass(frozen=True)
class Timed:
    """Measured times of one rule and threshold."""

    speedup: float | None
    """Time of the model's own forward pass over the time with early exit: the median of the rounds' ratios; None
    without rounds."""
    seconds: float | None
    """Median of the rounds, for all samples."""
    flops_share: float
    """Floating-point operations over those of the full model."""


@dataclass(frozen=True)
class Timings:
    """Measured times of several rules and thresholds, and of the full model."""

    exits: list[Timed]
    seconds: float | None
    """Median over the rounds of the model's own forward pass, for all samples."""


def timed(
    subject: Subject,
    outcomes: Sequence[Outcome],
    readings: Readings,
    *,
    rounds: int,
    seed: int,
    advance: Callable[[int], None] = lambda done: None,
) -> Timings:
    """Time early exit against the model's own forward pass, batch by batch and in changing order.

    The head at every layer and the removal of samples count as part of early exit. Reading the data does not count for
    either. The layers of all samples are compared with those of `readings`.

    Args:
        subject: a classifier or a detector, and its data.
        outcomes: the rules and thresholds to time, on the samples of `readings`.
        readings: the samples.
        rounds: passes over the samples; 0 = only the operations are counted.
        seed: of the order.
        advance: called with the number of batches completed.

    Returns:
        One result for every outcome, in their order.

    Raises:
        FulldepthError: if samples leave elsewhere than in the one pass that gave the readings.
    """
    early, groups = EarlyExit(subject), _groups(subject, readings)
    seconds, found = _timed_rounds(early, groups, outcomes, readings, rounds, seed, advance)
    for row, expected in enumerate(outcomes) if rounds else ():
        _check(expected, found[row], subject.checkpoint.model.dtype)
    flops = flops_of(early, subject.inputs(subject.sequences.collate(groups[0]).inputs))
    return Timings(
        [
            Timed(
                _median([full / own for full, own in zip(seconds[0], seconds[row], strict=True)]),
                _median(seconds[row]),
                flops.share(expected.exits, expected.exit),
            )
            for row, expected in enumerate(outcomes, start=1)
        ],
        _median(seconds[0]),
    )


def _timed_rounds(
    early: EarlyExit,
    groups: Sequence[list[int]],
    outcomes: Sequence[Outcome],
    readings: Readings,
    rounds: int,
    seed: int,
    advance: Callable[[int], None],
) -> tuple[list[list[float]], list[Tensor]]:
    """Seconds of every round, of the full model and then of each outcome; and the layers after which samples left."""
    subject = early.subject
    seconds = [[0.0] * rounds for _ in range(1 + len(outcomes))]
    found = [torch.zeros_like(readings.sequence) for _ in outcomes]
    place = {int(sequence): row for row, sequence in enumerate(readings.sequence)}
    for number in range(-1, rounds) if rounds else ():
        for index, group in enumerate(groups[:1] if number < 0 else groups):
            inputs = subject.inputs(subject.sequences.collate(group).inputs)
            rows = [place[sequence] for sequence in group]
            for turn in order(len(seconds), number + index, seed):
                start = _now(subject.device)
                if turn == 0:
                    early.full(inputs)
                else:
                    _, left = early.run(inputs, outcomes[turn - 1].exit)
                elapsed = _now(subject.device) - start
                if number >= 0:
                    seconds[turn][number] += elapsed
                if turn:
                    found[turn - 1][rows] = left.cpu()
            if number >= 0:
                advance(1)
    return seconds, found


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


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


__all__ = ["Timed", "Timings", "batches_of", "timed"]
