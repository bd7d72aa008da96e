"""Measures of the lens, the last layer's classifier on every layer: accuracy, loss, saturation, effective depth."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fulldepth.core.uncertainty import crossing
from fulldepth.metrics.base import Estimated, Means, Observation, Place, Readout, Setup
from fulldepth.metrics.standard_errors import (
    Estimate,
    EstimateArray,
    influence_of_estimate,
    influence_of_ratio,
    leave_one_out,
)

EPSILONS = (0.01, 0.05, 0.1, 0.2)
"""Tolerances relative to perfect accuracy (Def. 1)."""
RELATIVE_EPSILONS = (0.01, 0.05, 0.1)
"""Tolerances relative to the last layer's accuracy."""
FEWEST_OF_CLASS = 10
"""Fewest samples of every class for which macro F1 has a standard error. In simulations of rows with two or three
classes, predicted with accuracies of 0.5 to 0.9, the interval holds the truth in 0.87 or more where the rarest class
has so many rows, and in 0.37 to 0.70 where it has one."""
STATISTICS = (*(f"eps={eps:g}" for eps in EPSILONS), *(f"relative_eps={eps:g}" for eps in RELATIVE_EPSILONS))
LOW_OF = "low_of_"
HIGH_OF = "high_of_"


def saturation_layer(predictions: Tensor) -> Tensor:
    r"""The layer at which each position's prediction settles.

    .. math:: \min \{ l : g(h^{(l)}) = g(h^{(l+1)}) = \dots = g(h^{(L)}) \}

    Args:
        predictions: top prediction of layers 1..L at every position, `[L, N]`.

    Returns:
        `[N]` int64, 1-based layers in 1..L.

    Raises:
        ValueError: if `predictions` is not `[L, N]` with at least one layer.

    Source: "Representation progression and aligned training", Sec. 2.2.
    """
    if predictions.ndim != 2 or not len(predictions):
        raise ValueError(f"predictions must be [L, N] with L >= 1, got shape {tuple(predictions.shape)}")
    agrees = predictions == predictions[-1]
    settled = agrees.flip(0).long().cumprod(0).sum(0)  # number of consecutive layers at the end that agree
    return len(agrees) + 1 - settled


def effective_depth(accuracy: Tensor | Sequence[float], eps: float, relative: bool = False) -> int:
    r"""The eps-effective depth.

    .. math:: \min \{ l : \mathrm{Acc}^{(l)} \ge 1 - \epsilon \}, \text{ else } L

    Few models reach `1 - eps` on language; `relative=True` uses the threshold `(1 - eps) Acc^(L)` instead, which the
    last layer always reaches. (If the last layer is never correct, the result is 1.) It is exact for counts of correct
    predictions, where quotients that are equal to the threshold may round to less.

    Args:
        accuracy: layer-wise accuracy of layers 1..L, `[L]`, or numbers proportional to it if `relative`; NaN is below
            every threshold.
        eps: tolerance in [0, 1].
        relative: take the threshold relative to the last layer's accuracy rather than to 1.

    Returns:
        A 1-based layer in 1..L.

    Raises:
        ValueError: if `eps` is out of range or `accuracy` does not hold one value per layer.

    Source: "Representation progression and aligned training", Def. 1; the relative form is ours.
    """
    values = accuracy if isinstance(accuracy, Tensor) else torch.tensor(accuracy, dtype=torch.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"accuracy must hold one value per layer, [L], got shape {tuple(values.shape)}")
    if not 0 <= eps <= 1:
        raise ValueError(f"eps must lie in [0, 1], got {eps}")
    target = (1 - eps) * values[-1] if relative else 1 - eps
    enough = (values >= target).nonzero()
    return int(enough[0]) + 1 if len(enough) else len(values)


