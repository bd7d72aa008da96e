"""Synthetic images for object detection: coloured circles, squares and triangles on noise, made from a seed.

`shapes:builtin/train` has 2,000 images of 64 x 64 pixels, `shapes:builtin/validation` 200. `shapes:96x500/train` has
500 images of 96 pixels a side. Image i of a split depends on the split, the size and i alone.
"""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from fulldepth.data.images import Pick, StoredImage
from fulldepth.data.objects import Box, Objects
from fulldepth.errors import FulldepthError, unknown

SHAPES = "shapes:"
CLASSES = ("circle", "square", "triangle")
SPLITS = ("train", "validation")
COUNTS = {"train": 2000, "validation": 200}
"""Split -> images of `shapes:builtin`."""
SIDE = 64
"""Pixels of an edge of `shapes:builtin`."""
SIDES = (16, 1024)
MOST_IMAGES = 10**6
MOST_OBJECTS = 4
"""Most objects of an image; there is at least one."""
LARGEST_OVERLAP = 0.2
"""Largest intersection of two boxes, as a share of the smaller one."""
COLOURS = ((220, 60, 50), (60, 180, 75), (70, 110, 230), (240, 200, 60), (200, 80, 200), (70, 210, 220))
SPECIFICATION = re.compile(r"(?:builtin|(\d{1,4})x(\d{1,7}))")


def shapes_rows(
    name: str, split: str | None, *, held_out: bool, pick: Pick | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """The full name and the rows (`image`, `objects`) of a set of shapes.

    Args:
        name: `shapes:builtin` or `shapes:SIDExIMAGES`, perhaps with `/train` or `/validation`.
        split: the split, if the name has none.
        held_out: whether `validation` is the default.
        pick: chooses images, whose identities are their numbers; None = all.

    Raises:
        FulldepthError: for an unknown name or split, or sizes that are not possible.
    """
    specification, _, part = name.removeprefix(SHAPES).partition("/")
    part = part or split or SPLITS[held_out]
    match = SPECIFICATION.fullmatch(specification)
    if match is None or part not in SPLITS:
        raise unknown("set of shapes", name, [*(f"{SHAPES}builtin/{each}" for each in SPLITS), f"{SHAPES}96x500/train"])
    side, count = int(match[1] or SIDE), int(match[2] or COUNTS[part])
    if not SIDES[0] <= side <= SIDES[1] or not 1 <= count <= MOST_IMAGES:
        raise FulldepthError(
            f"{name} asks for {count:,} images of {side} pixels; expected 1 to {MOST_IMAGES:,} images of {SIDES[0]} to "
            f"{SIDES[1]} pixels."
        )
    rows = [_row(part, side, index) for index in (pick(range(count)) if pick else range(count))]
    return f"{SHAPES}{specification}/{part}", rows


class Shape(NamedTuple):
    """One shape of an image."""

    kind: int
    """Index of `CLASSES`."""
    x: int
    y: int
    size: int
    colour: tuple[int, int, int]
    box: Box


def draw(split: str, side: int, index: int) -> tuple[Image.Image, Objects]:
    """An image and its objects.

    Args:
        split: `train` or `validation`.
        side: pixels of an edge.
        index: number of the image.

    Returns:
        The RGB image, and 1 to 4 objects. A box encloses the pixels of its shape, of which a later shape may cover a
        few.
    """
    shapes = _shapes(split, side, index)
    random = np.random.default_rng([SPLITS.index(split), side, index, 1])
    pixels = random.normal(random.uniform(60, 190, 3), 25, (side, side, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    for shape in shapes:
        image.paste(shape.colour, mask=_mask(shape.kind, side, shape.x, shape.y, shape.size))
    return image, _objects(side, shapes)


def _shapes(split: str, side: int, index: int) -> list[Shape]:
    """The shapes of an image, without drawing it."""
    random = np.random.default_rng([SPLITS.index(split), side, index])
    shapes: list[Shape] = []
    for _ in range(int(random.integers(1, MOST_OBJECTS + 1))):
        for _ in range(20):  # attempts to find a free place
            kind, size = int(random.integers(len(CLASSES))), int(random.uniform(0.2, 0.45) * side)
            x, y = (int(value) for value in random.integers(0, side - size, 2))
            left, top, right, bottom = _mask(kind, side, x, y, size).getbbox() or (0, 0, 0, 0)
            box = (float(left), float(top), float(right - left), float(bottom - top))
            if all(_overlap(box, other.box) <= LARGEST_OVERLAP for other in shapes):
                shapes.append(Shape(kind, x, y, size, COLOURS[int(random.integers(len(COLOURS)))], box))
                break
    return shapes


def _objects(side: int, shapes: list[Shape]) -> Objects:
    boxes, classes = tuple(shape.box for shape in shapes), tuple(shape.kind for shape in shapes)
    return Objects(side, side, classes, boxes, (False,) * len(shapes))


def write_shapes(folder: str | Path, name: str = "shapes:builtin/train") -> Path:
    """Write a set of shapes as `instances.json` in COCO's format with its PNG files beside it, in `images`.

    Args:
        folder: made if absent.
        name: as for `shapes_rows`.

    Returns:
        Path of the json file.

    Raises:
        FulldepthError: for an unknown name.
    """
    _, rows = shapes_rows(name, None, held_out=False)
    folder = Path(folder)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=1):
        file, objects = f"{number:06d}.png", row["objects"]
        row["image"]().save(folder / "images" / file)
        images.append({"id": number, "file_name": file, "width": objects.width, "height": objects.height})
        for category, box in zip(objects.classes, objects.boxes, strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": category + 1,
                    "bbox": list(box),
                    "area": box[2] * box[3],
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": shape} for number, shape in enumerate(CLASSES, start=1)]
    path = folder / "instances.json"
    content = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _row(split: str, side: int, index: int) -> dict[str, Any]:
    return {
        "image": StoredImage(partial(_picture, split, side, index), partial(_content, split, side, index)),
        "objects": _objects(side, _shapes(split, side, index)),
    }


def _picture(split: str, side: int, index: int) -> Image.Image:
    return draw(split, side, index)[0]


def _content(split: str, side: int, index: int) -> bytes:
    buffer = io.BytesIO()
    _picture(split, side, index).save(buffer, "PNG")
    return buffer.getvalue()


def _mask(kind: int, side: int, x: int, y: int, size: int) -> Image.Image:
    """The pixels of a shape whose square has its upper left corner at (x, y)."""
    mask = Image.new("1", (side, side))
    pen, far = ImageDraw.Draw(mask), (x + size, y + size)
    if CLASSES[kind] == "circle":
        pen.ellipse((x, y, *far), fill=1)
    elif CLASSES[kind] == "square":
        pen.rectangle((x, y, *far), fill=1)
    else:
        pen.polygon(((x, far[1]), far, (x + size // 2, y)), fill=1)
    return mask


def _overlap(one: Box, other: Box) -> float:
    """Intersection of two boxes as a share of the smaller one."""
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0) / min(one[2] * one[3], other[2] * other[3])
