"""Set loss of a detector at every layer, with Hungarian matching (DETR; aligned training, App. B.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_for_object_detection import HungarianMatcher

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.detections import Target, areas, corners, intersections

PARTS = ("class", "class_weight", "l1", "giou", "boxes")
"""Sums over images: weighted cross-entropy and its weights, distances and 1 - GIoU of matched boxes, their number."""


@dataclass(frozen=True)
class SetLoss:
    """Costs of the matching and coefficients of the loss; the defaults are DETR's."""

    class_cost: float = 1.0
    bbox_cost: float = 5.0
    giou_cost: float = 2.0
    l1: float = 5.0
    giou: float = 2.0
    no_object: float = 0.1
    """Weight of "no object" in the cross-entropy."""

    @classmethod
    def of(cls, config: Any) -> SetLoss:
        """As a DETR's configuration states them."""
        return cls(
            config.class_cost,
            config.bbox_cost,
            config.giou_cost,
            config.bbox_loss_coefficient,
            config.giou_loss_coefficient,
            config.eos_coefficient,
        )

    def sums(self, logits: Tensor, boxes: Tensor, targets: Sequence[Target]) -> Tensor:
        """[5] sums of one layer over a batch, see `PARTS`; all NaN if a prediction is not finite.

        Each object is matched to one query so that the sum of the costs is smallest; the other queries are to predict
        "no object". Objects that are crowds are no targets.

        Args:
            logits: `[B, Q, C+1]`, the last class "no object".
            boxes: `[B, Q, 4]`, as in `Detections`.
            targets: of each image.
        """
        targets = [_without_crowds(target, boxes) for target in targets]
        if not bool(torch.isfinite(boxes.detach().sum() + logits.detach().sum())):
            return (logits.sum() + boxes.sum()) * torch.full((len(PARTS),), torch.nan, device=logits.device)
        none = logits.shape[-1] - 1
        classes = torch.full(logits.shape[:2], none, dtype=torch.int64, device=logits.device)
        count = sum(len(target["class_labels"]) for target in targets)
        l1 = giou = boxes.sum() * 0.0
        if count:
            matcher = HungarianMatcher(self.class_cost, self.bbox_cost, self.giou_cost)
            pairs = matcher({"logits": logits, "pred_boxes": boxes}, targets)
            image = torch.cat([torch.full_like(query, row) for row, (query, _) in enumerate(pairs)]).to(logits.device)
            query = torch.cat([query for query, _ in pairs]).to(logits.device)
            chosen = [(target, index.to(logits.device)) for target, (_, index) in zip(targets, pairs, strict=True)]
            classes[image, query] = torch.cat([target["class_labels"][index] for target, index in chosen])
            true = torch.cat([target["boxes"][index] for target, index in chosen])
            found = boxes[image, query]
            l1 = (found - true).abs().sum()
            giou = (1 - generalised_iou(corners(found), corners(true))).sum()
        weights = torch.ones(none + 1, dtype=logits.dtype, device=logits.device)
        weights[-1] = self.no_object
        entropy = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), weights, reduction="sum")
        return torch.stack([entropy, weights[classes].sum(), l1, giou, l1.new_tensor(float(count))])

    def parts(self, sums: Tensor, divisors: Tensor | None = None) -> dict[str, Tensor]:
        """`class` (nats), `l1`, `giou` and their weighted sum `mean` from sums `[5]`.

        Args:
            sums: of one layer, over any number of images.
            divisors: `[2]` weight of the queries and number of boxes by which sums are divided; None = their own. The
                number of boxes counts as at least 1.
        """
        weight, number = (sums[1], sums[4]) if divisors is None else divisors
        number = number.clamp(min=1)
        named = {"class": sums[0] / weight, "l1": sums[2] / number, "giou": sums[3] / number}
        return {"mean": named["class"] + self.l1 * named["l1"] + self.giou * named["giou"], **named}


def detection_loss(logits: Tensor, boxes: Tensor, targets: Sequence[Target], options: SetLoss | None = None) -> Tensor:
    r"""DETR's set loss of one layer, at least 0.

    .. math:: L = \frac{\sum_q w_q \, \mathrm{CE}_q}{\sum_q w_q} + \frac{1}{N} \sum_{n=1}^{N} \left(5 \, \lVert b_n -
        \hat b_n \rVert_1 + 2 \, (1 - \mathrm{GIoU}(b_n, \hat b_n))\right)

    Args:
        logits: `[B, Q, C+1]`, the last class "no object".
        boxes: `[B, Q, 4]`, as in `Detections`.
        targets: of each image.
        options: costs and coefficients; None = DETR's.

    Returns:
        Scalar with gradients, unit 1; without any object the cross-entropy alone.

    Source: Carion et al. 2020, "End-to-end object detection with Transformers", Eq. 1, 2 and App. A.2, as in
    transformers.
    """
    options = options or SetLoss()
    return options.parts(options.sums(logits, boxes, targets))["mean"]


def generalised_iou(one: Tensor, other: Tensor) -> Tensor:
    """[N] generalised intersection over union of pairs of boxes `[N, 4]` given by their corners, in [-1, 1].

    Source: Rezatofighi et al. 2019.
    """
    shared = intersections(one, other)
    union = areas(one) + areas(other) - shared
    low, high = torch.minimum(one[:, :2], other[:, :2]), torch.maximum(one[:, 2:], other[:, 2:])
    hull = (high - low).clamp(min=0).prod(-1)
    return shared / union - (hull - union) / hull


def _without_crowds(target: Target, found: Tensor) -> dict[str, Tensor]:
    """The objects that count, where the predicted boxes are and in their precision."""
    keep = ~target["crowd"] if "crowd" in target else slice(None)
    return {"class_labels": target["class_labels"][keep].to(found.device), "boxes": target["boxes"][keep].to(found)}


class DetectionLoss(Measure):
    """Set loss and its parts for layers 1..L, over all images at once, so that it does not depend on batches."""

    name = "detection_loss"
    units: ClassVar = {"mean": "1", "class": "nats", "l1": "1", "giou": "1"}
    needs = frozenset({"boxes", "objects"})
    sums: Tensor
    """[L, 5], see `PARTS`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("sums", setup.num_layers, len(PARTS))
        self.options = setup.set_loss if isinstance(setup.set_loss, SetLoss) else SetLoss()

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        found = observation.detections
        if found is None or found.targets is None:
            raise ValueError("this observation has no boxes; detection_loss needs predicted and true ones")
        layers = [
            self.options.sums(logits.float(), boxes.float(), found.targets)
            for logits, boxes in zip(found.logits, found.boxes, strict=True)
        ]
        self.sums += torch.stack(layers).to(self.sums)

    def compute(self) -> tuple[list[dict[str, float]], int]:
        """The parts for layers 1..L over all processes, and the number of boxes."""
        parts = [{name: float(value) for name, value in self.options.parts(sums).items()} for sums in self.sums]
        return parts, int(self.sums[0, 4])

    def rows(self) -> list[Row]:
        """Four rows for each layer 1..L; none without objects."""
        layers, count = self.compute()
        return [
            self.row(statistic, value, count, layer)
            for layer, parts in enumerate(layers, start=1)
            for statistic, value in parts.items()
            if count
        ]