class LensMean(Means):
    """Mean over positions of one lens statistic, with its standard error, for layers 0..L.

    A subclass picks the statistic in `reading`.
    """

    needs = frozenset({"targets"})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.num_layers + 1, counts=(1,))

    @abstractmethod
    def reading(self, lens: Readout) -> Tensor:
        """[L+1, M] values to average."""

    def places(self, counts: Tensor) -> Iterator[Place]:
        """Layers 0..L."""
        return (Place((layer,), layer) for layer in range(self.setup.num_layers + 1))

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        self.counts += self.add_readout(self.sums, observation, observation.lens)

    def add_readout(self, sums: Tensor, observation: Observation, lens: Readout) -> Tensor:
        """Add the values of a batch's readout to `sums [G, L+1]`, and return their numbers by group, `[G, 1]`."""
        where = sums.device
        values = self.reading(lens).to(where)  # [L+1, M]
        row = lens.row.to(where)  # [M]
        group = self.setup.group_of.to(where)[observation.sequence.to(where)[row]]
        sums.index_add_(0, group, values.double().T)
        return group.bincount(minlength=len(sums))[:, None]


class LensAccuracy(LensMean):
    r"""Accuracy of the last layer's classifier g on layers 0..L, over the N positions that have a target y.

    .. math:: \mathrm{Acc}^{(l)} = \frac{1}{N} \sum_i [\arg\max g(h_i^{(l)}) = y_i]

    Source: "Representation progression and aligned training", Eq. 2.
    """

    name = "lens_accuracy"
    units = dict.fromkeys(("mean", "standard_error"), "1")

    def reading(self, lens: Readout) -> Tensor:
        """Correctness of the top prediction, bool."""
        return lens.correct


class LensLoss(LensMean):
    r"""Cross-entropy of the last layer's classifier on layers 0..L, over the N positions that have a target y.

    .. math:: \frac{1}{N} \sum_i \log \sum_v e^{z_{iv}} - z_{i y_i}, \quad z_i = g(h_i^{(l)})

    Source: "JREG: final-layer jumps", App. K: the loss if inference stopped at this layer.
    """

    name = "lens_loss"
    units = dict.fromkeys(("mean", "standard_error"), "nats")

    def reading(self, lens: Readout) -> Tensor:
        """Cross-entropy in nats."""
        return lens.loss


