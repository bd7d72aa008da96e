"""What a model predicts at every layer, and what leaving it after chosen layers gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.early_exit.mean import Mean
from fulldepth.early_exit.rules import Exit
from fulldepth.settings.exit import Rule


class LayerNumber(NamedTuple):
    """A number of a model that stops all samples after one layer: a row of the table."""

    measure: str
    statistic: str
    layer: int
    mean: Mean
    unit: str


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

    @classmethod
    def joined(cls, parts: Sequence[Readings]) -> Readings:
        """The readings of several batches as one."""
        return cls(
            torch.cat([part.prediction for part in parts], dim=1),
            {rule: torch.cat([part.certainty[rule] for part in parts], dim=1) for rule in parts[0].certainty},
            torch.cat([part.sequence for part in parts]),
            torch.cat([part.cluster for part in parts]),
            torch.cat([part.loss for part in parts], dim=1),
            torch.cat([part.target for part in parts]),
        )

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
        values = self.certainty.get(exit.rule, torch.zeros(self.prediction.shape, dtype=torch.float64))
        return exit.layers(values[1:], self.prediction[1:])

    @cached_property
    def full(self) -> dict[str, Mean]:
        """`scores` of the full model."""
        return self.scores(self.all_at(self.num_layers))

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
        found = (
            next((at for at, value in enumerate(values, start=1) if value <= 1e-12), self.num_layers)
            for values in ([mean.value for mean in every], [low for low, _ in ends], [high for _, high in ends])
        )
        plain, low, high = found
        return plain, low, high

    @cached_property
    def chance(self) -> Mean:
        """Share of the most frequent target: of a language model, the accuracy of the unigram model."""
        return Mean.of((self.target == self.target.mode().values).double(), self.cluster)

    @cached_property
    def lead(self) -> Mean:
        """Accuracy of the full model minus that of always predicting the most frequent target, paired."""
        return Mean.of(self.correct[-1].double() - (self.target == self.target.mode().values).double(), self.cluster)

    def shortfall(self, layer: int, share: float = 1.0) -> Mean:
        """A share of the full model's accuracy minus that of layer 0..L, paired."""
        return Mean.of(share * self.correct[-1].double() - self.correct[layer].double(), self.cluster)

    def of(self, chosen: Tensor) -> Readings:
        """The readings of some samples, given by `[N]` bool."""
        return Readings(
            self.prediction[:, chosen],
            {rule: values[:, chosen] for rule, values in self.certainty.items()},
            self.sequence[chosen],
            self.cluster[chosen],
            self.loss[:, chosen],
            self.target[chosen],
        )

    def value(self, layers: Tensor) -> float:
        """Accuracy."""
        return float(self.correct.gather(0, layers[None])[0].double().mean())

    def scores(self, layers: Tensor) -> dict[str, Mean]:
        """If samples leave after `layers: [N]`: `accuracy`, `loss` in nats, `agreement` (share of samples with the full
        model's class) and `drop`, the full model's accuracy minus this one, paired.
        """
        prediction, loss = self.prediction.gather(0, layers[None])[0], self.loss.gather(0, layers[None])[0]
        correct, full = prediction == self.target, self.prediction[-1]
        numbers = {
            "accuracy": correct,
            "loss": loss,
            "agreement": prediction == full,
            "drop": (full == self.target).double() - correct.double(),
        }
        return {name: Mean.of(values, self.cluster) for name, values in numbers.items()}

    def by_layer(self) -> Iterator[LayerNumber]:
        """`lens_loss` and `lens_accuracy` of layers 0..L."""
        for layer in range(self.num_layers + 1):
            yield LayerNumber("lens_loss", "mean", layer, Mean.of(self.loss[layer], self.cluster), "nats")
            yield LayerNumber("lens_accuracy", "mean", layer, Mean.of(self.correct[layer], self.cluster), "1")
