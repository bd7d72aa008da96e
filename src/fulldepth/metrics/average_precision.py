"""Average precision of a detector at every layer, by COCO's own code (aligned training, App. B.5)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from copy import copy
from io import StringIO
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fulldepth.core.distributed import current
from fulldepth.core.errors import needing
from fulldepth.core.uncertainty import FEWEST_CLUSTERS
from fulldepth.metrics.base import Influence, Measure, Observation, Row, Setup
from fulldepth.metrics.jackknife import error_of, jackknife_influence

Target = Mapping[str, Tensor]
"""Objects of one image: `class_labels` [n], `boxes` [n, 4] and perhaps `crowd` [n] bool."""


def average_precision(logits: Sequence[Tensor], boxes: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, float]:
    """Average precision of the detections of some images, in [0, 1].

    Each query gives one detection: its most probable class other than "no object", with that probability as score
    (DETR's own reading). Areas of all sizes count; detections on crowds are ignored; at most 100 detections of a class
    count in an image.

    Args:
        logits: of each image, `[Q, C+1]`, the last class "no object".
        boxes: of each image, `[Q, 4]`, as in `Detections`.
        targets: of each image.

    Returns:
        `ap` (mean over the thresholds 0.5, 0.55, ..., 0.95), `ap50` and `ap75`; NaN without objects.

    Raises:
        FulldepthError: if pycocotools is not installed.

    Source: Lin et al. 2014, "Microsoft COCO", and its evaluation code, pycocotools.
    """
    values = precisions(matched(logits, boxes, targets))
    return dict(zip(AveragePrecision.statistics, values, strict=True))


def matched(logits: Sequence[Tensor], boxes: Sequence[Tensor], targets: Sequence[Target]) -> Any:
    """The `COCOeval` of pycocotools in which detections are matched to objects; arguments as of `average_precision`."""
    tools, evaluation = _pycocotools()
    truth: list[dict[str, Any]] = []
    detected: list[dict[str, Any]] = []
    for image, (scores, predicted, target) in enumerate(zip(logits, boxes, targets, strict=True)):
        crowd = target.get("crowd", torch.zeros(len(target["class_labels"])))
        for category, box, group in zip(target["class_labels"], target["boxes"], crowd, strict=True):
            truth.append(_annotation(image, category, box) | {"iscrowd": int(group)})
        probability, best = scores.detach().double().softmax(-1)[:, :-1].max(-1)
        for category, box, score in zip(best, predicted.detach(), probability, strict=True):
            detected.append(_annotation(image, category, box) | {"score": float(score)})
    classes = sorted({each["category_id"] for each in truth})
    sides = []
    with redirect_stdout(StringIO()):
        for annotations in (truth, detected):
            side = tools.COCO()
            side.dataset = {
                "images": [{"id": image} for image in range(len(targets))],
                "categories": [{"id": index} for index in classes],
                "annotations": [{**each, "id": number} for number, each in enumerate(annotations, start=1)],
            }
            side.createIndex()
            sides.append(side)
        found = evaluation.COCOeval(*sides, "bbox")
        found.params.areaRng = [[0, 1e10]]
        found.params.areaRngLbl = ["all"]
        found.params.maxDets = [100]
        found.evaluate()
    return found


def precisions(found: Any, left_out: Collection[int] = ()) -> list[float]:
    """`ap`, `ap50` and `ap75` of matched detections, without those of some images; NaN without objects."""
    params = copy(found.params)
    params.imgIds = [-1 if image in left_out else image for image in params.imgIds]
    with redirect_stdout(StringIO()):
        found.accumulate(params)
    by_class = found.eval["precision"].mean(
        (1, 3, 4)
    )  # [T, K] over 101 points of recall; -1 of a class without objects
    values = by_class[:, by_class[0] > -1].mean(1) if (by_class[0] > -1).any() else np.full(len(by_class), np.nan)
    thresholds = params.iouThrs.round(2).tolist()
    return [float(values.mean()), *(float(values[thresholds.index(limit)]) for limit in (0.5, 0.75))]


def _annotation(image: int, category: Tensor, box: Tensor) -> dict[str, Any]:
    """A box in COCO's form: left, top, width, height."""
    x, y, width, height = box.double().tolist()
    corner = [x - width / 2, y - height / 2, width, height]
    return {"image_id": image, "category_id": int(category), "bbox": corner, "area": width * height}


def _pycocotools() -> tuple[Any, Any]:
    with needing("pycocotools", "vision", "Average precision"):
        from pycocotools import coco, cocoeval  # noqa: PLC0415  # an extra
    return coco, cocoeval


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
        _pycocotools()
        self.images: dict[int, tuple[Tensor, Tensor, Target]] = {}
        """Index of an image -> logits `[L, Q, C+1]`, boxes `[L, Q, 4]` and objects, on the CPU."""

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
            logits, boxes = (each[:, row].detach().cpu() for each in (detections.logits, detections.boxes))
            self.images[sequence] = logits, boxes, {name: value.cpu() for name, value in target.items()}

    def compute(self) -> tuple[Tensor, Tensor, int]:
        """[L, 3] the average precisions over all processes, `[G, L, 3]` influences on them (G = 0 for fewer than three
        groups), and the number of objects.
        """
        images = {index: found for part in current().gather(self.images) for index, found in part.items()}
        ordered = sorted(images)
        groups = self.setup.groups
        group = self.setup.group_of[ordered].tolist()
        logits, boxes, targets = zip(*(images[index] for index in ordered), strict=True) if images else ((), (), ())
        values = []
        without = []
        for layer in range(self.setup.num_layers):
            found = matched([each[layer] for each in logits], [each[layer] for each in boxes], targets)
            values.append(precisions(found))
            if groups >= FEWEST_CLUSTERS:
                members = [{place for place, own in enumerate(group) if own == out} for out in range(groups)]
                without.append([precisions(found, left_out) for left_out in members])
        influences = jackknife_influence(torch.tensor(without).transpose(0, 1)) if without else torch.zeros(0)
        count = sum(int((~target["crowd"]).sum()) if "crowd" in target else len(target["boxes"]) for target in targets)
        return torch.tensor(values, dtype=torch.float64), influences, count

    def influences(self) -> list[Influence]:
        """On the three numbers of each layer 1..L."""
        _, values, count = self.compute()
        layers = enumerate(values.unbind(1), start=1) if count and len(values) else ()  # [G, 3] each
        return [
            self.influence(name, column, layer)
            for layer, columns in layers
            for name, column in zip(self.statistics, columns.T, strict=True)
        ]

    def rows(self) -> list[Row]:
        """Three rows for each layer 1..L, and three for their errors if they are known; none without objects."""
        values, influences, count = self.compute()
        errors = error_of(influences) if len(influences) else torch.full_like(values, torch.nan)
        rows = []
        for layer in range(self.setup.num_layers if count else 0):
            found: dict[str, float] = {}
            for name, value, error in zip(self.statistics, values[layer].tolist(), errors[layer].tolist(), strict=True):
                found |= {name: value, f"standard_error_of_{name}": error}
            rows += self.rows_of(found, count, layer + 1)
        return rows
