"""A multi-exit DETR written again from its definition, in float64: answers, set loss, average precision by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from safetensors.torch import load_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from metrics.test_average_precision import as_lists, plain

HEADS_FILE = "exit_heads.safetensors"


def states_of(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """`[B, Q, D]` outputs of decoder layers 1..L, before any norm after them."""
    states: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: states.append(out)) for layer in model.model.decoder.layers]
    try:
        model.model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def layer_norm(state: Tensor, norm: Any) -> Tensor:
    centred = state - state.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def read_layer(model: Any, heads: Mapping[str, Tensor], layer: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and boxes of layer l: the final norm, then for l < L heads that differ in their last matrix.

    In a model with `auxiliary_loss` the norm also stands between the layers, so that the last state is normed twice.
    """
    last = layer == len(model.model.decoder.layers)
    normed = layer_norm(state, model.model.decoder.layernorm)
    if last and model.config.auxiliary_loss:
        normed = layer_norm(normed, model.model.decoder.layernorm)
    *shared, end = model.bbox_predictor.layers
    inner = normed
    for part in shared:
        inner = (inner @ part.weight.T + part.bias).clamp(min=0)
    if last:
        own = model.class_labels_classifier
        logits, raw = normed @ own.weight.T + own.bias, inner @ end.weight.T + end.bias
    else:
        logits = normed @ heads[f"exit_heads.{layer}.weight"].T
        raw = inner @ heads[f"exit_box_heads.{layer}.weight"].T
    return logits, 1 / (1 + torch.exp(-raw))


@torch.no_grad()
def answers(folder: Path, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`[L, B, Q, C+1]` logits and `[L, B, Q, 4]` boxes of a checkpoint, by its files and the body of transformers."""
    model = tf.DetrForObjectDetection.from_pretrained(folder, dtype=torch.float64).eval()
    heads = {name: weight.double() for name, weight in load_file(Path(folder) / HEADS_FILE).items()}
    read = [
        read_layer(model, heads, layer, state) for layer, state in enumerate(states_of(model, doubled(inputs)), start=1)
    ]
    return torch.stack([logits for logits, _ in read]), torch.stack([boxes for _, boxes in read])


def doubled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a model, in float64 and without labels."""
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in inputs.items()
        if name != "labels"
    }


def overlaps(boxes: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """`[Q, N]` intersection over union, and the generalised one, of boxes (centre x, centre y, width, height)."""
    one, other = boxes[:, None], true[None]
    low = [torch.maximum(one[..., i] - one[..., i + 2] / 2, other[..., i] - other[..., i + 2] / 2) for i in (0, 1)]
    high = [torch.minimum(one[..., i] + one[..., i + 2] / 2, other[..., i] + other[..., i + 2] / 2) for i in (0, 1)]
    far = [torch.maximum(one[..., i] + one[..., i + 2] / 2, other[..., i] + other[..., i + 2] / 2) for i in (0, 1)]
    near = [torch.minimum(one[..., i] - one[..., i + 2] / 2, other[..., i] - other[..., i + 2] / 2) for i in (0, 1)]
    shared = (high[0] - low[0]).clamp(min=0) * (high[1] - low[1]).clamp(min=0)
    union = one[..., 2] * one[..., 3] + other[..., 2] * other[..., 3] - shared
    hull = (far[0] - near[0]) * (far[1] - near[1])
    return shared / union, shared / union - (hull - union) / hull


def set_loss(logits: Tensor, boxes: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """DETR's loss of one layer `[B, Q, C+1]` and its parts, with a matching of its own, all boxes counted together."""
    none = logits.shape[-1] - 1
    entropy = weight = distance = apart = torch.zeros((), dtype=torch.float64)
    for image, target in enumerate(targets):
        labels, true = target["class_labels"], target["boxes"].double()
        classes = torch.full((logits.shape[1],), none)
        if len(labels):
            gap, giou = (boxes[image][:, None] - true[None]).abs().sum(-1), overlaps(boxes[image], true)[1]
            cost = -logits[image].softmax(-1)[:, labels] + 5 * gap - 2 * giou
            query, number = (torch.as_tensor(each) for each in linear_sum_assignment(cost.detach().numpy()))
            classes[query] = labels[number]
            distance, apart = distance + gap[query, number].sum(), apart + (1 - giou[query, number]).sum()
        weights = 1 - 0.9 * (classes == none).double()
        entropy = entropy - (weights * logits[image].log_softmax(-1)[torch.arange(len(classes)), classes]).sum()
        weight = weight + weights.sum()
    count = max(sum(len(target["class_labels"]) for target in targets), 1)
    parts = {"class": entropy / weight, "l1": distance / count, "giou": apart / count}
    return {**parts, "mean": parts["class"] + 5 * parts["l1"] + 2 * parts["giou"]}


def multi_exit_loss(
    model: Any, heads: Mapping[str, Tensor], batch: Mapping[str, Any], shares: Sequence[float]
) -> Tensor:
    """The weighted sum of the set losses of all layers, of a model in float64."""
    total = torch.zeros((), dtype=torch.float64)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    for layer, (share, state) in enumerate(zip(shares, states_of(model, inputs), strict=True), start=1):
        total = total + share * set_loss(*read_layer(model, heads, layer, state), batch["labels"])["mean"]
    return total


def precision(logits: Any, boxes: Any, targets: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """`ap`, `ap50` and `ap75` of images, each with logits `[Q, C+1]`, by the text of COCO's protocol."""
    scenes = []
    for own, found, target in zip(logits, boxes, targets, strict=True):
        crowd = torch.zeros(len(target["class_labels"]), dtype=torch.bool)
        objects = {"class_labels": target["class_labels"], "boxes": target["boxes"].double(), "crowd": crowd}
        scenes.append(as_lists(own, found, objects))
    return {name: float(value) for name, value in plain(scenes).items()}


def agreement(logits: Tensor, boxes: Tensor, layer: int) -> dict[str, float]:
    """How a layer agrees with the last: class of all queries, of those with an object there, and overlap of these."""
    now, last = logits[layer - 1].argmax(-1), logits[-1].argmax(-1)
    objects = last != logits.shape[-1] - 1
    pairs = zip(boxes[layer - 1][objects], boxes[-1][objects], strict=True)
    return {
        "class": float((now == last).double().mean()),
        "object_class": float((now == last)[objects].double().mean()),
        "box_iou": float(np.mean([float(overlaps(one[None], other[None])[0]) for one, other in pairs])),
    }
