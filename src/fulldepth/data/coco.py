"""Detection data in COCO's format: one json file of images, annotations and categories, and a folder of image files."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pydantic
from PIL import Image
from pydantic import Field

from fulldepth.data.images import StoredImage, stored_image
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import read_json

MOST_BYTES = 1 << 30
"""Largest json file; COCO's own training file has 0.45 GB."""
MOST_CATEGORIES = 10_000
SLACK = 1.0
"""Pixels by which a box may leave its image: annotation tools round."""
SHOWN = 3
"""Defects that a warning quotes."""
Edge = Annotated[int, Field(ge=1, le=10**6)]
Box = tuple[float, float, float, float]
"""x and y of the upper left corner, width, height, in pixels."""


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
        across, down = self.width, self.height
        return [((x + w / 2) / across, (y + h / 2) / down, w / across, h / down) for x, y, w, h in self.boxes]

    @property
    def targets(self) -> int:
        """Number of objects to find: all but crowds."""
        return sum(not crowd for crowd in self.crowd)

    def numbered(self, numbers: Sequence[int | None]) -> Objects:
        """The objects with other class indices, `numbers[i]` in place of i; those whose number is None are left out."""
        entries = zip(map(numbers.__getitem__, self.classes), self.boxes, self.crowd, strict=True)
        kept = [entry for entry in entries if entry[0] is not None]
        return Objects(self.width, self.height, *zip(*kept, strict=True))

    def mirrored(self) -> Objects:
        """The objects of the image whose left and right are exchanged."""
        return replace(self, boxes=tuple((self.width - x - w, y, w, h) for x, y, w, h in self.boxes))


class Coco(NamedTuple):
    """The images of a json file."""

    name: str
    rows: list[dict[str, Any]]
    """`image` (a loader) and `objects` of each image, in the order of the file."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the categories' ids."""
    warnings: list[str]


class Entry(pydantic.BaseModel):
    """An entry of a list of the json file; other keys are ignored."""

    model_config = pydantic.ConfigDict(strict=True)


class ImageEntry(Entry):
    """An image."""

    id: int
    file_name: str
    width: Edge
    height: Edge


class Annotation(Entry):
    """A box."""

    image_id: int
    category_id: int
    bbox: Annotated[list[pydantic.FiniteFloat], Field(min_length=4, max_length=4)]
    iscrowd: Literal[0, 1] = 0


class Category(Entry):
    """A class."""

    id: int
    name: str


E = TypeVar("E", bound=Entry)


@dataclass
class Defects:
    """Defects of a file: the first one is an error, unless bad entries are skipped, which are then counted."""

    skip: bool
    counts: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    @contextmanager
    def counted(self, kind: str) -> Iterator[None]:
        """Count a defect that reading an entry meets; raise it unless bad entries are skipped."""
        try:
            yield
        except FulldepthError as error:
            if not self.skip:
                raise FulldepthError(f"{error} --skip-bad leaves such entries out and counts them.") from error
            self.counts[kind] += 1
            self.first = [*self.first, str(error)][:SHOWN]

    def warnings(self, name: str) -> list[str]:
        """A sentence on all skipped entries; empty without any."""
        if not self.counts:
            return []
        counts = " and ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in self.counts.items())
        return [one_line(f"{name}: skipped {counts} with defects. First: {' '.join(self.first)}", 900)]


