"""Images for object detection in COCO's format: coloured circles, squares and triangles on noise.

    python examples/shapes.py shapes/
    fulldepth train tiny-detr --output runs/detr

writes `shapes/instances_train.json` (4,000 images of 64 pixels a side, in `shapes/train/`) and
`shapes/instances_validation.json` (200 images), which the recipe `tiny-detr` names.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle")
SPLITS = ("train", "validation")
COLOURS = ((220, 60, 50), (60, 180, 75), (70, 110, 230), (240, 200, 60), (200, 80, 200), (70, 210, 220))
MOST_OBJECTS = 4
LARGEST_OVERLAP = 0.2
"""Largest intersection of two boxes, as a share of the smaller one."""


def silhouette(kind: int, side: int, x: int, y: int, size: int) -> Image.Image:
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


def overlap(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Intersection of two boxes as a share of the smaller one."""
    width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    return max(width, 0) * max(height, 0) / min(one[2] * one[3], other[2] * other[3])


def draw(split: str, side: int, index: int) -> tuple[Image.Image, list[int], list[tuple[int, ...]]]:
    """Image `index` of a split, the classes of its 1 to 4 shapes, and their boxes (x, y, width, height)."""
    random = np.random.default_rng([SPLITS.index(split), side, index])
    classes: list[int] = []
    boxes: list[tuple[int, ...]] = []
    painted: list[tuple[Image.Image, tuple[int, int, int]]] = []
    for _ in range(int(random.integers(1, MOST_OBJECTS + 1))):
        for _ in range(20):  # attempts to find a free place
            kind, size = int(random.integers(len(CLASSES))), int(random.uniform(0.2, 0.45) * side)
            x, y = (int(value) for value in random.integers(0, side - size, 2))
            mask = silhouette(kind, side, x, y, size)
            left, top, right, bottom = mask.getbbox() or (0, 0, 0, 0)
            box = (left, top, right - left, bottom - top)
            if all(overlap(box, other) <= LARGEST_OVERLAP for other in boxes):
                classes.append(kind)
                boxes.append(box)
                painted.append((mask, COLOURS[int(random.integers(len(COLOURS)))]))
                break
    random = np.random.default_rng([SPLITS.index(split), side, index, 1])
    pixels = random.normal(random.uniform(60, 190, 3), 25, (side, side, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    for mask, colour in painted:
        image.paste(colour, mask=mask)
    return image, classes, boxes


def write(folder: str | Path, split: str, side: int, count: int) -> Path:
    """Write `count` images of a split as PNG files below the folder; returns their `instances_SPLIT.json`."""
    folder = Path(folder)
    (folder / split).mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        image, classes, boxes = draw(split, side, number - 1)
        name = f"{number:06d}.png"
        image.save(folder / split / name)
        images.append({"id": number, "file_name": name, "width": side, "height": side})
        for kind, box in zip(classes, boxes, strict=True):
            annotation = {"id": len(annotations) + 1, "image_id": number, "category_id": kind + 1}
            annotations.append({**annotation, "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, start=1)]
    path = folder / f"instances_{split}.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


def main(folder: str | Path = "shapes") -> None:
    """Write the two sets of the recipe `tiny-detr`."""
    write(folder, "train", 64, 4000)
    write(folder, "validation", 64, 200)


if __name__ == "__main__":
    main(*sys.argv[1:])
