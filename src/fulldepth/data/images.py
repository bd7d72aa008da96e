"""Images from files, folders, bytes or Python objects, decoded on use and within limits.

An image that is corrupt, truncated, too large or of an unsupported format is a `FulldepthError` that names it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image, ImageOps

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import read_bytes, reading
from fulldepth.data.columns import type_of_cell
from fulldepth.data.files import folder_files

IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")
"""Supported formats. For some others Pillow would run external programs."""

MOST_IMAGE_BYTES = 256 << 20
"""Largest image file."""
MOST_PIXELS = 64 * 10**6
MOST_RATIO = 200
"""Long edge over short edge."""
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
SPLITS = ("validation", "valid", "val", "dev", "test", "train")
"""Names of splits, in order of preference if none is requested; the labels of `test` may be hidden."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that is decoded to RGB when called."""

    decode: Callable[[], Image.Image]
    content: Callable[[], bytes]
    """Returns bytes that determine every pixel: the stored bytes without decoding if available, else the pixels."""
    name: str = ""
    """Name of the file; empty if the image is in no file."""

    def __call__(self) -> Image.Image:
        """The decoded image."""
        return self.decode()

    def changed(self, change: Callable[[Image.Image], Image.Image]) -> StoredImage:
        """The image, changed when it is decoded."""
        return replace(self, decode=lambda: change(self.decode()))


def image_value(value: Any, where: str) -> StoredImage:
    """An image given as a Pillow image, a path, bytes, a {bytes, path} mapping, or a `StoredImage`."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, StoredImage):
        return value
    if isinstance(value, Image.Image):
        decode = partial(_rgb, value, where)
        return StoredImage(decode, lambda: f"RGB {value.size} ".encode() + decode().tobytes())
    if isinstance(value, bytes):
        return StoredImage(partial(decode_image, value, where), lambda: value)
    if isinstance(value, str | Path):
        return stored_image(Path(value), Path(value).name)
    raise FulldepthError(f"{where} is {type_of_cell(value)}, expected an image, its bytes or its path.")


def _rgb(image: Image.Image, where: str) -> Image.Image:
    """The image in RGB, turned as its EXIF orientation says.

    One that would need too much memory is refused before it is decoded. So is a thin strip: a processor that enlarges
    its short edge would make its long edge extremely long; and grey values of more than 8 bits, which Pillow would clip
    at 255.
    """
    width, height = image.size
    if width * height > MOST_PIXELS or not 1 <= max(width, height) <= MOST_RATIO * min(width, height):
        raise FulldepthError(
            f"Cannot read the image {where}: it has {width:,} x {height:,} pixels. Expected at most {MOST_PIXELS:,}, "
            f"and no edge more than {MOST_RATIO} times as long as the other."
        )
    if image.mode.startswith(("I", "F")):
        raise FulldepthError(
            f"Cannot read the image {where}: its pixels have more than 8 bits (mode {image.mode}), and converting them "
            "would cut off all large values. Store it with 8 bits a channel."
        )
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # as in `decode_image`
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> FulldepthError:
    reason = one_line(str(error).split("<_io")[0]) or type(error).__name__
    expected = f"Expected a whole file, one of {', '.join(IMAGE_FORMATS)}."
    return FulldepthError(f"Cannot read the image {where}: {reason}. {expected}")


def stored_image(path: Path, name: str) -> StoredImage:
    """The image in a file, which `name` names in results."""
    content = partial(read_bytes, path, most=MOST_IMAGE_BYTES)
    return StoredImage(lambda: decode_image(content(), str(path)), content, name)


def decode_image(data: bytes, where: str) -> Image.Image:
    """The image encoded in `data`, in RGB."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                return _rgb(image, where)
    except FulldepthError:
        raise
    except Exception as error:  # decoders raise any exception on damaged files
        raise _unreadable(where, error) from error


def folder_images(
    path: Path, split: str | None = None, *, held_out: bool = True
) -> tuple[str, list[dict[str, Any]], tuple[str, ...]] | None:
    """The images below a folder, `[train|validation|test/]class/file`; the classes are in sorted order of their names.

    Without `split`, the first of `SPLITS` that exists (if not `held_out`, `train` before all others). Beside folders of
    other names, a folder of such a name is a split only if it holds folders: `train` may be a class beside `car`.

    Returns:
        Name; rows with `image` (a `StoredImage`) and `label` (class index, or None); and names of the classes. None if
        the folder holds no image.

    Raises:
        FulldepthError: if the split does not exist.
    """
    with reading(path):
        files = [PurePosixPath(file.relative_to(path).as_posix()) for file in folder_files(path)]
    images = sorted(
        f for f in files if f.suffix.lower() in SUFFIXES and not f.name.startswith(".") and "__MACOSX" not in f.parts
    )
    if not images:
        return None

    def folder(file: PurePosixPath, depth: int) -> str | None:
        return file.parts[depth].lower() if len(file.parts) > depth + 1 else None

    one_root = len({f.parts[0] for f in images}) == 1 and all(len(f.parts) > 2 for f in images)
    depth = int(one_root and folder(images[0], 0) not in SPLITS)  # a single folder may contain everything
    names = {name for f in images if (name := folder(f, depth)) is not None}
    splits = names.intersection(SPLITS)
    if split is None and (names == splits or any(folder(f, depth) in splits and folder(f, depth + 1) for f in images)):
        split = next((s for s in (SPLITS if held_out else ("train", *SPLITS)) if s in splits), None)
    elif split not in (None, *splits):
        raise FulldepthError(f"{path.name} has no split {split!r}. It has: {', '.join(sorted(splits)) or 'no splits'}.")
    if split is not None:
        images = [f for f in images if folder(f, depth) == split]
        depth = depth + 1
    labels = [f.parent.name if len(f.parts) > depth + 1 else None for f in images]
    classes = tuple(sorted(set(filter(None, labels))))
    numbers = {label: number for number, label in enumerate(classes)}
    rows = [
        {"image": stored_image(path / file, str(file)), "label": None if label is None else numbers[label]}
        for file, label in zip(images, labels, strict=True)
    ]
    return f"{path.name}/{split}" if split else path.name, rows, classes
