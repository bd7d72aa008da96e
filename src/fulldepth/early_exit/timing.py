"""Measured times of early exit beside the model's own forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fulldepth.early_exit.costs import flops_of
from fulldepth.early_exit.outcome import Outcome
from fulldepth.early_exit.readings import Readings
from fulldepth.early_exit.running import EarlyExit
from fulldepth.early_exit.subject import Subject
from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import OtherLoad, order
from fulldepth.thresholds import BUSY
from fulldepth.uncertainty import FEWEST_ROUNDS, Ratio, median_ratio

MOST_CHANGED = {torch.float32: 0.01, torch.float64: 0.01}
"""Largest share of samples that may leave elsewhere than in the one pass (rounding near the threshold); 0.05 in half
precision."""


@dataclass(frozen=True)
class SpeedUp:
    """Time without early exit over the time with it, from interleaved rounds."""

    ratio: Ratio
    other_load: float
    """Share of the processor that other programs used meanwhile."""
    rounds: int

    @classmethod
    def of(cls, full: Sequence[float], own: Sequence[float], other_load: float) -> SpeedUp | None:
        """From seconds in each round; None without rounds."""
        return cls(median_ratio(full, own), other_load, len(own)) if own else None

    @property
    def verdict(self) -> str:
        """`busy`, `few-rounds`, `no-difference` or `differs`: only the last is a measured difference."""
        if self.other_load > BUSY:
            return "busy"
        if self.rounds < FEWEST_ROUNDS:
            return "few-rounds"
        return "differs" if self.ratio.differs else "no-difference"

    def document(self) -> dict[str, Any]:
        """The entries in `results.json`."""
        low, high = self.ratio.low, self.ratio.high
        return {
            "measured_speedup": self.ratio.value,
            "measured_speedup_interval": [low, high] if self.rounds >= FEWEST_ROUNDS else None,
            "timing": self.verdict,
        }

    def sentence(self) -> str:
        """What the times say."""
        ratio = self.ratio
        ends = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
        return {
            "busy": f"The machine was busy ({self.other_load:.0%} of its processor); times are not compared.",
            "few-rounds": f"{self.rounds} timed rounds are too few to tell times apart ({FEWEST_ROUNDS} are needed).",
            "no-difference": f"No measurable difference in time ({ratio.value:.2f} times as fast, {ends}).",
            "differs": f"It is {ratio.value:.2f} times as fast as the full model ({ends}).",
        }[self.verdict]


@dataclass(frozen=True)
class Timed:
    """Measured times of one rule and threshold."""

    speedup: SpeedUp | None
    """Of the model's own forward pass; None without rounds."""
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
        subject: a classifier, and its data.
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
    early, groups, load = EarlyExit(subject), _groups(subject, readings), OtherLoad()
    seconds, found = _timed_rounds(early, groups, outcomes, readings, rounds, seed, advance)
    for row, expected in enumerate(outcomes) if rounds else ():
        _check(expected, found[row], subject.checkpoint.model.dtype)
    other_load = load.share()
    flops = flops_of(early, subject.inputs(subject.sequences.collate(groups[0]).inputs))
    return Timings(
        [
            Timed(
                SpeedUp.of(seconds[0], seconds[row], other_load),
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


__all__ = ["SpeedUp", "Timed", "Timings", "batches_of", "timed"]
