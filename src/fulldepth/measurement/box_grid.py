"""Lens grid of a detector: the boxes that every decoder layer predicts in some images, beside the true ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulldepth.data import Batch, image_name
from fulldepth.distributed import Processes
from fulldepth.measurement.sample_grid import class_name, picture_of, title_of
from fulldepth.measurement.subject import Subject
from fulldepth.metrics import Detections, saturation_layer
from fulldepth.metrics.detections import corners, iou
from fulldepth.settings.measure import MeasureSettings
from fulldepth.uncertainty import sample

IMAGES = 6
"""Images shown, unless `grid_samples` gives another number."""
LOWEST = 0.3
"""Lowest score, at some layer, of a query that is kept."""
QUERIES = 30
"""Most queries of an image that are kept, those of highest score."""


class BoxGrid:
    """Collects the detections of a seeded choice of images, batch by batch.

    Args:
        subject: a detector and its data.
        settings: number of images, seed, whether pictures are kept.
    """

    def __init__(self, subject: Subject, settings: MeasureSettings) -> None:
        self.subject, self.pictures = subject, settings.pictures
        count = IMAGES if settings.grid_samples is None else settings.grid_samples
        self.chosen = frozenset(sample(range(len(subject.sequences)), count, settings.seed))
        self.kept: dict[int, dict[str, Any]] = {}
        """Index of an image -> its entry without title and picture."""

    def add(self, batch: Batch, detections: Detections) -> None:
        """Add the chosen images of a batch."""
        for row, index in enumerate(batch.sequence.tolist()):
            if index in self.chosen:
                target = None if detections.targets is None else detections.targets[row]
                scores = detections.logits[:, row].float().cpu().softmax(-1)  # [L, Q, C+1]
                self.kept[index] = self._entry(scores, corners(detections.boxes[:, row].float().cpu()), target)

    def _entry(self, scores: Tensor, boxes: Tensor, target: Any) -> dict[str, Any]:
        """Queries and true objects of one image as plain data, from `scores [L, Q, C+1]` and `boxes [L, Q, 4]`."""
        best, label = scores[..., :-1].max(-1)  # [L, Q]
        highest = best.amax(0)
        order = highest.argsort(descending=True, stable=True)[:QUERIES]
        order = order[highest[order] >= LOWEST]
        settled = saturation_layer(scores.argmax(-1)[:, order])
        best, label, boxes = best[:, order], label[:, order], boxes[:, order].clamp(0, 1)
        true, classes = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
        if target is not None:
            true, classes = corners(target["boxes"].float().cpu()).clamp(0, 1), target["class_labels"].cpu()
        overlaps = iou(boxes[:, :, None], true) * (label[..., None] == classes)  # [L, Q, objects]
        overlap = overlaps.amax(-1) if len(true) else torch.zeros_like(best)
        drawn = torch.cat([boxes, overlap[..., None]], dim=-1)
        nothing: list[list[Any]] = [[None, None]] * len(order)
        return {
            "tokens": [f"query {query}" for query in order.tolist()],
            "targets": [""] * len(order),
            "saturation": settled.tolist(),
            "grid": [nothing, *(self._cells(names, chances) for names, chances in zip(label, best, strict=True))],
            "boxes": [[None] * len(order), *_rounded(drawn)],
            "objects": None
            if target is None
            else [
                [class_name(self.subject, index), *box]
                for index, box in zip(classes.tolist(), _rounded(true), strict=True)
            ],
        }

    def _cells(self, labels: Tensor, scores: Tensor) -> list[list[Any]]:
        pairs = zip(labels.tolist(), _rounded(scores), strict=True)
        return [[class_name(self.subject, label), score] for label, score in pairs]

    def grid(self, process: Processes) -> dict[str, Any] | None:
        """The lens grid of all processes' images as plain data; None in all but the first one, and without images."""
        everyone = {index: entry for part in process.gather(self.kept) for index, entry in part.items()}
        if not everyone or not process.is_main:
            return None
        return {"of": "boxes", "samples": [self._described(index) | everyone[index] for index in sorted(everyone)]}

    def _described(self, index: int) -> dict[str, Any]:
        """Title, size and picture of an image."""
        load = self.subject.sequences.examples[index].load
        name = image_name(load) if self.pictures else ""
        title = title_of(self.subject, index)
        return {
            "title": f"{title}, {name}" if name else title,
            "size": list(load().size),
            "picture": picture_of(self.subject, index) if self.pictures else None,
        }


def _rounded(values: Tensor) -> Any:
    return torch.round(values.double(), decimals=4).tolist()
