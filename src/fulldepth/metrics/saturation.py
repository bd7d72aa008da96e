"""Saturation: the first layer after which the prediction no longer changes (aligned training, Sec. 2.2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fulldepth.metrics.base import Influence, Measure, Observation, Row, Setup
from fulldepth.metrics.jackknife import ratio_error, ratio_influence
from fulldepth.uncertainty import crossing


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
    return _first_settled(predictions == predictions[-1])


def _first_settled(agrees: Tensor) -> Tensor:
    """[N] first 1-based layer from which `agrees [L, N]` (agreement with the last layer) holds in all layers."""
    settled = agrees.flip(0).long().cumprod(0).sum(0)  # number of consecutive layers at the end that agree
    return len(agrees) + 1 - settled


class Saturation(Measure):
    """Number and share of positions that settle at each layer 1..L, the cumulative share, and the median layer.

    Over the positions that have a target, as for the layer-wise accuracy. The median is a step, so it has a 95 %
    interval (`low_of_median`, `high_of_median`; see `uncertainty.crossing`) instead of a standard error.
    """

    name = "saturation"
    units: ClassVar[dict[str, str]] = {
        **{"count": "tokens", "share": "1", "cumulative": "1", "standard_error_of_cumulative": "1"},
        **dict.fromkeys(("median", "low_of_median", "high_of_median"), "layers"),
    }
    needs = frozenset({"targets"})
    histogram: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_grouped("histogram", setup.num_layers, dtype=torch.int64)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        layers = _first_settled(observation.lens.agrees[1:])
        groups, depth = self.histogram.shape
        cells = observation.lens_groups(self.setup) * depth + layers - 1
        self.histogram += cells.bincount(minlength=groups * depth).view(groups, depth).to(self.histogram)

    def compute(self) -> tuple[list[int], list[float], dict[str, float]]:
        """Positions that settle at layers 1..L; standard errors of their cumulative shares; the median layer and its
        interval, without those that are unknown.
        """
        counts = self.histogram.sum(0)
        total = int(counts.sum())
        errors = ratio_error(self.histogram.cumsum(1), self.histogram.sum(1, keepdim=True)).tolist()
        if not total:
            return counts.tolist(), errors, {}
        named = {"median": float((2 * counts.cumsum(0) >= total).long().argmax()) + 1}
        by_group = self.histogram.cumsum(1).cpu().numpy()  # [G, L]
        settled = by_group[:, -1:] - 2 * by_group  # above 0 while less than half have settled
        if interval := crossing(settled, by_group[:, -1]):
            named |= {"low_of_median": interval[0] + 1.0, "high_of_median": interval[1] + 1.0}
        return counts.tolist(), errors, named

    def influences_here(self) -> list[Influence]:
        """On the cumulative share of every layer 1..L."""
        values = ratio_influence(self.histogram.cumsum(1), self.histogram.sum(1, keepdim=True))
        return [self.influence("cumulative", each, layer) for layer, each in enumerate(values.T, start=1)]

    def rows(self) -> list[Row]:
        """Rows for each layer 1..L, and three for the median."""
        counted, errors, median = self.compute()
        counts = torch.tensor(counted, dtype=torch.int64)
        total = int(counts.sum())
        statistics = {
            "count": counts.double(),
            "share": counts.double() / total,
            "cumulative": counts.cumsum(0).double() / total,
            "standard_error_of_cumulative": torch.tensor(errors, dtype=torch.float64),
        }
        rows = [
            row
            for layer in range(1, len(counts) + 1)
            for row in self.rows_of(
                {name: float(values[layer - 1]) for name, values in statistics.items()}, total, layer
            )
        ]
        return rows + self.rows_of(median, total)
