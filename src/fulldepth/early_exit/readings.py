"""What a model predicts at every layer, and what leaving it after chosen layers gives: for classes and for boxes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fulldepth.early_exit.mean import Mean, replicates
from fulldepth.early_exit.rules import Exit
from fulldepth.metrics.average_precision import Matches, class_precisions, summary
from fulldepth.settings.exit import Rule


class LayerNumber(NamedTuple):
    """A number of a model that stops all samples after one layer: a row of the table."""

    measure: str
    statistic: str
    layer: int
    mean: Mean
    unit: str


@dataclass(frozen=True)
class Readings(ABC):
    """What is read of the layers for N samples; all tensors are on the CPU."""

    quality: ClassVar[str]
    """Name of the number that early exit may cost: a key of `scores`."""
    first_layer: ClassVar[int]
    """Layer of the first row of `prediction`: 0 (the embeddings) or 1."""

    prediction: Tensor
    """[., N] int64 predicted class or token, or [., N, Q] classes of Q queries; a row for each layer up to L."""
    certainty: dict[Rule, Tensor]
    """Rule -> [., N] value that is compared with a threshold; `patience` reads the predictions."""
    sequence: Tensor
    """[N] int64: index of the sequence in the data."""
    cluster: Tensor
    """[N] int64: identity of the unit of independence, over which errors are taken (`Sequences.clusters`)."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.prediction) - 1 + self.first_layer

    def layers(self, exit: Exit) -> Tensor:
        """[N] layer after which each sample leaves, 1..L."""
        start = 1 - self.first_layer
        values = self.certainty.get(exit.rule, torch.zeros(self.prediction.shape[:2], dtype=torch.float64))
        return exit.layers(values[start:], self.prediction[start:])

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
    @abstractmethod
    def chance(self) -> Mean:
        """Quality of a constant prediction: the most frequent target of the samples; of a detector nothing, so 0."""

    @cached_property
    @abstractmethod
    def lead(self) -> Mean:
        """Quality of the full model minus that of the constant prediction, paired."""

    @abstractmethod
    def shortfall(self, layer: int, share: float = 1.0) -> Mean:
        """A share of the full model's quality minus the quality of stopping all samples after a layer, paired."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The readings of several batches as one."""

    @abstractmethod
    def of(self, chosen: Tensor) -> Self:
        """The readings of some samples, given by `[N]` bool."""

    @abstractmethod
    def value(self, layers: Tensor) -> float:
        """The quality if samples leave after `layers: [N]`."""

    @abstractmethod
    def scores(self, layers: Tensor) -> dict[str, Mean]:
        """The quality if samples leave after `layers: [N]`, `agreement` with the full model, and `drop` of quality."""

    @abstractmethod
    def by_layer(self) -> Iterator[LayerNumber]:
        """Numbers of a model that stops all samples after the same layer."""

    @abstractmethod
    def by_class(self, layers: Tensor, classes: int) -> list[tuple[int, Mean | None]]:
        """Of each class the number of its samples or objects, and the quality over them; None without any.

        Args:
            layers: `[N]` layer after which each sample leaves.
            classes: number of classes.
        """


