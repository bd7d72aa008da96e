"""Folders of images, on disk or in a .zip: [train|validation|test/]class/file.

A folder without images, or without the split, is a `FulldepthError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from PIL import Image

from fulldepth.data.archives import Archive
from fulldepth.data.columns import CAPTION_COLUMNS, require_columns, text_value
from fulldepth.data.files import ROWS, folder_files
from fulldepth.data.images import ImageLoader, Pick, StoredImage, decode_image, stored_image
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import reading
from fulldepth.uncertainty import identity

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
METADATA = "metadata.jsonl"
"""File of a folder of images that gives their captions, as Hugging Face's `imagefolder` reads it."""
SPLITS = ("validation", "valid", "val", "dev", "test", "train")
"""Names of splits, in order of preference if none is requested; the labels of `test` may be hidden."""


class Pictures(NamedTuple):
    """The images of one split."""

    name: str
    rows: list[dict[str, Any]]
    """`image` (a loader), `label` (class index, or None) and, in a folder with captions, `text` (None without one)."""
    classes: tuple[str, ...]


def has_images(path: Path) -> bool:
    """Whether a folder or one of its sub-folders holds an image."""
    with reading(path):
        return any(file.suffix.lower() in SUFFIXES for file in folder_files(path))


def folder_images(path: Path, split: str | None = None, *, held_out: bool = True, pick: Pick | None = None) -> Pictures:
    """The images below a folder; class sub-folders give the labels, in sorted order of their names.

    Without `split`, the first of `SPLITS` that exists (if not `held_out`, `train` before all others); `pick` chooses
    images by the identities of their relative paths.
    """
    files = [PurePosixPath(file.relative_to(path).as_posix()) for file in folder_files(path)]
    captions = _captions(path, files)
    loader = partial(_stored_file, path)
    return _pictures(path.name, files, loader, split, held_out, pick, captions)


def _stored_file(folder: Path, file: PurePosixPath) -> StoredImage:
    return stored_image(folder / file, str(file))


def _captions(path: Path, files: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
    """Image -> text, from every `metadata.jsonl` of a folder: rows with `file_name`, relative to it, and a caption."""
    captions: dict[PurePosixPath, str] = {}
    for file in sorted(file for file in files if file.name == METADATA):
        for where, row in ROWS[".jsonl"](path / file):
            column = next((name for name in CAPTION_COLUMNS if name in row), None)
            if column is None:
                continue
            require_columns(row, ["file_name"], where)
            image = file.parent / text_value(row["file_name"], f"{where}, 'file_name'")
            captions[image] = text_value(row[column], f"{where}, {column!r}")
    if missing := sorted(map(str, captions.keys() - set(files))):
        raise FulldepthError(f"{METADATA} of {path.name} names {missing[0]}, which is not there.")
    return captions


def zip_images(path: Path, split: str | None = None, *, held_out: bool = True, pick: Pick | None = None) -> Pictures:
    """The images in a `.zip` of such a folder, read in place; see `folder_images`."""
    archive = Archive(path)
    return _pictures(path.name, archive.names, partial(_stored_member, archive), split, held_out, pick)


def _stored_member(archive: Archive, file: PurePosixPath) -> StoredImage:
    return StoredImage(partial(_read_member, archive, str(file)), partial(archive.read, str(file)), str(file))


def _read_member(archive: Archive, member: str) -> Image.Image:
    return decode_image(archive.read(member), f"{archive.path}/{member}")


def _pictures(
    name: str,
    files: Sequence[PurePosixPath],
    loader: Callable[[PurePosixPath], ImageLoader],
    split: str | None,
    held_out: bool,
    pick: Pick | None,
    captions: Mapping[PurePosixPath, str] | None = None,
) -> Pictures:
    images, chosen = _arrange(name, files, split, held_out)
    classes = tuple(sorted({label for _, label in images if label is not None}))
    if pick is not None:
        images = [images[i] for i in pick([identity(str(file)) for file, _ in images])]
    index = {label: i for i, label in enumerate(classes)}
    rows: list[dict[str, Any]] = [
        {"image": loader(file), "label": None if label is None else index[label]} for file, label in images
    ]
    if captions:
        rows = [{**row, "text": captions.get(file)} for row, (file, _) in zip(rows, images, strict=True)]
    return Pictures(f"{name}/{chosen}" if chosen else name, rows, classes)


def _arrange(
    name: str, files: Sequence[PurePosixPath], split: str | None = None, held_out: bool = True
) -> tuple[list[tuple[PurePosixPath, str | None]], str | None]:
    """Sorted (file, class name) of the images among `files`, and the split they belong to, if there are splits."""
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
        depth = 1  # a single folder contains everything
    splits = {folder for f in images if (folder := _folder(f, depth)) in SPLITS}
    if split is None:
        split = next((s for s in (SPLITS if held_out else ("train", *SPLITS)) if s in splits), None)
    elif split not in splits:
        have = ", ".join(sorted(splits)) or "no splits"
        raise FulldepthError(f"{name} has no split {split!r}. It has: {have}.")
    if split is not None:
        images, depth = [f for f in images if _folder(f, depth) == split], depth + 1
    return [(f, f.parent.name if len(f.parts) > depth + 1 else None) for f in images], split


def _folder(file: PurePosixPath, depth: int) -> str | None:
    """Lower-case name of the folder at `depth` in the path of `file`; None if that part is the file itself."""
    return file.parts[depth].lower() if len(file.parts) > depth + 1 else None
