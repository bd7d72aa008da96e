"""Corruptions of images at a set strength, for accuracy under distribution shift without a shifted test set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image, ImageFilter

from fulldepth.data.images import ImageLoader
from fulldepth.data.sources import Source
from fulldepth.errors import FulldepthError, unknown

MOST_STRENGTH = 1000.0


def gaussian_noise(image: Image.Image, strength: float, seed: tuple[int, ...] = (0,)) -> Image.Image:
    """Add normal noise of standard deviation `strength`, in units of the full range, to every channel; clipped.

    Args:
        image: RGB.
        strength: 0 = unchanged, 1 = the full range.
        seed: of the noise.
    """
    pixels = np.asarray(image, dtype=np.float64) / 255
    noisy = pixels + strength * np.random.default_rng(seed).standard_normal(pixels.shape)
    return Image.fromarray(np.round(255 * noisy.clip(0, 1)).astype(np.uint8))


def blur(image: Image.Image, strength: float, seed: tuple[int, ...] = (0,)) -> Image.Image:
    """Gaussian blur with a standard deviation of `strength` pixels (Pillow's, by repeated box filters)."""
    return image.filter(ImageFilter.GaussianBlur(strength))


def contrast(image: Image.Image, strength: float, seed: tuple[int, ...] = (0,)) -> Image.Image:
    """Multiply the distance of every pixel to its channel's mean by `strength`: 1 = unchanged, 0 = flat."""
    pixels = np.asarray(image, dtype=np.float64)
    mean = pixels.mean((0, 1), keepdims=True)
    return Image.fromarray(np.round((mean + strength * (pixels - mean)).clip(0, 255)).astype(np.uint8))


CORRUPTIONS: dict[str, Callable[..., Image.Image]] = {
    "gaussian-noise": gaussian_noise,
    "blur": blur,
    "contrast": contrast,
}
"""Name -> function of an RGB image, a strength and a seed."""


def corrupted(source: Source, named: str, seed: int = 0) -> Source:
    """The images of a source, each corrupted when it is decoded; labels and order stay.

    Args:
        source: of images.
        named: `NAME:STRENGTH`, such as `gaussian-noise:0.1`, `blur:2` or `contrast:0.5`.
        seed: of the noise; that of an image also depends on its place in the source.

    Raises:
        FulldepthError: for an unknown name, a strength that is no number of at least 0, or a source of text.
    """
    name, _, amount = named.partition(":")
    if name not in CORRUPTIONS:
        raise unknown("corruption", name, CORRUPTIONS)
    try:
        strength = float(amount)
    except ValueError:
        strength = -1.0
    if not 0 <= strength <= MOST_STRENGTH:  # also refuses NaN
        raise FulldepthError(f"The strength of {name} is {amount!r}; expected a number from 0, as in {name}:0.5.")
    if source.kind != "images":
        raise FulldepthError(f"{source.name} holds {source.kind}; only images can be corrupted ({named}).")
    records = [
        record
        if record.image is None
        else replace(record, image=partial(_apply, record.image, CORRUPTIONS[name], strength, (seed, index)))
        for index, record in enumerate(source.records)
    ]
    return replace(source, name=f"{source.name} ({named})", records=records)


def _apply(
    load: ImageLoader, change: Callable[..., Image.Image], strength: float, seed: tuple[int, ...]
) -> Image.Image:
    return change(load(), strength, seed)