def coco_rows(path: Path, *, skip_bad: bool = False) -> Coco:
    """Read a json file in COCO's format; images are decoded on use.

    The image files are searched beside the json file, in its folder `images`, and as COCO's own layout has them
    (`annotations/instances_train2017.json` beside `train2017/`). Classes are numbered from 0 in the order of the
    categories' ids. Boxes are cut off at the edges of their image if they leave it by at most a pixel.

    Args:
        path: the json file.
        skip_bad: leave out entries with defects and count them, instead of refusing the file.

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
    defects, find = Defects(skip_bad), _finder(path)
    names = _categories(path.name, content["categories"])
    classes = {key: index for index, key in enumerate(names)}
    images: dict[int, tuple[StoredImage, ImageEntry]] = {}
    for position, value in enumerate(content["images"]):
        with defects.counted("image"):
            where, entry = _entry(path.name, "images", position, value, ImageEntry)
            if entry.id in images:
                raise FulldepthError(f"{where}: another image has the same id.")
            stored = stored_image(find(where, entry.file_name), entry.file_name)
            load = StoredImage(partial(_sized, stored, where, entry.width, entry.height), stored.content, stored.name)
            images[entry.id] = load, entry
    if not images:
        first = f" without defects. The first: {defects.first[0]}" if defects.first else "."
        raise FulldepthError(f"{path} holds no images{first}")
    objects: defaultdict[int, list[tuple[int, Box, bool]]] = defaultdict(list)
    for position, value in enumerate(content["annotations"]):
        with defects.counted("annotation"):
            where, given = _entry(path.name, "annotations", position, value, Annotation)
            if given.image_id not in images:
                raise FulldepthError(f"{where}: image_id {given.image_id} is not among the images.")
            if given.category_id not in classes:
                raise FulldepthError(f"{where}: category_id {given.category_id} is not among the categories.")
            box = _inside(given.bbox, images[given.image_id][1], where)
            objects[given.image_id].append((classes[given.category_id], box, bool(given.iscrowd)))
    rows = [
        {"image": load, "objects": Objects(entry.width, entry.height, *zip(*objects[entry.id], strict=True))}
        for load, entry in images.values()
    ]
    return Coco(path.name, rows, tuple(names.values()), defects.warnings(path.name))


def _entry(name: str, key: str, position: int, value: Any, kind: type[E]) -> tuple[str, E]:
    """Location and content of an entry."""
    where = f"{name} {key}[{position}]"
    if isinstance(value, dict) and "id" in value:
        where += f" (id {one_line(repr(value['id']), 40)})"
    try:
        return where, kind.model_validate(value)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the entry"
        given = one_line(repr(problem["input"]), 80)
        raise FulldepthError(f"{where}: {place} is {given}. {one_line(problem['msg'], 120)}.") from error


def _categories(name: str, values: list[Any]) -> dict[int, str]:
    """Name of each category, in the order of their ids."""
    names: dict[int, str] = {}
    for position, value in enumerate(values):
        where, entry = _entry(name, "categories", position, value, Category)
        title = one_line(entry.name, 200)
        if not title or entry.id in names or title in names.values():
            raise FulldepthError(
                f"{where}: its name is empty, or another category has the same id or name ({one_line(title, 60)}). "
                "Names are read up to 200 characters."
            )
        names[entry.id] = title
    if not 1 <= len(names) <= MOST_CATEGORIES:
        raise FulldepthError(f"{name} has {len(names):,} categories, expected 1 to {MOST_CATEGORIES:,}.")
    return dict(sorted(names.items()))


def _inside(box: list[float], image: ImageEntry, where: str) -> Box:
    """A box, cut off at the edges of its image."""
    x, y, width, height = box
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + width, image.width), min(y + height, image.height)
    outside = min(x, y) < -SLACK or x + width > image.width + SLACK or y + height > image.height + SLACK
    if min(width, height) <= 0 or outside or right <= left or bottom <= top:
        raise FulldepthError(
            f"{where}: the box {box} has no area, or is not inside its image of {image.width} x {image.height} pixels."
        )
    return left, top, float(right - left), float(bottom - top)


def _sized(stored: StoredImage, where: str, width: int, height: int) -> Image.Image:
    """The decoded image, which must have the size that the json file states."""
    image = stored()
    if image.size != (width, height):
        raise FulldepthError(
            f"{where} is stated to have {width} x {height} pixels; its file {one_line(stored.name, 120)} has "
            f"{image.width} x {image.height}."
        )
    return image


def _finder(path: Path) -> Callable[[str, str], Path]:
    """Function from (location, file name) to the image's file; it remembers the folder of the last one."""
    stem = path.stem.removeprefix("instances_")
    folders = [path.parent, path.parent / "images", path.parent / stem]
    folders += [path.parent.parent / stem, path.parent.parent / "images" / stem, path.parent.parent / "images"]

    def find(where: str, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or "\0" in name or ".." in parts or PurePosixPath(name).is_absolute():
            raise FulldepthError(f"{where}: file_name is {one_line(repr(name), 80)}, expected a relative path.")
        for position, folder in enumerate(folders):
            if os.path.isfile(folder / name):  # False, where `Path.is_file` raises: names too long, folders locked
                folders.insert(0, folders.pop(position))
                return folder / name
        raise FulldepthError(f"{where}: there is no image file {one_line(name, 120)} in {path.parent} or near it.")

    return find
