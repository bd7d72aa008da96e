"""Folders of images, on disk or in a .zip: [train|validation|test/]class/file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from PIL import Image

from fulldepth.data.archives import open_archive, read_member
from fulldepth.data.records import Record, Source, decode_image, read_image
from fulldepth.errors import FulldepthError, one_line

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
SPLITS = ("validation", "valid", "val", "dev", "test", "train")
"""Names of splits; where none is asked for, the first of these that exists: the labels of `test` may be hidden."""


def folder_images(path: Path, split: str | None = None, limit: int | None = None) -> Source:
    """The images below a folder; class sub-folders give the labels, in sorted order of their names.

    Raises:
        FulldepthError: if there are none, or no such split.
    """
    files = [PurePosixPath(f.relative_to(path).as_posix()) for f in path.rglob("*") if f.is_file()]
    return _source(path.name, files, lambda file: partial(read_image, path / file), split, limit)


def zip_images(path: Path, split: str | None = None, limit: int | None = None) -> Source:
    """The images in a `.zip` of such a folder, read in place.

    Raises:
        FulldepthError: if the archive cannot be read, there are none, or no such split.
    """
    archive = open_archive(path)
    files = [PurePosixPath(info.filename) for info in archive.infolist() if not info.is_dir()]
    return _source(path.name, files, lambda file: partial(_read_member, archive, str(file)), split, limit)


def _read_member(archive: zipfile.ZipFile, member: str) -> Image.Image:
    return decode_image(read_member(archive, member), f"{archive.filename}/{member}")


def _source(
    name: str,
    files: Sequence[PurePosixPath],
    loader: Callable[[PurePosixPath], Callable[[], Image.Image]],
    split: str | None,
    limit: int | None,
) -> Source:
    found, chosen = arrange(name, files, split)
    if limit is not None and limit < len(found):  # sorted by class: take them evenly, not the first classes only
        found = [found[i * len(found) // limit] for i in range(limit)]
    classes = tuple(sorted({label for _, label in found if label is not None}))
    index = {label: i for i, label in enumerate(classes)}
    records = [Record(image=loader(file), label=None if label is None else index[label]) for file, label in found]
    return Source(f"{name}/{chosen}" if chosen else name, "images", records, classes)


def arrange(
    name: str, files: Sequence[PurePosixPath], split: str | None = None
) -> tuple[list[tuple[PurePosixPath, str | None]], str | None]:
    """Sorted (file, class name) of the images among `files`, and the split they belong to, if there are splits.

    Raises:
        FulldepthError: if there are no images, or none of the split asked for.
    """
    images = sorted(
        f for f in files if f.suffix.lower() in SUFFIXES and not f.name.startswith(".") and "__MACOSX" not in f.parts
    )
    if not images:
        have = one_line(", ".join(sorted({f.suffix or "(no suffix)" for f in files})) or "nothing", 200)
        raise FulldepthError(f"No images in {name}. Found: {have}. Expected {', '.join(sorted(SUFFIXES))}.")
    depth = 0
    if (
        len({f.parts[0] for f in images}) == 1
        and _folder(images[0], 0) not in SPLITS
        and all(len(f.parts) > 2 for f in images)
    ):
        depth = 1  # one folder around everything
    splits = {folder for f in images if (folder := _folder(f, depth)) in SPLITS}
    if split is None:
        split = next((s for s in SPLITS if s in splits), None)
    elif split not in splits:
        have = ", ".join(sorted(splits)) or "no splits"
        raise FulldepthError(f"{name} has no split {split!r}. It has: {have}.")
    if split is not None:
        images, depth = [f for f in images if _folder(f, depth) == split], depth + 1
    return [(f, f.parent.name if len(f.parts) > depth + 1 else None) for f in images], split


def _folder(file: PurePosixPath, depth: int) -> str | None:
    """Lower-case name of the folder at `depth` on the way to `file`, None if the file itself stands there."""
    return file.parts[depth].lower() if len(file.parts) > depth + 1 else None
