"""`Objects`: classes and boxes of the objects in one image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fulldepth.errors import FulldepthError, one_line

Box = tuple[float, float, float, float]
"""x and y of the upper left corner, width, height, in pixels."""
SLACK = 1.0
"""Pixels by which a box may leave its image: annotation tools round."""


@dataclass(frozen=True)
class Objects:
    """The objects of one image of `width` x `height` pixels."""

    width: int
    height: int
    classes: tuple[int, ...] = ()
    boxes: tuple[Box, ...] = ()
    crowd: tuple[bool, ...] = ()
    """Whether the box holds a group of objects (COCO's `iscrowd`): it is no target, detections in it do not count."""

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def relative(self) -> list[Box]:
        """The boxes as (centre x, centre y, width, height), each divided by the image's width or height."""
        scale = (self.width, self.height, self.width, self.height)
        return [
            (((x + w / 2) / scale[0]), ((y + h / 2) / scale[1]), w / scale[2], h / scale[3])
            for x, y, w, h in self.boxes
        ]

    @property
    def targets(self) -> int:
        """Number of objects to find: all but crowds."""
        return sum(not crowd for crowd in self.crowd)

    def numbered(self, numbers: Sequence[int | None]) -> Objects:
        """The objects with other class indices, `numbers[i]` in place of i; those whose number is None are left out."""
        kept = [place for place, index in enumerate(self.classes) if numbers[index] is not None]
        classes = tuple(number for index in self.classes if (number := numbers[index]) is not None)
        boxes, crowd = tuple(self.boxes[place] for place in kept), tuple(self.crowd[place] for place in kept)
        return replace(self, classes=classes, boxes=boxes, crowd=crowd)

    def mirrored(self) -> Objects:
        """The objects of the image whose left and right are exchanged."""
        return replace(self, boxes=tuple((self.width - x - w, y, w, h) for x, y, w, h in self.boxes))


def checked_box(value: object, width: int, height: int, where: str) -> Box:
    """A box `[x, y, width, height]` of an image, cut off at its edges.

    Args:
        value: the box as read.
        width: of the image, in pixels.
        height: of the image, in pixels.
        where: location, for messages.

    Raises:
        FulldepthError: if it is no list of four finite numbers, has no area, or leaves the image by more than a pixel.
    """
    numbers = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 4
    if not numbers or not all(_is_number(number) for number in value):  # type: ignore[attr-defined]
        raise FulldepthError(f"{where}: the box is {one_line(repr(value), 80)}, expected [x, y, width, height].")
    x, y, w, h = (float(number) for number in value)  # type: ignore[attr-defined]
    if w <= 0 or h <= 0:
        raise FulldepthError(f"{where}: the box {[x, y, w, h]} has no area.")
    if min(x, y) < -SLACK or x + w > width + SLACK or y + h > height + SLACK:
        raise FulldepthError(f"{where}: the box {[x, y, w, h]} is not inside its image of {width} x {height} pixels.")
    left, top, right, bottom = max(x, 0.0), max(y, 0.0), min(x + w, width), min(y + h, height)
    if right <= left or bottom <= top:
        raise FulldepthError(f"{where}: the box {[x, y, w, h]} is not inside its image of {width} x {height} pixels.")
    return left, top, right - left, bottom - top


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
