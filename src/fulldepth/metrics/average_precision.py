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
from fulldepth.metrics.base import Estimated, Observation, Setup
from fulldepth.metrics.standard_errors import Estimate, EstimateArray, influence_of_estimate

Target = Mapping[str, Tensor]
"""Objects of one image: `class_labels` [n], `boxes` [n, 4] and perhaps `crowd` [n] bool."""


def average_precision(logits: Sequence[Tensor], boxes: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, float]:
    """Average precision of the detections in images, in [0, 1].

    Each query gives one detection, as in DETR: its most probable class other than "no object", with that probability
    as score. Areas of all sizes count; detections on crowds are ignored; at most 100 detections of a class count in an
    image.

    Args:
        logits: one tensor `[Q, C+1]` for each image; the last class is "no object".
        boxes: one tensor `[Q, 4]` for each image, as in `Detections`.
        targets: the objects of each image.

    Returns:
        `ap` (mean over the thresholds 0.5, 0.55, ..., 0.95), `ap50` and `ap75`; NaN without objects.

    Raises:
        FulldepthError: if pycocotools is not installed.

    Source: Lin et al. 2014, "Microsoft COCO", and its evaluation code, pycocotools.
    """
    values = precisions(matched(logits, boxes, targets))
    return dict(zip(AveragePrecision.statistics, values, strict=True))


def matched(logits: Sequence[Tensor], boxes: Sequence[Tensor], targets: Sequence[Target]) -> Any:
    """Match detections to objects and return pycocotools' `COCOeval` for `precisions`.

    The arguments are those of `average_precision`.
    """
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
    classes = sorted({annotation["category_id"] for annotation in truth})
    sides = []
    with redirect_stdout(StringIO()):
        for annotations in (truth, detected):
            side = tools.COCO()
            side.dataset = {
                "images": [{"id": image} for image in range(len(targets))],
                "categories": [{"id": index} for index in classes],
                "annotations": [{**entry, "id": number} for number, entry in enumerate(annotations, start=1)],
            }
            side.createIndex()
            sides.append(side)
        matches = evaluation.COCOeval(*sides, "bbox")
        matches.params.areaRng = [[0, 1e10]]
        matches.params.areaRngLbl = ["all"]
        matches.params.maxDets = [100]
        matches.evaluate()
    return matches


def precisions(matches: Any, left_out: Collection[int] = ()) -> list[float]:
    """Return `ap`, `ap50` and `ap75` of matched detections; NaN without objects.

    Args:
        matches: the result of `matched`.
        left_out: indices of images that do not count.
    """
    params = copy(matches.params)
    params.imgIds = [-1 if image in left_out else image for image in params.imgIds]
    with redirect_stdout(StringIO()):
        matches.accumulate(params)
    # [T, K] for T thresholds, mean over 101 points of recall; -1 for a class without objects
    by_class = matches.eval["precision"].mean((1, 3, 4))
    has_objects = by_class[0] > -1
    values = by_class[:, has_objects].mean(1) if has_objects.any() else np.full(len(by_class), np.nan)
    thresholds = params.iouThrs.round(2).tolist()
    return [float(values.mean()), *(float(values[thresholds.index(limit)]) for limit in (0.5, 0.75))]


def _annotation(image: int, category: Tensor, box: Tensor) -> dict[str, Any]:
    """Return an annotation in COCO's form, whose box is left, top, width, height."""
    x, y, width, height = box.double().tolist()
    corner = [x - width / 2, y - height / 2, width, height]
    return {"image_id": image, "category_id": int(category), "bbox": corner, "area": width * height}


def _pycocotools() -> tuple[Any, Any]:
    """Import pycocotools; raise a `FulldepthError` if it is not installed."""
    with needing("pycocotools", "vision", "Average precision"):
        from pycocotools import coco, cocoeval  # noqa: PLC0415  # an extra
    return coco, cocoeval


class AveragePrecision(Estimated):
    """Average precision of layers 1..L with its standard error (jackknife over groups of images).

    A layer is read by the model's final norm, class head and box head, or by its exit head in a multi-exit model.
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
            logits = detections.logits[:, row].detach().cpu()  # [L, Q, C+1]
            boxes = detections.boxes[:, row].detach().cpu()  # [L, Q, 4]
            self.images[sequence] = logits, boxes, {name: value.cpu() for name, value in target.items()}

    def compute(self) -> list[Estimate]:
        """The average precisions of each layer 1..L over all processes; none without objects."""
        images = {index: image for part in current().gather(self.images) for index, image in part.items()}
        ordered = sorted(images)
        logits, boxes, targets = zip(*(images[index] for index in ordered), strict=True) if images else ((), (), ())
        count = sum(int((~target["crowd"]).sum()) if "crowd" in target else len(target["boxes"]) for target in targets)
        if not count:
            return []
        groups = self.setup.groups
        group_of = self.setup.group_of[ordered].tolist()
        members = [{place for place, number in enumerate(group_of) if number == group} for group in range(groups)]
        layers = range(self.setup.num_layers)
        values = []
        without = []
        for layer in layers:
            matches = matched([image[layer] for image in logits], [image[layer] for image in boxes], targets)
            values.append(precisions(matches))
            if groups >= FEWEST_CLUSTERS:
                without.append([precisions(matches, left_out) for left_out in members])
        precision = torch.tensor(values, dtype=torch.float64)  # [L, 3]
        unknown = torch.full((1, *precision.shape), torch.nan)
        influences = influence_of_estimate(torch.tensor(without).transpose(0, 1)) if without else unknown
        numbers = EstimateArray.of(precision, torch.tensor(count), influences)
        return [
            numbers.at((layer, column), name, layer + 1)
            for layer in layers
            for column, name in enumerate(self.statistics)
        ]
