"""`Detection`: the task of a DETR, whose labels are lists of classes and boxes; transformers' loss of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

from fulldepth.errors import FulldepthError
from fulldepth.hf import Classifier, DetectionHeads, unwrapped
from fulldepth.losses.task import Task
from fulldepth.losses.term import statistics_dtype


def detection_loss(
    logits: Tensor, labels: Sequence[Mapping[str, Tensor]], device: Any, pred_boxes: Tensor, config: Any, *_: Any
) -> tuple[Tensor, dict[str, Tensor], None]:
    """Transformers' `ForObjectDetectionLoss` of one layer, in float32, without the objects that are crowds; NaN if a
    prediction is not finite.
    """
    dtype = statistics_dtype(logits)
    logits, boxes = logits.to(dtype), pred_boxes.to(dtype)
    if not bool(torch.isfinite(logits.detach().sum() + boxes.detach().sum())):
        loss = (logits.sum() + boxes.sum()) * torch.nan
        return loss, {"loss": loss.detach()}, None
    targets = []
    for target in labels:
        keep = ~target["crowd"] if "crowd" in target else slice(None)
        targets.append(
            {"class_labels": target["class_labels"][keep].to(device), "boxes": target["boxes"][keep].to(boxes)}
        )
    one_layer = copy(config)
    one_layer.auxiliary_loss = False
    loss, parts, _none = ForObjectDetectionLoss(logits, targets, device, boxes, one_layer)
    return loss, parts, None


@dataclass(frozen=True)
class Detection(Task):
    """Detection of objects by a set of queries.

    `labels` of a batch is a list with the `class_labels` [n] and `boxes` [n, 4] of each image, and perhaps `crowd` [n],
    as in `fulldepth.metrics.Detections`. Accumulated micro-batches count alike.
    """

    handles = "detection"
    stock_losses = (detection_loss,)

    def labels(self, batch: Mapping[str, Any]) -> None:
        """None: queries have no labels of their own, the matching gives them one anew for each layer."""
        return

    def targets(self, batch: Mapping[str, Any]) -> None:
        """None: the loss is no mean over positions."""
        return

    def layer_losses(
        self, batch: Mapping[str, Any], states: Sequence[Tensor], classifier: Classifier
    ) -> list[Tensor] | None:
        """Losses of layers 1..L, each read by the model's final norm, class head and box head, or by heads of its own.

        Args:
            batch: with `labels`.
            states: `h_1, ..., h_L`, each `[B, Q, D]`.
            classifier: the class head, between the model's forward and backward pass.

        Raises:
            FulldepthError: if the batch has no labels.
        """
        targets = batch.get("labels")
        if targets is None:
            raise FulldepthError("The loss of a detector's layer needs `labels` in the batch.")
        model: Any = classifier.anatomy.model
        heads = DetectionHeads(classifier).after_forward()
        losses = []
        for layer, state in enumerate(states, start=1):
            logits, boxes = heads.read(state, layer)
            losses.append(detection_loss(logits, targets, logits.device, boxes, model.config)[0])
        return losses


def use_detection_loss(model: Any) -> None:
    """Give a detector `detection_loss` as its `loss_function`."""
    unwrapped(model).loss_function = detection_loss
