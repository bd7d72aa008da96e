"""Detection data in COCO's format: one json file of images, annotations and categories, and a folder of image files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeGuard

from PIL import Image

from fulldepth.data.images import Pick, StoredImage, stored_image
from fulldepth.data.objects import Box, Objects, checked_box
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import read_json
from fulldepth.uncertainty import identity

MOST_BYTES = 1 << 30
"""Largest json file; COCO's own training file has 0.45 GB."""
MOST_CATEGORIES = 10_000
LARGEST_EDGE = 10**6
REMEDY = "--skip-bad leaves such entries out and counts them."
SHOWN = 3
"""Defects that a warning quotes."""


class Coco(NamedTuple):
    """The images of a json file."""

    name: str
    rows: list[dict[str, Any]]
    """`image` (a loader) and `objects` of each image, in the order of the file."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the categories' ids."""
    warnings: list[str]


@dataclass
class Defects:
    """Defects of a file: the first one is an error, unless bad entries are skipped, which are then counted."""

    skip: bool
    counts: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    def note(self, kind: str, error: FulldepthError) -> None:
        """Count a defect of an entry; raise it unless bad entries are skipped."""
        if not self.skip:
            raise FulldepthError(f"{error} {REMEDY}") from error
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.first) < SHOWN:
            self.first.append(str(error))

    def warnings(self, name: str) -> list[str]:
        """A sentence on all skipped entries; empty without any."""
        if not self.counts:
            return []
        counts = " and ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in self.counts.items())
        return [one_line(f"{name}: skipped {counts} with defects. First: {' '.join(self.first)}", 900)]


def coco_rows(path: Path, *, skip_bad: bool = False, pick: Pick | None = None) -> Coco:
    """Read a json file in COCO's format; images are decoded on use.

    The image files are searched beside the json file, in its folder `images`, and as COCO's own layout has them
    (`annotations/instances_train2017.json` beside `train2017/`). Classes are numbered from 0 in the order of the
    categories' ids. Boxes are cut off at the edges of their image if they leave it by at most a pixel.

    Args:
        path: the json file.
        skip_bad: leave out entries with defects and count them, instead of refusing the file.
        pick: chooses images by the identities of their file names; None = all.

    Raises:
        FulldepthError: if the file is not of this format, or (without `skip_bad`) an entry has a defect: an id that
            occurs twice or nowhere, an image file that is missing or of another size, a box without area or outside
            its image.
    """
    content = read_json(path, most=MOST_BYTES, allow_constants=True)  # so that a NaN is the defect of one entry
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), list) for key in ("images", "annotations", "categories")
    ):
        raise FulldepthError(
            f"{path} is not in COCO's format for detection: expected an object with the lists images, annotations and "
            "categories."
        )
    defects = Defects(skip_bad)
    indices, classes = _categories(path.name, content["categories"])
    images = _images(path, content["images"], defects)
    if not images:
        first = f" without defects. The first: {defects.first[0]}" if defects.first else "."
        raise FulldepthError(f"{path} holds no images{first}")
    objects = _annotations(path.name, content["annotations"], images, indices, defects)
    chosen = list(images.items())
    if pick is not None:
        chosen = [chosen[i] for i in pick([identity(entry.load.name) for _, entry in chosen])]
    rows = [{"image": entry.load, "objects": _objects(entry, objects.get(key, []))} for key, entry in chosen]
    return Coco(path.name, rows, classes, defects.warnings(path.name))


class _Entry(NamedTuple):
    """An image of the file."""

    load: StoredImage
    width: int
    height: int


class _Annotation(NamedTuple):
    """A box with its class index."""

    category: int
    box: Box
    crowd: bool


def _objects(entry: _Entry, annotations: list[_Annotation]) -> Objects:
    return Objects(
        entry.width,
        entry.height,
        tuple(each.category for each in annotations),
        tuple(each.box for each in annotations),
        tuple(each.crowd for each in annotations),
    )


