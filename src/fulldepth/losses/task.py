"""`Task`: loss, labels and counts of a batch. Only this module counts targets; only `next_targets` shifts labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

from fulldepth.core.errors import FulldepthError
from fulldepth.core.targets import IGNORE, next_targets
from fulldepth.hf import Classifier, DetectionHeads, all_finite, task_of, text_config, unwrapped

INPUTS = ("input_ids", "inputs_embeds", "pixel_values")
"""Entries whose first dimension is the sequence (or the image), most reliable first."""


@dataclass(frozen=True)
class Task:
    """Interpretation of a batch for a model that predicts a class for each position, sequence or image.

    A task whose labels are not a tensor of classes (`Detection`) overrides `layer_losses`.
    """

    name: str
    """causal-lm, masked-lm, text-classification, image-classification, detection or representation."""
    auxiliary_weight: float | None = None
    """Factor of the auxiliary loss (balance of experts) in the model's loss; None if the model names none."""
    tower: str | None = None
    """The part whose states are read, in a model with several."""

    def keeps_loss(self, model: Any) -> bool:
        """Return True if the model's loss is that of its class or `detection_loss`, not one set by a user."""
        return vars(unwrapped(model)).get("_loss_function") in (None, detection_loss)

    @classmethod
    def of(cls, model: Any, tower: str | None = None) -> Task:
        """Return the task of a model, also inside adapters and other wrappers.

        For modules that are not from transformers it follows from the class name.

        Args:
            model: the model.
            tower: the part whose states are read.
        """
        with suppress(FulldepthError):
            model = unwrapped(model)
        name = task_of(model)
        holders = (model, text_config(getattr(model, "config", None)))
        keys = ("router_aux_loss_coef", "aux_loss_coef")
        factors = (getattr(holder, key, None) for holder in holders for key in keys)
        factor = next((float(value) for value in factors if isinstance(value, int | float)), None)
        return (Detection if name == "detection" else cls)(name, factor, tower)

    @property
    def shifts(self) -> bool:
        """True if the model predicts the next token, so that the label of position t is at t + 1."""
        return self.name == "causal-lm"

    @property
    def classifies(self) -> bool:
        """True if the model predicts one class of a sequence or an image."""
        return self.name.endswith("-classification")

    def loss(self, outputs: Any) -> Tensor:
        """Return the model's own loss: a mean over targets, plus the `auxiliary` loss if there is one.

        Args:
            outputs: output of the model, called with `labels`; or its loss.

        Raises:
            FulldepthError: if there is no scalar loss.
        """
        loss: Any = outputs
        if not isinstance(outputs, Tensor):
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise FulldepthError(
                "The model returned no loss; call it with `labels`, or pass the loss itself as a scalar."
            )
        return loss

    def auxiliary(self, outputs: Any) -> Tensor | None:
        """Return the part of the model's loss besides cross-entropy, such as experts' balancing losses; None if none.

        Args:
            outputs: output of the model, called with `labels`.

        Raises:
            FulldepthError: if the output has an auxiliary loss, and its factor in the model's loss is not known.
        """
        value = None if isinstance(outputs, Tensor) else getattr(outputs, "aux_loss", None)
        if not isinstance(value, Tensor):
            return None
        if self.auxiliary_weight is None:
            raise FulldepthError(
                "The model has an auxiliary loss, but its configuration does not state its factor "
                "(router_aux_loss_coef or aux_loss_coef)."
            )
        return self.auxiliary_weight * value

    def labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return labels aligned with the positions that predict them; None without labels.

        Positions without a target have `IGNORE`.

        Args:
            batch: `labels` are `[B, T]`, or `[B]` for whole sequences; `shift_labels` are already shifted.
        """
        shifted = batch.get("shift_labels")
        labels = batch.get("labels")
        if isinstance(shifted, Tensor):
            return shifted
        if not isinstance(labels, Tensor):
            return None
        return next_targets(labels) if self.shifts else labels

    def targets(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the number of targets over which the loss is averaged; None without labels."""
        labels = self.labels(batch)
        return None if labels is None else (labels != IGNORE).sum()

    def layer_losses(
        self, batch: Mapping[str, Any], states: Sequence[Tensor], classifier: Classifier
    ) -> list[Tensor] | None:
        """Return losses of layers 1..L read by the shared head; None if they are cross-entropies of `labels`.

        Args:
            batch: inputs and labels of the model.
            states: `h_1, ..., h_L`, each `[B, T, D]`.
            classifier: the model's head.
        """
        return None

    def sequences(self, batch: Mapping[str, Any]) -> int | None:
        """Return the number of sequences or images; None if the batch has none of `INPUTS`."""
        entries = (batch.get(name) for name in INPUTS)
        return next((value.shape[0] for value in entries if isinstance(value, Tensor)), None)

    def mask(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the mask `[B, T]` bool, True = counts; None if every token counts, or for masks like `[B, 1, T, T]`.

        For a decoder beside an encoder this is `decoder_attention_mask`; without one, the positions with a label count,
        because transformers makes its inputs from the labels. Images have no mask.
        """
        name = {"decoder": "decoder_attention_mask", "vision": ""}.get(self.tower or "", "attention_mask")
        mask = batch.get(name)
        if mask is None and self.tower == "decoder" and isinstance(batch.get("labels"), Tensor):
            mask = batch["labels"] != IGNORE
        return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def counted(self, batch: Mapping[str, Any], state: Tensor) -> Tensor:
        """`[B, T]` bool on the device of `state: [B, T, D]`, True = counts."""
        mask = self.mask(batch)
        return torch.ones_like(state[..., 0], dtype=torch.bool) if mask is None else mask.to(state.device)

    def tokens(self, batch: Mapping[str, Any]) -> Tensor | int | None:
        """Return the number of tokens that penalties count, from the mask or else from the ids or embeddings.

        Returns:
            None for images: the number of positions is known only inside the model, and the same for every image.
        """
        mask = self.mask(batch)
        if mask is not None:
            return mask.sum()
        names = {"decoder": ("decoder_input_ids", "decoder_inputs_embeds"), "vision": ()}.get(
            self.tower or "", INPUTS[:2]
        )
        entries = (batch.get(name) for name in names)
        return next((value.shape[0] * value.shape[1] for value in entries if isinstance(value, Tensor)), None)


@dataclass(frozen=True)
class Detection(Task):
    """Detection of objects by a set of queries.

    `labels` of a batch is a list with the `class_labels` [n] and `boxes` [n, 4] of each image, and perhaps `crowd` [n],
    as in `fulldepth.metrics.Detections`. They are not labels of positions: for each layer, a matching assigns one to
    each query. The loss is not a mean over targets, so accumulated micro-batches have equal weights.
    """

    def layer_losses(
        self, batch: Mapping[str, Any], states: Sequence[Tensor], classifier: Classifier
    ) -> list[Tensor] | None:
        """Return losses of layers 1..L, each read by the model's final norm, class head and box head.

        Args:
            batch: inputs and `labels`.
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
        read = (heads.read(state, layer) for layer, state in enumerate(states, start=1))
        return [detection_loss(logits, targets, logits.device, boxes, model.config)[0] for logits, boxes in read]


def detection_loss(
    logits: Tensor, labels: Sequence[Mapping[str, Tensor]], device: Any, pred_boxes: Tensor, config: Any, *_: Any
) -> tuple[Tensor, dict[str, Tensor], None]:
    """Compute transformers' `ForObjectDetectionLoss` of one layer, in float32 and without objects that are crowds.

    The loss is NaN if a prediction is not finite.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(dtype)
    boxes = pred_boxes.to(dtype)
    if not (all_finite(logits.detach()) and all_finite(boxes.detach())):
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
    return ForObjectDetectionLoss(logits, targets, device, boxes, one_layer)


def use_detection_loss(model: Any) -> None:
    """Give a detector `detection_loss` as its `loss_function`.

    Args:
        model: a detector, possibly inside a wrapper; it is changed in place.
    """
    unwrapped(model).loss_function = detection_loss


def use_class_loss(model: Any) -> None:
    """Give a classifier of one class out of several the cross-entropy of its logits in float32.

    The loss of its class in transformers has the precision of the logits. A loss in float32 or float64 stays as it is.
    """

    def in_float32(module: Any, args: Any, inputs: dict[str, Any], output: Any) -> Any:
        if output.loss is not None and output.loss.dtype.itemsize < torch.float32.itemsize:
            output["loss"] = cross_entropy(output.logits.float(), inputs["labels"].to(output.logits.device))
        return output

    unwrapped(model).register_forward_hook(in_float32, with_kwargs=True)
