"""Thumbnails: small, exact where the image is small, and nothing but pixels."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from fulldepth.data import thumbnail
from fulldepth.results import is_picture


def decoded(address):
    kind, _, content = address.partition(";base64,")
    image = Image.open(io.BytesIO(base64.b64decode(content)))
    assert image.format.lower() == kind.removeprefix("data:image/")
    return image


def test_a_digit_is_kept_pixel_by_pixel():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(decoded(thumbnail(Image.fromarray(pixels)))), pixels)


@pytest.mark.parametrize("size", [(640, 480), (200, 2), (64, 65), (4000, 3000)])
def test_the_longer_edge_has_at_most_64_pixels_and_the_file_is_small(size):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    address = thumbnail(Image.fromarray(noise))
    image = decoded(address)
    assert max(image.size) == 64
    assert image.width / image.height == pytest.approx(size[0] / size[1], rel=0.05) or min(image.size) == 1
    assert len(address) <= 8100
    assert is_picture(address)


def test_no_metadata_of_the_users_file_is_kept():
    secret = "51.5007 N, photographed by Jane"
    text = PngImagePlugin.PngInfo()
    text.add_text("Author", secret)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[270] = secret
    pixels = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    for image in (Image.fromarray(pixels), Image.new("RGB", (60, 60), "red")):
        for kind, options in (("PNG", {"pnginfo": text}), ("JPEG", {"comment": secret})):
            buffer = io.BytesIO()
            image.save(buffer, kind, exif=exif, icc_profile=profile, dpi=(300, 300), **options)
            assert b"Jane" in buffer.getvalue()
            small = decoded(thumbnail(Image.open(buffer)))
            assert set(small.info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density"}
            assert not small.getexif()


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "https://example.org/a.png",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:text/html;base64,PHN2Zz4=",
        'data:image/png;base64,AAAA" onerror="alert(1)',
        "data:image/png;base64,AAAA\n",
        "data:image/png;base64," + "A" * 20_000,
    ],
)
def test_nothing_else_is_a_picture(value):
    assert not is_picture(value)