def _entries(name: str, key: str, values: list[Any], defects: Defects) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Location and content of the entries of a list that are objects; others are defects."""
    for position, value in enumerate(values):
        where = f"{name} {key}[{position}]"
        if not isinstance(value, dict):
            kind = key.removesuffix("s")
            defects.note(kind, FulldepthError(f"{where} is {one_line(repr(value), 60)}, expected an object."))
            continue
        yield where if "id" not in value else f"{where} (id {one_line(repr(value['id']), 40)})", value


def _categories(name: str, values: list[Any]) -> tuple[dict[int, int], tuple[str, ...]]:
    """Class index of each category's id, and the names by index."""
    names: dict[int, str] = {}
    for position, value in enumerate(values):
        where, entry = f"{name} categories[{position}]", value if isinstance(value, dict) else {}
        key, title = entry.get("id"), entry.get("name")
        title = one_line(title, 200) if isinstance(title, str) else ""
        if not _is_id(key) or not title:
            raise FulldepthError(
                f"{where} is {one_line(repr(value), 100)}, expected an object with an id (a whole number) and a name."
            )
        if key in names or title in names.values():
            raise FulldepthError(
                f"{where} (id {key}): another category has the same id or name ({one_line(title, 60)}). Each needs its "
                "own; names are read up to 200 characters."
            )
        names[key] = title
    if not names or len(names) > MOST_CATEGORIES:
        raise FulldepthError(f"{name} has {len(names):,} categories, expected 1 to {MOST_CATEGORIES:,}.")
    order = sorted(names)
    return {key: index for index, key in enumerate(order)}, tuple(names[key] for key in order)


def _images(path: Path, values: list[Any], defects: Defects) -> dict[int, _Entry]:
    """The images by id."""
    found: dict[int, _Entry] = {}
    find = _finder(path)
    for where, value in _entries(path.name, "images", values, defects):
        try:
            key = value.get("id")
            if not _is_id(key):
                raise FulldepthError(f"{where} needs an id, a whole number.")
            if key in found:
                raise FulldepthError(f"{where}: another image has the same id.")
            width, height = _edge(value.get("width"), where), _edge(value.get("height"), where)
            stored = stored_image(find(where, value.get("file_name")), str(value.get("file_name")))
        except FulldepthError as error:
            defects.note("image", error)
            continue
        loader = StoredImage(partial(_sized, stored, where, width, height), stored.content, stored.name)
        found[key] = _Entry(loader, width, height)
    return found


def _edge(value: Any, where: str) -> int:
    if not _is_id(value) or not 1 <= value <= LARGEST_EDGE:
        raise FulldepthError(f"{where} needs its width and height in pixels, got {one_line(repr(value), 40)}.")
    return value


def _sized(stored: StoredImage, where: str, width: int, height: int) -> Image.Image:
    """The decoded image, which must have the size that the json file states."""
    image = stored()
    if image.size != (width, height):
        raise FulldepthError(
            f"{where} is stated to have {width} x {height} pixels; its file {one_line(stored.name, 120)} has "
            f"{image.width} x {image.height}."
        )
    return image


def _finder(path: Path) -> Callable[[str, Any], Path]:
    """Function from (location, file name) to the image's file; it remembers the folder of the last one."""
    stem = path.stem.removeprefix("instances_")
    folders = [path.parent, path.parent / "images", path.parent / stem]
    folders += [path.parent.parent / stem, path.parent.parent / "images" / stem, path.parent.parent / "images"]

    def find(where: str, name: Any) -> Path:
        parts = PurePosixPath(name).parts if isinstance(name, str) else ()
        if not parts or "\0" in str(name) or ".." in parts or PurePosixPath(str(name)).is_absolute():
            raise FulldepthError(f"{where}: file_name is {one_line(repr(name), 80)}, expected a relative path.")
        for position, folder in enumerate(folders):
            if os.path.isfile(folder / name):  # False, where `Path.is_file` raises: names too long, folders locked
                folders.insert(0, folders.pop(position))
                return folder / name
        raise FulldepthError(f"{where}: there is no image file {one_line(name, 120)} in {path.parent} or near it.")

    return find


def _annotations(
    name: str, values: list[Any], images: Mapping[int, _Entry], indices: Mapping[int, int], defects: Defects
) -> dict[int, list[_Annotation]]:
    """The annotations by image id."""
    found: dict[int, list[_Annotation]] = {}
    for where, value in _entries(name, "annotations", values, defects):
        try:
            image, category, crowd = value.get("image_id"), value.get("category_id"), value.get("iscrowd", 0)
            if not _is_id(image) or image not in images:
                raise FulldepthError(f"{where}: image_id {_shown(image)} is not among the images.")
            if not _is_id(category) or category not in indices:
                raise FulldepthError(f"{where}: category_id {_shown(category)} is not among the categories.")
            if crowd not in (0, 1):
                raise FulldepthError(f"{where}: iscrowd is {one_line(repr(crowd), 40)}, expected 0 or 1.")
            box = checked_box(value.get("bbox"), images[image].width, images[image].height, where)
        except FulldepthError as error:
            defects.note("annotation", error)
            continue
        found.setdefault(image, []).append(_Annotation(indices[category], box, bool(crowd)))
    return found


def _shown(key: Any) -> str:
    """An id in a message."""
    return f"{one_line(repr(key), 40)}{'' if _is_id(key) else ' (no whole number)'}"


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
