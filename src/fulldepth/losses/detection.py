"""`Detection`: the task of a DETR, whose labels are lists of classes and boxes, with a set loss for every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulldepth.distributed import add_up, current
from fulldepth.errors import FulldepthError
from fulldepth.hf import Classifier, DetectionHeads, unwrapped
from fulldepth.losses.states import statistics_dtype
from fulldepth.losses.task import Task
from fulldepth.metrics import SetLoss


def _last_layer_loss(
    logits: Tensor, labels: Sequence[Mapping[str, Tensor]], device: Any, boxes: Tensor, config: Any, *_: Any
) -> tuple[Tensor, dict[str, Tensor], None]:
    """The arguments and results of `ForObjectDetectionLoss`."""
    loss = _shared_loss(SetLoss.of(config), logits, boxes, labels)
    return loss, {"loss": loss.detach()}, None


@dataclass(frozen=True)
class Detection(Task):
    """Detection of objects by a set of queries.

    `labels` of a batch is a list with the `class_labels` [n] and `boxes` [n, 4] of each image, and perhaps `crowd` [n],
    as in `fulldepth.metrics.Detections`. The loss is a function of the whole batch of all processes: its terms over
    boxes are divided by the number of boxes (at least 1), its cross-entropy by the queries' weights. Accumulated
    micro-batches count alike.
    """

    handles = "detection"
    stock_losses = (_last_layer_loss,)

    def labels(self, batch: Mapping[str, Any]) -> None:
        """None: queries have no labels of their own, the matching gives them one anew for each layer."""
        return

    def targets(self, batch: Mapping[str, Any]) -> None:
        """None: the loss is no mean over positions."""
        return

    def layer_losses(
        self, batch: Mapping[str, Any], states: Sequence[Tensor], classifier: Classifier
    ) -> list[Tensor] | None:
        """Set loss of layers 1..L, each read by the model's final norm, class head and box head, or by heads of
        its own.

        Args:
            batch: with `labels`.
            states: `h_1, ..., h_L`, each `[B, Q, D]`.
            classifier: the class head, between the model's forward and backward pass.

        Raises:
            FulldepthError: if the batch has no labels.
        """
        targets = batch.get("labels")
        if targets is None:
            raise FulldepthError("The set loss of a layer needs `labels` in the batch.")
        model: Any = classifier.anatomy.model
        heads, options = DetectionHeads(classifier).after_forward(), SetLoss.of(model.config)
        read = [heads.read(state, layer) for layer, state in enumerate(states, start=1)]
        return [_shared_loss(options, logits, boxes, targets) for logits, boxes in read]


def use_set_loss(model: Any) -> None:
    """Give a detector this package's set loss of its last layer as its `loss_function`.

    It equals transformers' (`ForObjectDetectionLoss` without auxiliary losses) and also takes batches in which no image
    has an object, crowds, and predictions that are not finite, for which the loss is NaN.
    """
    unwrapped(model).loss_function = _last_layer_loss


def _shared_loss(options: SetLoss, logits: Tensor, boxes: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The set loss, divided by means over processes while gradients are computed: data parallelism, which averages the
    gradients, then gives those of one large batch.
    """
    dtype = statistics_dtype(logits)
    sums = options.sums(logits.to(dtype), boxes.to(dtype), targets)
    divisors = sums[[1, 4]].detach()  # weight of the queries, boxes
    if torch.is_grad_enabled() and current().world > 1:
        divisors = divisors.clone()
        add_up(divisors)
        divisors = divisors / current().world
    return options.parts(sums, divisors)["mean"]
