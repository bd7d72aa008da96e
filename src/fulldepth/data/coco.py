"""Detection data in COCO's format: one json file of images, annotations and categories, and a folder of image files."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from PIL import Image
from pydantic import Field

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import read_json
from fulldepth.data.images import StoredImage, stored_image

MOST_BYTES = 1 << 30
"""Largest json file; COCO's own training file has 0.45 GB."""
MOST_CATEGORIES = 10_000
SLACK = 1.0
"""Pixels by which a box may leave its image: annotation tools round."""
SHOWN = 3
"""Defects that a warning quotes."""
LISTS = ("categories", "images", "annotations")
"""Of a file, in the order in which they are read: entries refer to those of earlier lists."""
Entry = TypeVar("Entry", bound="CocoEntry")
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

    @property
    def relative(self) -> list[Box]:
        """The boxes as (centre x, centre y, width, height), each divided by the image's width or height."""
        across = self.width
        down = self.height
        return [((x + w / 2) / across, (y + h / 2) / down, w / across, h / down) for x, y, w, h in self.boxes]

    @property
    def targets(self) -> int:
        """Number of objects to find: all but crowds."""
        return sum(not crowd for crowd in self.crowd)

    def numbered(self, numbers: Sequence[int | None]) -> Objects:
        """The objects with other class indices, `numbers[i]` in place of i; those whose number is None are left out."""
        entries = zip(map(numbers.__getitem__, self.classes), self.boxes, self.crowd, strict=True)
        known = [entry for entry in entries if entry[0] is not None]
        return Objects(self.width, self.height, *zip(*known, strict=True))

    def mirrored(self) -> Objects:
        """The objects of the image whose left and right are exchanged."""
        return replace(self, boxes=tuple((self.width - x - w, y, w, h) for x, y, w, h in self.boxes))


class CocoEntry(pydantic.BaseModel):
    """An entry of a list of the json file; other keys are ignored."""

    model_config = pydantic.ConfigDict(strict=True)


class ImageEntry(CocoEntry):
    """An image."""

    id: int
    file_name: str
    width: Edge
    height: Edge


class Annotation(CocoEntry):
    """A box."""

    image_id: int
    category_id: int
    bbox: Annotated[list[pydantic.FiniteFloat], Field(min_length=4, max_length=4)]
    iscrowd: Literal[0, 1] = 0


class Category(CocoEntry):
    """A class."""

    id: int
    name: str


def coco_rows(path: Path, *, skip_bad: bool = False) -> tuple[list[dict[str, Any]], tuple[str, ...], tuple[str, ...]]:
    """Read a json file in COCO's format; images are decoded on use.

    The image files are searched beside the json file, in its folder `images`, and as COCO's own layout has them
    (`annotations/instances_train2017.json` beside `train2017/`). Classes are numbered from 0 in the order of the
    categories' ids. Boxes are cut off at the edges of their image if they leave it by at most a pixel.

    Args:
        path: the json file.
        skip_bad: leave out entries with defects and count them, instead of refusing the file.

    Returns:
        `image` (a loader) and `objects` of each image, in the order of the file; names of the classes; warnings.

    Raises:
        FulldepthError: if the file is not of this format, or (without `skip_bad`) an entry has a defect: an id that
            occurs twice or nowhere, an image file that is missing or of another size, a box without area or outside
            its image.
    """
    content = read_json(path, most=MOST_BYTES, allow_constants=True)  # so that a NaN is the defect of one entry
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in LISTS):
        raise FulldepthError(
            f"{path} is not in COCO's format for detection: expected an object with the lists images, annotations and "
            "categories. Rows of other data belong into a .jsonl file, one object on a line."
        )
    reader = _CocoReader(path)
    bad = Counter[str]()
    first = list[str]()
    uses: Any = (Category, reader.category), (ImageEntry, reader.image), (Annotation, reader.annotation)
    for key, (kind, use) in zip(LISTS, uses, strict=True):
        for position, value in enumerate(content[key]):
            where = f"{path.name} {key}[{position}]"
            if isinstance(value, dict) and "id" in value:
                where += f" (id {one_line(repr(value['id']), 40)})"
            try:
                use(where, _validated(value, kind, where))
            except FulldepthError as error:
                if key == "categories":
                    raise
                if not skip_bad:
                    advice = "--skip-bad (in training: data.skip_bad=true) leaves such entries out and counts them."
                    raise FulldepthError(f"{error} {advice}") from error
                bad[key] += 1
                first.append(str(error))
        if not 1 <= len(reader.names) <= MOST_CATEGORIES:
            raise FulldepthError(
                f"{path.name} has {len(reader.names):,} categories, expected 1 to {MOST_CATEGORIES:,}."
            )
    if not reader.images:
        raise FulldepthError(f"{path} holds no images without defects. {' '.join(first[:1])}")
    numbers = {key: number for number, key in enumerate(sorted(reader.names))}
    rows = []
    for load, entry in reader.images.values():
        known = [
            (numbers[annotation.category_id], box, bool(annotation.iscrowd))
            for annotation, box in reader.objects[entry.id]
        ]
        rows.append({"image": load, "objects": Objects(entry.width, entry.height, *zip(*known, strict=True))})
    counts = " and ".join(f"{count} {key}" for key, count in bad.items())
    examples = " ".join(first[:SHOWN])
    warnings = (one_line(f"{path.name}: skipped {counts} with defects. First: {examples}", 900),) if bad else ()
    return rows, tuple(reader.names[key] for key in numbers), warnings


