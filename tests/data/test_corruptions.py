"""Corruptions of images against numpy, scipy and Pillow formulas."""

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from fulldepth.data.corruptions import CORRUPTIONS, blur, contrast, corrupted, gaussian_noise
from fulldepth.data.sources import Record, Source
from fulldepth.errors import FulldepthError


@pytest.fixture
def image():
    ramp = np.add.outer(np.arange(64.0), 2 * np.arange(64.0))[..., None] * [0.7, 1.0, 0.4] + 20
    return Image.fromarray(ramp.round().astype(np.uint8))


def test_noise_has_the_named_deviation_and_follows_the_seed(image):
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    noise = np.asarray(gaussian_noise(grey, 0.1), dtype=float) / 255 - 128 / 255
    assert noise.std() == pytest.approx(0.1, rel=0.01)
    assert abs(noise.mean()) < 1e-3
    assert gaussian_noise(image, 0.1, (0, 1)) == gaussian_noise(image, 0.1, (0, 1))
    assert gaussian_noise(image, 0.1, (0, 1)) != gaussian_noise(image, 0.1, (0, 2))


def test_blur_is_a_gaussian_filter(image):
    image = gaussian_noise(image, 0.3)
    expected = gaussian_filter(np.asarray(image, dtype=float), (2, 2, 0), mode="nearest")
    assert np.abs(np.asarray(blur(image, 2), dtype=float) - expected)[8:-8, 8:-8].max() < 4  # of 255: box filters


def test_contrast_scales_about_the_mean(image):
    pixels = np.asarray(image, dtype=float)
    found = np.asarray(contrast(image, 0.5), dtype=float)
    assert found.std((0, 1)) == pytest.approx(pixels.std((0, 1)) / 2, rel=0.01)
    assert found.mean((0, 1)) == pytest.approx(pixels.mean((0, 1)), abs=0.5)


def test_zero_and_one_change_nothing(image):
    assert gaussian_noise(image, 0) == blur(image, 0) == contrast(image, 1) == image


def test_a_source_keeps_its_labels_and_names_its_corruption(image):
    source = Source("pictures", "images", [Record(image=lambda: image, label=n) for n in (1, 0)], ("a", "b"))
    noisy = corrupted(source, "gaussian-noise:0.2", seed=3)
    first, second = (record.image() for record in noisy.records)
    assert first == gaussian_noise(image, 0.2, (3, 0))
    assert second == gaussian_noise(image, 0.2, (3, 1))
    assert [record.label for record in noisy.records] == [1, 0]
    assert noisy.name == "pictures (gaussian-noise:0.2)"
    for wrong in ("blurr:1", "blur", "blur:x", "blur:-1", "blur:nan", "contrast:inf"):
        with pytest.raises(FulldepthError, match=r"Did you mean 'blur'|expected a number from 0"):
            corrupted(source, wrong)
    with pytest.raises(FulldepthError, match="only images"):
        corrupted(Source("texts", "text", [Record(text="x")]), "blur:1")
    assert len(CORRUPTIONS) == 3
