"""Early exit as it is served: layers run one by one, samples that leave are removed, and time is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.core.thresholds import BUSY
from fulldepth.core.uncertainty import FEWEST_ROUNDS, Ratio, median_ratio
from fulldepth.execution.decoding import ExitRule
from fulldepth.execution.latency import OtherLoad, now, order
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.exit.readings import Exit, Readings, batch_size_of
from fulldepth.settings.exit import ExitSettings
from fulldepth.subject import Subject
from fulldepth.subject.open import small_batch

MOST_CHANGED = 0.01
IN_HALF = 0.05
"""Largest share of samples that may leave elsewhere than in the one pass (rounding near the threshold); in half
precision."""


@dataclass(frozen=True)
class SpeedUp:
    """Time without early exit over the time with it, from interleaved rounds."""

    ratio: Ratio
    other_load: float
    """Share of the processor that other programs used meanwhile."""
    rounds: int
    seconds: float
    """Median of the rounds with early exit."""

    @classmethod
    def of(cls, full: Sequence[float], early: Sequence[float], other_load: float) -> SpeedUp:
        """From seconds in each round."""
        return cls(median_ratio(full, early), other_load, len(early), median(early))

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
        return {
            "measured_speedup": self.ratio.value,
            "measured_speedup_interval": [self.ratio.low, self.ratio.high] if self.rounds >= FEWEST_ROUNDS else None,
            "timing": self.verdict,
            "seconds": self.seconds,
        }

    def sentence(self) -> str:
        """Sentence on the measured times."""
        ratio = self.ratio
        ends = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
        return {
            "busy": f"The machine was busy ({self.other_load:.0%} of its processor); times are not compared.",
            "few-rounds": f"{self.rounds} timed rounds are too few to tell times apart ({FEWEST_ROUNDS} are needed).",
            "no-difference": f"No measurable difference in time ({ratio.value:.2f} times as fast, {ends}).",
            "differs": f"It is {ratio.value:.2f} times as fast as the full model ({ends}).",
        }[self.verdict]


class EarlyExit:
    """Runs a classifier layer by layer, and removes samples as soon as they leave.

    Args:
        subject: the model, with data for the check of its layers.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._runner = LayerRunner(subject.anatomy, subject.inputs(small_batch(subject.sequences).inputs))

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor], exit: Exit) -> tuple[Tensor, Tensor]:
        """`[B, C]` logits, and `[B]` the layer after which each sample left.

        Args:
            inputs: a batch on the model's device.
            exit: when to leave.
        """
        runner = self._runner
        anatomy = self.subject.anatomy
        last = exit.num_layers
        states = runner.begin(inputs)
        rule = ExitRule(exit.rule, exit.threshold, last)
        first = last if exit.threshold >= 1 else exit.min_layer
        rows = torch.arange(len(next(iter(inputs.values()))), device=states.device)
        left = torch.full_like(rows, last)
        answers = torch.empty(0)
        for layer in range(1, last + 1):
            output = runner.run(layer, states)
            states = anatomy.handed_on(output)
            if layer < first:
                continue
            stream = anatomy.stream(output)
            classifier = self.subject.classifier  # [N, T, D]
            every = torch.ones(stream.shape[:2], dtype=torch.bool, device=stream.device)
            mask = inputs.get("attention_mask", every)
            logits = classifier.at(layer).sequences(stream, classifier.sample_mask(inputs, mask))
            leaves = rule.leaves(logits) if layer < last else torch.ones_like(rows, dtype=torch.bool)
            answers = answers if len(answers) else logits.clone()
            answers[rows[leaves]] = logits[leaves]
            left[rows[leaves]] = layer
            stays = ~leaves
            if not bool(stays.any()):
                break
            if bool(leaves.any()):
                rows = rows[stays]
                states = anatomy.select(states, stays)
                inputs = {name: value[stays] for name, value in inputs.items()}
                rule.keep(stays)
                runner.keep(inputs)
        return answers, left


@torch.no_grad()
def timed(
    subject: Subject, exits: Mapping[Exit, Tensor], readings: Readings, settings: ExitSettings, watcher: Watcher
) -> tuple[dict[Exit, SpeedUp], float]:
    """Time early exit against the model's own forward pass, batch by batch and in changing order.

    The head at every layer and the removal of samples count as part of early exit. Reading the data does not count for
    either. The layers of all samples are compared with those of `readings`.

    Args:
        subject: a classifier, and its data.
        exits: the rules and thresholds to time, and `[N]` the layers after which the samples of `readings` leave.
        readings: the samples.
        settings: rounds (passes over the samples, at least one), and the seed of the order.
        watcher: receives progress.

    Returns:
        The speed-up of each, and seconds of the model's own forward pass for all samples, the median of the rounds.

    Raises:
        FulldepthError: if samples leave elsewhere than in the one pass that gave the readings.
    """
    early = EarlyExit(subject)
    load = OtherLoad()
    model = subject.model
    batch_size = batch_size_of(subject, settings)
    place = {int(sequence): row for row, sequence in enumerate(readings.sequence)}
    # full batches of the samples that were read
    groups = subject.sequences.groups(batch_size, sorted(place))
    rounds = settings.repeats
    watcher.begin("Timing early exit", rounds * len(groups))
    seconds = [[0.0] * rounds for _ in range(1 + len(exits))]
    left_layers = {exit: torch.zeros_like(readings.sequence) for exit in exits}
    for number in range(-1, rounds):  # the first batch of round -1 warms up
        for index, group in enumerate(groups[:1] if number < 0 else groups):
            inputs = subject.inputs(subject.sequences.collate(group).inputs)
            rows = [place[sequence] for sequence in group]
            for turn in order(len(seconds), number + index, settings.seed):
                exit = list(exits)[turn - 1]
                start = now(subject.device)
                left = model(**inputs) if turn == 0 else early.run(inputs, exit)[1]
                elapsed = now(subject.device) - start
                if turn:
                    left_layers[exit][rows] = left.cpu()
                if number >= 0:
                    seconds[turn][number] += elapsed
            if number >= 0:
                watcher.advance(1)
    for exit, expected in exits.items():
        changed = float((expected != left_layers[exit]).double().mean())
        if changed > (IN_HALF if model.dtype.itemsize < 4 else MOST_CHANGED):
            raise FulldepthError(
                f"{changed:.1%} of the samples leave after another layer when others are removed from their batch "
                f"(rule {exit.rule}, threshold {exit.threshold:g}): the model's results depend on the batch. Time it "
                "with --batch-size 1, or not at all (--repeats 0)."
            )
    share = load.share()
    speedups = {
        exit: SpeedUp.of(seconds[0], early_seconds, share)
        for exit, early_seconds in zip(exits, seconds[1:], strict=True)
    }
    return speedups, median(seconds[0])
