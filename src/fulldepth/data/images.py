"""Images from files, archives, bytes or Python objects, decoded on use and within limits.

An image that is corrupt, truncated, too large or of an unsupported format is a `FulldepthError` that names it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from fulldepth.data.columns import kind_of
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import read_bytes

IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")
"""Supported formats. For some others Pillow would run external programs."""

MOST_IMAGE_BYTES = 256 << 20
"""Largest image file."""
MOST_PIXELS = 64 * 10**6
MOST_RATIO = 200
"""Long edge over short edge."""

ImageLoader = Callable[[], Image.Image]
"""Decodes an image to RGB; a `StoredImage` also gives the stored bytes without decoding."""


Pick = Callable[[Sequence[int]], Sequence[int]]
"""Chooses among images: (identities of all) -> indices of those to read."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that is decoded to RGB when called."""

    decode: ImageLoader
    content: Callable[[], bytes]
    """Returns the stored bytes, which determine every pixel."""
    name: str = ""
    """Name of the file; empty if the image is in no file."""

    def __call__(self) -> Image.Image:
        """The decoded image."""
        return self.decode()


def image_value(value: Any, where: str) -> ImageLoader:
    """A loader for an image given as a Pillow image, a path, bytes, a {bytes, path} mapping, or a `StoredImage`."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, StoredImage):
        return value
    if isinstance(value, Image.Image):
        return partial(_rgb, value, where)
    if isinstance(value, bytes):
        return StoredImage(partial(decode_image, value, where), lambda: value)
    if isinstance(value, str | Path):
        return stored_image(Path(value), Path(value).name)
    raise FulldepthError(f"{where} is {kind_of(value)}, expected an image, its bytes or its path.")


def _rgb(image: Image.Image, where: str) -> Image.Image:
    """The image in RGB; one that would need too much memory is refused before it is decoded.

    So is a thin strip: a processor that enlarges its short edge would make its long edge extremely long; and grey
    values of more than 8 bits, which Pillow would clip at 255.
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
        return image.convert("RGB")
    except Exception as error:  # as in `decode_image`
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> FulldepthError:
    reason = one_line(str(error).split("<_io")[0]) or type(error).__name__
    expected = f"Expected a whole file, one of {', '.join(IMAGE_FORMATS)}."
    return FulldepthError(f"Cannot read the image {where}: {reason}. {expected}")


def image_content(load: ImageLoader) -> bytes:
    """Bytes that determine every pixel of an image: the stored bytes if available, else its pixels."""
    if isinstance(load, StoredImage):
        return load.content()
    image = load()
    return f"{image.mode} {image.size} ".encode() + image.tobytes()


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
