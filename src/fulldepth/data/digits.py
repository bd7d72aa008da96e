"""The built-in images: scikit-learn's handwritten digits, 1,797 images of 8 x 8 grey values in ten classes."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fulldepth.data.images import StoredImage
from fulldepth.errors import unknown

PARTS = ("train", "test")
CLASSES = tuple(str(digit) for digit in range(10))
TEST_SHARE = 5
"""One in so many images of each class is in the test part."""


def digit_rows(part: str) -> list[dict[str, Any]]:
    """The rows of one part, with `image` and `label`, in scikit-learn's order.

    Of each class the fifth, tenth, ... image is in `test` (355 images), the others are in `train` (1,442). Grey values
    0 to 16 become 0 to 255.

    Args:
        part: `train` or `test`.

    Raises:
        FulldepthError: if there is no such part.

    Source: Alpaydin and Kaynak 1998 (UCI Optical Recognition of Handwritten Digits), the copy in scikit-learn.
    """
    if part not in PARTS:
        raise unknown("part of the built-in digits", part, PARTS)
    images, labels = _digits()
    seen: Counter[int] = Counter()
    rows = []
    for pixels, label in zip(images, labels.tolist(), strict=True):
        seen[label] += 1
        if (seen[label] % TEST_SHARE == 0) == (part == "test"):
            rows.append({"image": StoredImage(partial(_image, pixels), pixels.tobytes), "label": label})
    return rows


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels).convert("RGB")


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """[1797, 8, 8] uint8 pixels and [1797] classes."""
    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target
