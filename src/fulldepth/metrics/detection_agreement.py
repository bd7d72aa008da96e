"""Agreement of a detector's layers with its last one: overlap of boxes, and equality of classes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fulldepth.metrics.base import Influence, Measure, Observation, Row, Setup
from fulldepth.metrics.detections import corners, iou
from fulldepth.metrics.jackknife import error_of, ratio_influence


def detection_agreement(logits: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    """Agreement of layers with the last one, each in [0, 1]; a query is compared with itself.

    Args:
        logits: `[L, B, Q, C+1]`, the last class "no object".
        boxes: `[L, B, Q, 4]`, as in `Detections`.

    Returns:
        [L] float64 by name. `class`: share of the queries with the last layer's class or "no object". `object_class`:
        the same, over the queries in which the last layer sees an object. `box_iou`: mean intersection over union with
        the last layer's box, over these queries. NaN if there is no such query.
    """
    parts = _sums(logits, boxes).double().sum(1)  # [L, 3 + 2]
    every, objects = parts[:, 3], parts[:, 4]
    return {"class": parts[:, 0] / every, "object_class": parts[:, 1] / objects, "box_iou": parts[:, 2] / objects}


def _sums(logits: Tensor, boxes: Tensor) -> Tensor:
    """[L, B, 5] for each image: equal classes, equal classes and overlaps of objects, queries, objects."""
    classes = logits.argmax(-1)  # [L, B, Q]
    same, seen = classes == classes[-1:], classes[-1:] != logits.shape[-1] - 1
    overlap = iou(corners(boxes.double()), corners(boxes[-1:].double()))
    seen = seen.expand_as(same)
    return torch.stack(
        [same.double(), (same & seen).double(), overlap * seen, torch.ones_like(overlap), seen.double()], dim=-1
    ).sum(2)


class DetectionAgreement(Measure):
    """Agreement of layers 1..L with the last one, with standard errors over images."""

    name = "detection_agreement"
    statistics: ClassVar = ("class", "object_class", "box_iou")
    units: ClassVar = {name: "1" for name in (*statistics, *(f"standard_error_of_{name}" for name in statistics))}
    needs = frozenset({"boxes"})
    sums: Tensor
    """[G, L, 5]"""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_grouped("sums", setup.num_layers, 5)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        found = observation.detections
        if found is None:
            raise ValueError("this observation has no predicted boxes; detection_agreement needs them")
        group = self.setup.group_of.to(self.sums.device)[observation.sequence.to(self.sums.device)]
        self.sums.index_add_(0, group, _sums(found.logits, found.boxes).transpose(0, 1).to(self.sums))

    def compute(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Name -> [L] values, their standard errors and counts."""
        counts = self.sums[..., [3, 4, 4]]
        values = self.sums[..., :3].sum(0) / counts.sum(0)
        return {
            name: (
                values[:, index],
                error_of(self._influence()[..., index]),
                counts[..., index].sum(0),
            )
            for index, name in enumerate(self.statistics)
        }

    def _influence(self) -> Tensor:
        """[G, L, 3] influences on the statistics."""
        return ratio_influence(self.sums[..., :3], self.sums[..., [3, 4, 4]])

    def influences(self) -> list[Influence]:
        """On the three statistics of each layer 1..L that have a value."""
        return [
            self.influence(name, values, layer)
            for index, name in enumerate(self.statistics)
            for layer, values in enumerate(self._influence()[..., index].T, start=1)
            if values.isfinite().any()
        ]

    def rows(self) -> list[Row]:
        """Up to six rows for each layer 1..L."""
        return [
            row
            for name, (values, errors, counts) in self.compute().items()
            for layer, (value, error, count) in enumerate(
                zip(*(part.reshape(-1).tolist() for part in (values, errors, counts)), strict=True), start=1
            )
            if count
            for row in self.rows_of({name: value}, count, layer)
            + (self.rows_of({f"standard_error_of_{name}": error}, count, layer) if error == error else [])
        ]
