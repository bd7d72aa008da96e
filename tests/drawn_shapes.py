"""Images with boxes for tests of detection, drawn by `examples/shapes.py`."""

from __future__ import annotations

import atexit
import runpy
import shutil
import tempfile
from functools import cache
from pathlib import Path

from fulldepth.data.coco import Objects
from places import ROOT

SCRIPT = runpy.run_path(str(ROOT / "examples" / "shapes.py"))
CLASSES = SCRIPT["CLASSES"]


def draw(split, side, index):
    """An image and its objects."""
    image, classes, boxes = SCRIPT["draw"](split, side, index)
    floats = tuple(tuple(map(float, box)) for box in boxes)
    return image, Objects(side, side, tuple(classes), floats, (False,) * len(boxes))


def write_shapes(folder, name):
    """Write a set such as `32x12/train` (12 images of 32 pixels a side), its images in `images/`; returns its json."""
    sizes, split = name.split("/")
    side, count = map(int, sizes.split("x"))
    path = SCRIPT["write"](folder, split, side, count)
    (folder / split).rename(folder / "images")
    return path.rename(folder / "instances.json")


@cache
def shapes(name):
    """The json file of a set of images that tests only read."""
    return str(write_shapes(_folder() / name, name))


@cache
def _folder():
    folder = tempfile.mkdtemp(prefix="fulldepth-shapes-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
