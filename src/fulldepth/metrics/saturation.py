"""Saturation: the layer from which on the prediction no longer changes (aligned training, Sec. 2.2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup


def saturation_layer(predictions: Tensor) -> Tensor:
    r"""The layer at which every position's prediction settles.

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
    """[N] 1-based layer from which on `agrees [L, N]` (with the last layer, itself included) holds throughout."""
    settled = agrees.flip(0).long().cumprod(0).sum(0)  # how many layers at the end agree without a break
    return len(agrees) + 1 - settled


class Saturation(Measure):
    """How many positions settle at each layer 1..L, their share, and the share settled so far.

    Over the positions that have a target, as for the layer-wise accuracy.
    """

    name = "saturation"
    units: ClassVar[dict[str, str]] = {"count": "tokens", "share": "1", "cumulative": "1"}
    needs = frozenset({"targets"})
    histogram: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("histogram", setup.num_layers, dtype=torch.int64)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        layers = _first_settled(observation.lens.agrees[1:])
        self.histogram += (layers - 1).bincount(minlength=self.setup.num_layers).to(self.histogram)

    def compute(self) -> list[int]:
        """Positions that settle at layers 1..L."""
        return self.histogram.tolist()

    def rows(self) -> list[Row]:
        """Three rows for each layer 1..L."""
        counts = torch.tensor(self.compute(), dtype=torch.int64)
        total = int(counts.sum())
        statistics = {
            "count": counts.double(),
            "share": counts.double() / total,
            "cumulative": counts.cumsum(0).double() / total,
        }
        return [
            Row(self.name, "residual", layer, None, statistic, float(values[layer - 1]), total, self.units[statistic])
            for layer in range(1, len(counts) + 1)
            for statistic, values in statistics.items()
        ]

    @classmethod
    def memory(cls, setup: Setup) -> int:
        """Bytes held: a count per layer."""
        return 8 * setup.num_layers