class _CocoReader:
    """Entries of a file that were read, and checks of further ones."""

    def __init__(self, path: Path) -> None:
        stem = path.stem.removeprefix("instances_")
        above = path.parent.parent
        self.path = path
        self.folders = [path.parent, path.parent / "images", path.parent / stem]
        self.folders += [above / stem, above / "images" / stem, above / "images"]
        self.names: dict[int, str] = {}
        self.images: dict[int, tuple[StoredImage, ImageEntry]] = {}
        self.objects: defaultdict[int, list[tuple[Annotation, Box]]] = defaultdict(list)

    def category(self, where: str, entry: Category) -> None:
        title = one_line(entry.name, 200)
        if not title or entry.id in self.names or title in self.names.values():
            raise FulldepthError(
                f"{where}: its name is empty, or another category has the same id or name ({one_line(title, 60)}). "
                "Names are read up to 200 characters."
            )
        self.names[entry.id] = title

    def image(self, where: str, entry: ImageEntry) -> None:
        if entry.id in self.images:
            raise FulldepthError(f"{where}: another image has the same id.")
        name = entry.file_name
        path = PurePosixPath(entry.file_name)
        if not path.parts or "\0" in name or ".." in path.parts or path.is_absolute():
            raise FulldepthError(f"{where}: file_name is {one_line(repr(name), 80)}, expected a relative path.")
        # `Path.is_file` would raise for names that are too long and folders that are locked
        file = next((folder / name for folder in self.folders if os.path.isfile(folder / name)), None)
        if file is None:
            missing = one_line(name, 120)
            raise FulldepthError(f"{where}: there is no image file {missing} in {self.path.parent} or near it.")
        stored = stored_image(file, name)
        stated = (entry.width, entry.height)

        def decode() -> Image.Image:
            image = stored()
            if image.size != stated:
                raise FulldepthError(
                    f"{where} is stated to have {stated[0]} x {stated[1]} pixels; its file {one_line(name, 120)} has "
                    f"{image.width} x {image.height}, turned as its EXIF orientation says if it has one."
                )
            return image

        self.images[entry.id] = replace(stored, decode=decode), entry

    def annotation(self, where: str, entry: Annotation) -> None:
        if entry.image_id not in self.images:
            raise FulldepthError(f"{where}: image_id {entry.image_id} is not among the images.")
        if entry.category_id not in self.names:
            raise FulldepthError(f"{where}: category_id {entry.category_id} is not among the categories.")
        image = self.images[entry.image_id][1]
        x, y, width, height = entry.bbox
        left = max(x, 0.0)
        top = max(y, 0.0)
        # cut off at the image's edges
        right = min(x + width, image.width)
        bottom = min(y + height, image.height)
        outside = min(x, y) < -SLACK or x + width > image.width + SLACK or y + height > image.height + SLACK
        if min(width, height) <= 0 or outside or right <= left or bottom <= top:
            raise FulldepthError(
                f"{where}: the box {entry.bbox} has no area, or is not inside its image of {image.width} x "
                f"{image.height} pixels."
            )
        self.objects[entry.image_id].append((entry, (left, top, float(right - left), float(bottom - top))))


def _validated(value: Any, kind: type[Entry], where: str) -> Entry:
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the entry"
        given = one_line(repr(problem["input"]), 80)
        raise FulldepthError(f"{where}: {place} is {given}. {one_line(problem['msg'], 120)}.") from error