@dataclass(frozen=True)
class ClassReadings(Readings):
    """Layers 0..L of samples with one target each: positions of a text, or labelled sequences."""

    quality = "accuracy"
    first_layer = 0

    loss: Tensor
    """[L+1, N] float64 cross-entropy of the target in nats."""
    target: Tensor
    """[N] int64."""

    @property
    def correct(self) -> Tensor:
        """[L+1, N] bool: whether the prediction is the target."""
        return self.prediction == self.target

    @classmethod
    def joined(cls, parts: Sequence[ClassReadings]) -> ClassReadings:
        """The readings of several batches as one."""
        loss, target = torch.cat([part.loss for part in parts], dim=1), torch.cat([part.target for part in parts])
        return cls(*_shared(parts), loss, target)

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

    def of(self, chosen: Tensor) -> ClassReadings:
        """The readings of some samples, given by `[N]` bool."""
        return ClassReadings(
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
        """`accuracy`, `loss` in nats, `agreement` (share of samples with the full model's class) and `drop`."""
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

    def by_class(self, layers: Tensor, classes: int) -> list[tuple[int, Mean | None]]:
        """Accuracy over the samples of each class."""
        correct = self.correct.gather(0, layers[None])[0]
        chosen = [self.target == index for index in range(classes)]
        return [
            (int(own.sum()), Mean.of(correct[own], self.cluster[own]) if bool(own.any()) else None) for own in chosen
        ]


@dataclass(frozen=True)
class DetectionReadings(Readings):
    """Decoder layers 1..L of images, each with Q predicted classes and boxes, matched to the objects."""

    quality = "average_precision"
    first_layer = 1

    matches: Sequence[Sequence[Matches]]
    """Of each image, the matched detections of layers 1..L."""
    objects: Sequence[dict[int, int]]
    """Of each image, class -> number of objects that are no crowds."""

    @classmethod
    def joined(cls, parts: Sequence[DetectionReadings]) -> DetectionReadings:
        """The readings of several batches as one."""
        matches = [each for part in parts for each in part.matches]
        return cls(*_shared(parts), matches, [each for part in parts for each in part.objects])

    def of(self, chosen: Tensor) -> DetectionReadings:
        """The readings of some images, given by `[N]` bool."""
        kept = chosen.nonzero()[:, 0].tolist()
        return DetectionReadings(
            self.prediction[:, chosen],
            {rule: values[:, chosen] for rule, values in self.certainty.items()},
            self.sequence[chosen],
            self.cluster[chosen],
            [self.matches[index] for index in kept],
            [self.objects[index] for index in kept],
        )

    def value(self, layers: Tensor) -> float:
        """Average precision."""
        return self._precision(layers, torch.ones_like(layers, dtype=torch.bool))

    def scores(self, layers: Tensor) -> dict[str, Mean]:
        """`average_precision`, `agreement` (share of queries with the full model's class) and `drop`."""
        own = self.prediction.gather(0, (layers - 1)[None, :, None].expand(-1, -1, self.prediction.shape[2]))[0]
        precisions = self._replicates(layers)
        return {
            "average_precision": self._mean(precisions),
            "agreement": Mean.of((own == self.prediction[-1]).double().mean(1), self.cluster),
            "drop": self._mean(self._of_last - precisions),
        }

    @cached_property
    def chance(self) -> Mean:
        """Average precision of no detection: 0."""
        return Mean(0.0, 0.0)

    @cached_property
    def lead(self) -> Mean:
        """Average precision of the full model."""
        return self._mean(self._of_last)

    def shortfall(self, layer: int, share: float = 1.0) -> Mean:
        """A share of the full model's average precision minus that of layer 1..L."""
        return self._mean(share * self._of_last - self._replicates(self.all_at(layer)))

    def _mean(self, replicates: Tensor) -> Mean:
        return Mean.of_replicates(replicates, len(self.sequence))

    @cached_property
    def _of_last(self) -> Tensor:
        """[1 + G] average precision of the full model."""
        return self._replicates(self.all_at(self.num_layers))

    def _replicates(self, layers: Tensor) -> Tensor:
        return replicates(lambda chosen: self._precision(layers, chosen), self.cluster)

    def by_layer(self) -> Iterator[LayerNumber]:
        """`average_precision` of decoder layers 1..L, as `measure` states it."""
        for layer in range(1, self.num_layers + 1):
            parts = summary(*self._at(self.all_at(layer), torch.ones_like(self.sequence, dtype=torch.bool)))
            for name, value in parts.items():
                yield LayerNumber("average_precision", name, layer, Mean(value, None), "1")

    def by_class(self, layers: Tensor, classes: int) -> list[tuple[int, Mean | None]]:
        """Average precision of each class."""
        counts = self._at(layers, torch.ones_like(layers, dtype=torch.bool))[1]

        def precision(index: int) -> Mean:
            def of(chosen: Tensor) -> float:
                return class_precisions(*self._at(layers, chosen)).get(index, math.nan)

            return self._mean(replicates(of, self.cluster))

        found = ((index, counts.get(index, 0)) for index in range(classes))
        return [(count, precision(index) if count else None) for index, count in found]

    def _at(self, layers: Tensor, chosen: Tensor) -> tuple[list[Matches], dict[int, int]]:
        """Matched detections and numbers of objects of chosen images, in the order of the data."""
        order = [index for index in self.sequence.argsort().tolist() if chosen[index]]
        counts: dict[int, int] = {}
        for index in order:
            for kind, count in self.objects[index].items():
                counts[kind] = counts.get(kind, 0) + count
        return [self.matches[index][int(layers[index]) - 1] for index in order], counts

    def _precision(self, layers: Tensor, chosen: Tensor) -> float:
        return summary(*self._at(layers, chosen))["ap"]


def _shared(parts: Sequence[Readings]) -> tuple[Tensor, dict[Rule, Tensor], Tensor, Tensor]:
    """Predictions, values of the rules, sequences and clusters of several batches."""
    certainty = {rule: torch.cat([part.certainty[rule] for part in parts], dim=1) for rule in parts[0].certainty}
    return (
        torch.cat([part.prediction for part in parts], dim=1),
        certainty,
        torch.cat([part.sequence for part in parts]),
        torch.cat([part.cluster for part in parts]),
    )
