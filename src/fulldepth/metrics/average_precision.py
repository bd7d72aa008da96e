"""Average precision of a detector at every layer, by COCO's protocol (aligned training, App. B.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulldepth.distributed import current
from fulldepth.metrics.base import Influence, Measure, Observation, Row, Setup
from fulldepth.metrics.detections import Target, areas, corners, intersections, iou
from fulldepth.metrics.jackknife import error_of, jackknife_influence
from fulldepth.uncertainty import FEWEST_CLUSTERS

THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
"""Intersections over union from which a detection counts as right."""
RECALLS = 101
"""Points of recall, 0 to 1, over which precision is averaged."""
MOST_DETECTIONS = 100
"""Most detections of a class in an image, those of highest score."""
SLACK = 1e-10
"""COCO's own: an intersection over union of a threshold passes despite rounding."""


class Matches(NamedTuple):
    """The detections of one image, matched to its objects; n detections, T thresholds."""

    scores: np.ndarray
    """[n] float64."""
    classes: np.ndarray
    """[n] int64."""
    right: np.ndarray
    """[T, n] bool: matched to an object of its class."""
    ignored: np.ndarray
    """[T, n] bool: matched to a crowd, so neither right nor wrong."""


def average_precision(logits: Sequence[Tensor], boxes: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, float]:
    """Average precision of the detections of some images, in [0, 1].

    Each query gives one detection: its most probable class other than "no object", with that probability as score
    (DETR's own reading). Per class and threshold, detections are matched in the order of their scores to the free
    object of their class with the largest intersection over union. Precision, made non-increasing, is averaged over 101
    points of recall, then over the classes that occur. Areas of all sizes count; detections on crowds are ignored; at
    most 100 detections of a class count in an image.

    Args:
        logits: of each image, `[Q, C+1]`, the last class "no object".
        boxes: of each image, `[Q, 4]`, as in `Detections`.
        targets: of each image.

    Returns:
        `ap` (mean over the thresholds 0.5, 0.55, ..., 0.95), `ap50` and `ap75`; NaN without objects.

    Source: Lin et al. 2014, "Microsoft COCO" (its evaluation code, `COCOeval`).
    """
    matches = [match(*each) for each in zip(logits, boxes, targets, strict=True)]
    return summary(matches, positives(targets))


def positives(targets: Sequence[Target]) -> dict[int, int]:
    """Class -> number of objects that are no crowds."""
    counts: dict[int, int] = {}
    for target in targets:
        for index, crowd in zip(target["class_labels"].tolist(), _crowd(target).tolist(), strict=True):
            counts[index] = counts.get(index, 0) + (not crowd)
    return counts


def match(logits: Tensor, boxes: Tensor, target: Target) -> Matches:
    """Match the detections of an image, `logits: [Q, C+1]` and `boxes: [Q, 4]`, to its objects."""
    scores, classes = logits.detach().double().cpu().softmax(-1)[:, :-1].max(-1)
    found, true = corners(boxes.detach().double().cpu()), corners(target["boxes"].double().cpu())
    labels, crowd = target["class_labels"].cpu(), _crowd(target).cpu()
    parts = [
        _of_class(scores[classes == index], found[classes == index], true[labels == index], crowd[labels == index])
        for index in classes.unique().tolist()
    ]
    indices = [np.full(len(part[0]), index) for part, index in zip(parts, classes.unique().tolist(), strict=True)]
    if not parts:
        empty = np.zeros((len(THRESHOLDS), 0), dtype=bool)
        return Matches(np.zeros(0), np.zeros(0, dtype=np.int64), empty, empty)
    return Matches(
        np.concatenate([part[0] for part in parts]),
        np.concatenate(indices),
        np.concatenate([part[1] for part in parts], axis=1),
        np.concatenate([part[2] for part in parts], axis=1),
    )


