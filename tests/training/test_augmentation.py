"""Mirrored images with boxes, against pictures of coloured rectangles that an independent scan finds again."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from PIL import Image
from torch.testing import assert_close
from transformers import DetrImageProcessorPil

from fulldepth.data import ImageRecord
from fulldepth.data.batches import collate_images
from fulldepth.data.coco import Objects
from fulldepth.data.images import image_value
from fulldepth.data.labelled import LabelledRows
from fulldepth.settings.train import AugmentationSettings
from fulldepth.training.labelled import changed

COLOURS = ((250, 10, 10), (10, 250, 10), (10, 10, 250))
FLIP = AugmentationSettings(flip=True)


def rectangles(index):
    """A picture with a rectangle of each colour in a band of its own, at random places."""
    random = np.random.default_rng(index)
    width, height = int(random.integers(30, 60)), 30
    pixels, boxes = np.zeros((height, width, 3), np.uint8), []
    for number, colour in enumerate(COLOURS):
        w, h = int(random.integers(1, width // 2)), int(random.integers(1, 10))
        x, y = int(random.integers(0, width - w + 1)), 10 * number + int(random.integers(0, 10 - h + 1))
        pixels[y : y + h, x : x + w] = colour
        boxes.append((float(x), float(y), float(w), float(h)))
    image = Image.fromarray(pixels)
    objects = Objects(width, height, (0, 1, 2), tuple(boxes), (False, True, False))
    return ImageRecord(image=image_value(image, "rectangles"), objects=objects)


def scanned(pixels):
    """The box of each colour's pixels, `[H, W, 3]`."""
    found = []
    for colour in COLOURS:
        rows, columns = np.nonzero((pixels == colour).all(-1))
        x, y = columns.min(), rows.min()
        found.append((float(x), float(y), float(columns.max() + 1 - x), float(rows.max() + 1 - y)))
    return found


def plain(**options):
    """A processor that pads, and changes no pixel."""
    return DetrImageProcessorPil(do_resize=False, do_normalize=False, do_rescale=False, **options)


def rows_of(pictures, seed, settings=FLIP, edges=(8, 8)):
    return LabelledRows(pictures, partial(changed, settings=settings, edges=edges, seed=seed))


def test_a_batch_holds_the_boxes_of_its_pixels_and_half_of_the_images_are_mirrored():
    pictures = [rectangles(index) for index in range(40)]
    rows, flipped = rows_of(pictures, 3), []
    for epoch in (0, 1):
        batch = collate_images([rows[40 * epoch + index] for index in range(40)], range(40), plain())
        assert batch.objects is not None
        assert batch.inputs["pixel_mask"].sum((1, 2)).tolist() == [p.objects.width * 30 for p in pictures]
        for pixels, objects, picture in zip(batch.inputs["pixel_values"], batch.objects, pictures, strict=True):
            found = scanned(pixels.permute(1, 2, 0).numpy().astype(int))
            width = picture.objects.width
            expected = [((x + w / 2) / width, (y + h / 2) / 30, w / width, h / 30) for x, y, w, h in found]
            assert_close(objects["boxes"], torch.tensor(expected), rtol=0, atol=1e-6)
            flipped.append(found != list(picture.objects.boxes))
    assert 25 <= sum(flipped) <= 55  # of 80; binomial, 3.3 standard deviations
    assert flipped[:40] != flipped[40:]


def test_an_image_is_mirrored_by_seed_epoch_and_index_alone():
    def mirrored(seed, chosen, epoch):
        rows = rows_of(pictures, seed)
        return [rows[24 * epoch + index].objects != pictures[index].objects for index in chosen]

    pictures = [rectangles(index) for index in range(24)]
    together = mirrored(0, list(range(24)), 5)
    assert [mirrored(0, [index], 5)[0] for index in range(24)] == together
    assert mirrored(0, list(range(23, -1, -1)), 5)[::-1] == together
    assert mirrored(1, list(range(24)), 5) != together


def test_crops_and_rotations_are_spread_over_their_range():
    """A white square of 40 pixels that the model reads at 20: shifts of up to 3 pixels there are up to 6 here."""
    image = Image.new("RGB", (40, 40), "white")
    picture, shifts = ImageRecord(image=image_value(image, "square")), set()
    rows = rows_of([picture], 0, AugmentationSettings(crop=3), (20, 20))
    for key in range(200):
        white = np.asarray(rows[key].image())[..., 0] == 255
        height, width = white.any(1).sum(), white.any(0).sum()
        assert white.sum() == height * width, "the rest is black"
        shifts.add((int(white.any(0).argmax() or width - 40), int(white.any(1).argmax() or height - 40)))
    assert {value for shift in shifts for value in shift} == {-6, -4, -2, 0, 2, 4, 6}
    assert len(shifts) > 40
    rows = rows_of([picture], 0, AugmentationSettings(rotation=30), (20, 20))
    black = [int((np.asarray(rows[key].image())[..., 0] == 0).sum()) for key in range(100)]
    largest = (np.asarray(image.rotate(30))[..., 0] == 0).sum()
    assert min(black) < largest / 10
    assert largest * 0.8 < max(black) <= largest * 1.05
