"""Saturation: the first layer after which the prediction no longer changes (aligned training, Sec. 2.2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.jackknife import leave_one_out, ratio_error, standard_error


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

    Over the positions that have a target, as for the layer-wise accuracy. The median has a standard error over
    sequences; it is 0 if every replicate has the same median layer.
    """

    name = "saturation"
    units: ClassVar[dict[str, str]] = {
        **{"count": "tokens", "share": "1", "cumulative": "1", "standard_error_of_cumulative": "1"},
        **{"median": "layers", "standard_error_of_median": "layers"},
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

    def compute(self) -> tuple[list[int], float, float]:
        """Positions that settle at layers 1..L; the median layer and its standard error, NaN without positions."""
        counts = self.histogram.sum(0)
        error = standard_error(_median(leave_one_out(self.histogram)))
        return counts.tolist(), float(_median(counts)), float(error)

    def rows(self) -> list[Row]:
        """Rows for each layer 1..L, and two for the median."""
        counted, median, error = self.compute()
        counts = torch.tensor(counted, dtype=torch.int64)
        total = int(counts.sum())
        errors = ratio_error(self.histogram.cumsum(1), self.histogram.sum(1, keepdim=True))
        statistics = {
            "count": counts.double(),
            "share": counts.double() / total,
            "cumulative": counts.cumsum(0).double() / total,
            "standard_error_of_cumulative": errors,
        }
        rows = [
            row
            for layer in range(1, len(counts) + 1)
            for row in self.rows_of(
                {name: float(values[layer - 1]) for name, values in statistics.items()}, total, layer
            )
        ]
        return rows + (self.rows_of({"median": median, "standard_error_of_median": error}, total) if total else [])


def _median(counts: Tensor) -> Tensor:
    """[...] float64: the first layer by which half of the positions have settled, from `counts [..., L]`."""
    reached = 2 * counts.cumsum(-1) >= counts.sum(-1, keepdim=True)
    layer = reached.long().argmax(-1) + 1
    return layer.double().where(counts.sum(-1) > 0, torch.nan)
