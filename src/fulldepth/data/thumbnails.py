"""Thumbnails of images for results: small, without metadata, as text that a page can embed."""

from __future__ import annotations

import base64
import io

from PIL import Image

from fulldepth.data.images import ImageLoader, StoredImage

SIDE = 64
"""Most pixels of a thumbnail's longer edge."""
MOST_BYTES = 6000
"""Most bytes of a thumbnail as a file; its text is a third longer."""
QUALITIES = (85, 60, 30, 10)
"""Qualities of JPEG, tried in turn until the file is small enough."""


def thumbnail(image: Image.Image) -> str:
    """The image as a `data:` address, its longer edge at most `SIDE` pixels; smaller images keep their size.

    PNG or JPEG, whichever is smaller. Only pixels are kept: no EXIF entries, comments or colour profiles.
    """
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    small = Image.frombytes("RGB", small.size, small.tobytes())  # without the metadata, which Pillow would write
    files = [("png", _encoded(small, "PNG", optimize=True))]
    for quality in QUALITIES:
        files.append(("jpeg", _encoded(small, "JPEG", quality=quality, optimize=True)))
        if len(files[-1][1]) <= MOST_BYTES:
            break
    kind, content = min(files, key=lambda file: len(file[1]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def image_name(load: ImageLoader) -> str:
    """Name of the file of an image, within its folder or archive; empty if it is in no file."""
    return load.name if isinstance(load, StoredImage) else ""
