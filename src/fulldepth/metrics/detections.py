"""`Detections`: classes and boxes that a detector predicts at every layer, and the overlap of boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Target = Mapping[str, Tensor]
"""Objects of one image: `class_labels` [n], `boxes` [n, 4] and perhaps `crowd` [n] bool."""


@dataclass(frozen=True)
class Detections:
    """Predictions of layers 1..L for a batch of images with Q queries each."""

    logits: Tensor
    """[L, B, Q, C+1]: classes, the last one "no object"."""
    boxes: Tensor
    """[L, B, Q, 4]: centre x, centre y, width and height as shares of the image, in [0, 1]."""
    targets: Sequence[Target] | None = None
    """True objects of each image; None for data without boxes."""


def corners(boxes: Tensor) -> Tensor:
    """[..., 4] boxes as (left, top, right, bottom) from (centre x, centre y, width, height)."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def areas(boxes: Tensor) -> Tensor:
    """[...] areas of `boxes: [..., 4]` given by their corners."""
    return (boxes[..., 2] - boxes[..., 0]).clamp(min=0) * (boxes[..., 3] - boxes[..., 1]).clamp(min=0)


def intersections(one: Tensor, other: Tensor) -> Tensor:
    """[...] areas that boxes `[..., 4]`, given by their corners, have in common; shapes are broadcast."""
    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    return (high - low).clamp(min=0).prod(-1)


def iou(one: Tensor, other: Tensor) -> Tensor:
    """[...] intersection over union of boxes `[..., 4]` given by their corners, in [0, 1]; shapes are broadcast.

    0 for two boxes without area. Shares of the image and pixels give the same number.
    """
    shared = intersections(one, other)
    union = areas(one) + areas(other) - shared
    return torch.where(union > 0, shared / union.clamp(min=torch.finfo(union.dtype).tiny), 0.0)