def macro_f1(hits: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    r"""Mean over classes of F1, the harmonic mean of precision and recall.

    .. math:: \frac{1}{K} \sum_k \frac{2 \, \mathrm{hits}_k}{\mathrm{predicted}_k + \mathrm{true}_k}

    Args:
        hits: number of right predictions of every class, `[..., K]`.
        predicted: number of predictions of every class, `[..., K]`.
        true: number of samples of every class, `[..., K]`.

    Returns:
        `[...]` float64, unit 1, in [0, 1], over the classes that occur as prediction or target (as scikit-learn's
        `f1_score(average="macro")`); NaN if none does.
    """
    total = (predicted + true).double()
    return (2 * hits / total).nanmean(-1)


class LensF1(Estimated):
    """Macro F1 of the last layer's classifier on layers 0..L, with its standard error (jackknife over groups).

    The error is not stated where a class that occurs has fewer than `FEWEST_OF_CLASS` samples.

    Source: "Representation progression and aligned training", Fig. 8 and 21 (accuracy or F1 of GLUE's tasks).
    """

    name = "lens_f1"
    units = dict.fromkeys(("macro", "standard_error_of_macro"), "1")
    needs = frozenset({"targets", "classes"})
    hits: Tensor
    predicted: Tensor
    true: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_grouped("hits", setup.num_layers + 1, setup.num_classes)
        self.add_grouped("predicted", setup.num_layers + 1, setup.num_classes)
        self.add_grouped("true", 1, setup.num_classes)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        lens = observation.lens
        if lens.predicted is None or lens.target is None:
            raise ValueError(
                "this observation has no predicted classes; lens_f1 needs a head that classifies sequences"
            )
        where = self.hits.device
        predicted = lens.predicted.to(where)  # [L+1, M]
        target = lens.target.to(where)  # [M]
        group = self.setup.group_of.to(where)[observation.sequence.to(where)[lens.row.to(where)]]
        classes = one_hot(predicted, self.setup.num_classes).double().transpose(0, 1)  # [M, L+1, K]
        true = one_hot(target, self.setup.num_classes).double()[:, None]  # [M, 1, K]
        self.predicted.index_add_(0, group, classes)
        self.true.index_add_(0, group, true)
        self.hits.index_add_(0, group, classes * true)

    def compute(self) -> list[Estimate]:
        """Macro F1 of layers 0..L."""
        sums = (self.hits, self.predicted, self.true)
        values = macro_f1(*(state.sum(0) for state in sums))  # [L+1]
        influences = influence_of_estimate(macro_f1(*map(leave_one_out, sums)))  # [G, L+1]
        predicted, true = (state.sum(0).cpu() for state in (self.predicted, self.true))  # [L+1, K], [1, K]
        has_few = ((true < FEWEST_OF_CLASS) & (predicted + true > 0)).any(-1)  # [L+1]
        influences = influences.masked_fill(has_few, math.nan)
        numbers = EstimateArray.of(values, self.true.sum(), influences)
        return [numbers.at((layer,), "macro", layer) for layer in range(len(values))]


class OfLayersReached(LensMean):
    """Base class of measures whose value is the first layer that meets a condition, from sums per group `[G, L]`.

    Such a value is a whole number, so it has a 95 % interval (`low_of_`, `high_of_`; see `uncertainty.crossing`)
    instead of a standard error.
    """

    def interval(self, name: str, missing: Tensor) -> dict[str, float]:
        """Return the interval of the first layer at which `missing [G, L]` sums to 0 or less; empty if unknown."""
        ends = crossing(missing.cpu().numpy(), self.counts[:, 0].cpu().numpy())
        return {} if ends is None else {LOW_OF + name: ends[0] + 1.0, HIGH_OF + name: ends[1] + 1.0}


class Saturation(OfLayersReached):
    """Number and share of positions that settle at each layer 1..L, the cumulative share, and the median layer.

    Only positions that have a target count, as for the layer-wise accuracy. The median has an interval.
    """

    name = "saturation"
    units: ClassVar[dict[str, str]] = {
        **{"count": "tokens", "share": "1", "cumulative": "1", "standard_error_of_cumulative": "1"},
        **dict.fromkeys(("median", "low_of_median", "high_of_median"), "layers"),
    }

    def reading(self, lens: Readout) -> Tensor:
        """1 where all layers from this one to the last agree, else 0."""
        return lens.agrees.flip(0).long().cumprod(0).flip(0)

    def compute(self) -> list[Estimate]:
        """Numbers of each layer 1..L, then the median and its interval if they are known."""
        counts = self.counts.sum(0)
        total = int(counts)
        sums = self.sums.sum(0)  # [L+1]
        cumulative = EstimateArray.of(sums / counts, counts, influence_of_ratio(self.sums, self.counts))
        settled = sums[1:]
        numbers = []
        for layer, count in enumerate(settled.diff(prepend=settled.new_zeros(1)).tolist(), start=1):
            share = count / total if total else math.nan
            numbers += [
                Estimate("count", count, total, layer),
                Estimate("share", share, total, layer),
                cumulative.at((layer,), "cumulative", layer),
            ]
        if total:
            median = float((2 * settled >= total).long().argmax()) + 1
            layers = {"median": median} | self.interval("median", self.counts - 2 * self.sums[:, 1:])
            numbers += [Estimate(name, layer, total) for name, layer in layers.items()]
        return numbers


class EffectiveDepth(OfLayersReached, LensAccuracy):
    """Effective depth for several tolerances, absolute (Def. 1) and relative to the last layer's accuracy.

    NaN if no position has a target or, for the relative form, if the last layer is never correct. A depth has an
    interval: `low_of_` is the first layer whose accuracy is not below the threshold by more than the error of the
    (paired) difference, `high_of_` the first whose accuracy is above it by more than that error.
    """

    name = "effective_depth"
    units = dict.fromkeys((kind + statistic for kind in ("", LOW_OF, HIGH_OF) for statistic in STATISTICS), "layers")

    def compute(self) -> list[Estimate]:
        """The depth for each tolerance, with the ends of its interval if they are known."""
        correct = self.sums[:, 1:]
        total = correct.sum(0).cpu()
        count = int(self.counts.sum())
        named: dict[str, float] = {}
        for name, eps in zip(STATISTICS, (*EPSILONS, *RELATIVE_EPSILONS), strict=True):
            relative = name.startswith("relative")
            if not count or (relative and not total[-1] > 0):
                named[name] = math.nan
                continue
            named[name] = float(effective_depth(total if relative else total / count, eps, relative))
            named |= self.interval(name, (1 - eps) * (correct[:, -1:] if relative else self.counts) - correct)
        return [Estimate(name, depth, count) for name, depth in named.items()]