def _of_class(scores: Tensor, found: Tensor, true: Tensor, crowd: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, and [T, n] whether right and whether ignored, of one class in one image; n detections, m objects."""
    order = scores.argsort(descending=True, stable=True)[:MOST_DETECTIONS]
    scores, found = scores[order], found[order]
    overlap = iou(found[:, None], true[None])  # [n, m]
    inside = intersections(found[:, None], true[None]) / areas(found)[:, None].clamp(min=1e-300)
    overlaps = torch.where(crowd[None], inside, overlap).numpy()
    single, group = (~crowd).numpy(), crowd.numpy()
    limits = np.minimum(np.array(THRESHOLDS), 1 - SLACK)[:, None]
    taken = np.zeros((len(THRESHOLDS), len(true)), dtype=bool)
    right, ignored = (np.zeros((len(THRESHOLDS), len(found)), dtype=bool) for _ in range(2))
    rows = np.arange(len(THRESHOLDS))
    for index, shares in enumerate(overlaps if len(true) else ()):
        free = (shares[None] >= limits) & single & ~taken
        best = len(true) - 1 - np.where(free, shares, -1.0)[:, ::-1].argmax(1)  # of equals the last, as COCO's code
        hit = free[rows, best]
        taken[rows[hit], best[hit]] = True
        right[:, index] = hit
        ignored[:, index] = ~hit & ((shares[None] >= limits) & group).any(1)
    return scores.numpy(), right, ignored


def summary(matches: Sequence[Matches], counts: Mapping[int, int]) -> dict[str, float]:
    """Average precisions of matched detections.

    Args:
        matches: of all images, in the order of the data.
        counts: class -> number of objects.
    """
    table = _by_class(matches, counts)
    if not table:
        return {"ap": np.nan, "ap50": np.nan, "ap75": np.nan}
    means = np.stack(list(table.values())).mean(0)
    ap50, ap75 = (float(means[THRESHOLDS.index(threshold)]) for threshold in (0.5, 0.75))
    return {"ap": float(means.mean()), "ap50": ap50, "ap75": ap75}


def class_precisions(matches: Sequence[Matches], counts: Mapping[int, int]) -> dict[int, float]:
    """Class with objects -> its average precision, over all thresholds; their mean is the `ap` of `summary`.

    Args:
        matches: as for `summary`.
        counts: as for `summary`.
    """
    return {index: float(values.mean()) for index, values in _by_class(matches, counts).items()}


def _by_class(matches: Sequence[Matches], counts: Mapping[int, int]) -> dict[int, np.ndarray]:
    """Class with objects -> [T] its average precision at each threshold."""
    classes = [index for index, count in sorted(counts.items()) if count]
    if not classes:
        return {}
    scores, labels = (np.concatenate([each[part] for each in matches]) for part in (0, 1))
    right, ignored = (np.concatenate([each[part] for each in matches], axis=1) for part in (2, 3))
    return {
        index: _interpolated(scores[chosen], right[:, chosen], ignored[:, chosen], counts[index])
        for index in classes
        for chosen in [labels == index]
    }


def _interpolated(scores: np.ndarray, right: np.ndarray, ignored: np.ndarray, positives: int) -> np.ndarray:
    """[T] mean of the non-increasing precision over the points of recall, of one class."""
    order = np.argsort(-scores, kind="stable")
    right, ignored = right[:, order], ignored[:, order]
    hits, misses = right.cumsum(1), (~right & ~ignored).cumsum(1)
    recall = hits / positives
    precision = hits / np.maximum(hits + misses, 1)
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    points, values = np.linspace(0, 1, RECALLS), np.zeros(len(right))
    for threshold in range(len(right)):
        at = np.searchsorted(recall[threshold], points, side="left")
        reached = at[at < len(scores)]
        values[threshold] = envelope[threshold][reached].sum() / RECALLS
    return values


def _crowd(target: Target) -> Tensor:
    return target["crowd"] if "crowd" in target else torch.zeros_like(target["class_labels"], dtype=torch.bool)


class AveragePrecision(Measure):
    """Average precision of layers 1..L with its standard error (jackknife over groups of images).

    A layer is read by the model's final norm, class head and box head, or by heads of its own (multi-exit).
    """

    name = "average_precision"
    statistics: ClassVar = ("ap", "ap50", "ap75")
    units: ClassVar = dict.fromkeys((kind + name for name in statistics for kind in ("", "standard_error_of_")), "1")
    needs = frozenset({"boxes", "objects"})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.images: dict[int, tuple[list[Matches], dict[int, int]]] = {}
        """Index of an image -> the matches of layers 1..L, and its `positives`."""

    def reset(self) -> None:
        """Remove all images."""
        super().reset()
        self.images = {}

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        detections = observation.detections
        if detections is None or detections.targets is None:
            raise ValueError("this observation has no boxes; average_precision needs predicted and true ones")
        for row, (sequence, target) in enumerate(zip(observation.sequence.tolist(), detections.targets, strict=True)):
            matches = [
                match(logits[row], boxes[row], target)
                for logits, boxes in zip(detections.logits, detections.boxes, strict=True)
            ]
            self.images[sequence] = matches, positives([target])

    def compute(self) -> tuple[Tensor, Tensor, int]:
        """[L, 3] the average precisions over all processes, `[G, L, 3]` influences on them (G = 0 for fewer than three
        groups), and the number of objects.
        """
        images = {index: found for part in current().gather(self.images) for index, found in part.items()}
        ordered, groups = sorted(images), self.setup.groups
        values, count = self._precisions([images[index] for index in ordered])
        if groups < FEWEST_CLUSTERS:
            return values, values.new_zeros(0, *values.shape), count
        group = self.setup.group_of[ordered].tolist()
        without = [
            self._precisions([images[index] for index, own in zip(ordered, group, strict=True) if own != out])[0]
            for out in range(groups)
        ]
        return values, jackknife_influence(torch.stack(without)), count

    def _precisions(self, images: Sequence[tuple[list[Matches], dict[int, int]]]) -> tuple[Tensor, int]:
        """[L, 3] average precisions of some images, NaN without objects, and the number of objects."""
        counts: dict[int, int] = {}
        for _, found in images:
            for index, number in found.items():
                counts[index] = counts.get(index, 0) + number
        layers = [summary([matches[layer] for matches, _ in images], counts) for layer in range(self.setup.num_layers)]
        values = [[each[name] for name in self.statistics] for each in layers]
        return torch.tensor(values, dtype=torch.float64), sum(counts.values())

    def influences(self) -> list[Influence]:
        """On the three numbers of each layer 1..L."""
        _, values, count = self.compute()
        return [
            self.influence(name, values[:, layer - 1, index], layer)
            for layer in range(1, self.setup.num_layers + 1)
            for index, name in enumerate(self.statistics)
            if count and len(values)
        ]

    def rows(self) -> list[Row]:
        """Three rows for each layer 1..L, and three for their errors if they are known; none without objects."""
        values, influences, count = self.compute()
        errors = error_of(influences)
        return [
            row
            for layer in range(1, self.setup.num_layers + 1)
            for index, name in enumerate(self.statistics)
            for statistic, found in ((name, values), (f"standard_error_of_{name}", errors))
            for row in self.rows_of({statistic: float(found[layer - 1, index])}, count, layer)
            if count
        ]
