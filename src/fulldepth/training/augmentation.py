"""Random changes of training images; each depends on the seed, the epoch and the image alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from fulldepth.data.labelled import Item
from fulldepth.data.sequences import Batch, collate_images
from fulldepth.errors import FulldepthError
from fulldepth.settings.train import AugmentationSettings


class Augmentation:
    """Makes batches of randomly changed training images.

    An image is mirrored, with its boxes, before the processor sees it. For the other changes, by kornia, it becomes
    what the processor makes of it without normalisation, `[C, H, W]` in [0, 1]; then it is cropped, rotated and changed
    by RandAugment; then it is normalised, and a rectangle is erased. The random numbers of an image follow from seed,
    epoch and its index, so they do not depend on batches, processes, workers or resuming.

    Args:
        settings: at least one change; of images with boxes `flip` alone.
        processor: with `image_mean` and `image_std`.
        seed: of the run.

    Raises:
        FulldepthError: if kornia is needed and not installed, or the processor does not state its normalisation.
    """

    def __init__(self, settings: AugmentationSettings, processor: Any, seed: int) -> None:
        self.settings, self.processor, self.seed = settings, processor, seed
        self._changes_pixels = settings.changes != ["flip"]
        if self._changes_pixels:
            normalises = getattr(processor, "do_normalize", False)
            if normalises and None in (processor.image_mean, processor.image_std):
                raise FulldepthError(
                    f"A {type(processor).__name__} does not say how it normalises; augmentation needs that."
                )
            _kornia()

    def __call__(self, items: Sequence[Item]) -> Batch:
        """The changed images, with their labels or boxes."""
        pictures = []
        for item in items:
            mirrors = self.settings.flip and _seed(self.seed, item.epoch, item.index, "flip") % 2
            pictures.append(item.example.mirrored() if mirrors else item.example)
        if not self._changes_pixels:
            return collate_images(pictures, range(len(pictures)), self.processor)
        batch = collate_images(pictures, range(len(pictures)), _Unnormalised(self.processor))
        pixels = batch.inputs["pixel_values"]  # [B, C, H, W]
        height, width = pixels.shape[-2:]
        before, after = self._pixel_changes((height, width))
        rows = []
        with torch.random.fork_rng(devices=[]):
            for image, item in zip(pixels.split(1), items, strict=True):
                torch.manual_seed(_seed(self.seed, item.epoch, item.index))
                for change in before:
                    image = change(image)
                if self.processor.do_normalize:
                    mean, deviation = (
                        torch.tensor(values).view(-1, 1, 1)
                        for values in (self.processor.image_mean, self.processor.image_std)
                    )
                    image = (image - mean) / deviation
                for change in after:
                    image = change(image)
                rows.append(image)
        batch.inputs["pixel_values"] = torch.cat(rows)
        return batch

    @cache  # noqa: B019 (as long-lived as the run)
    def _pixel_changes(self, edges: tuple[int, int]) -> tuple[list[Any], list[Any]]:
        """The changes before and after normalisation, of images of one size."""
        kornia, settings, before = _kornia(), self.settings, []
        if settings.crop:
            before.append(kornia.RandomCrop(edges, padding=settings.crop))
        if settings.rotation:
            before.append(kornia.RandomRotation(settings.rotation))
        if settings.randaugment:
            before.append(kornia.auto.RandAugment(n=settings.randaugment, m=settings.magnitude))
        return before, [kornia.RandomErasing(p=settings.erasing)] if settings.erasing else []


class _Unnormalised:
    """A processor without its normalisation."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, **options: Any) -> Any:
        return self.processor(do_normalize=False, **options)


def _seed(*parts: int | str) -> int:
    """63 bits that follow from the parts alone."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def _kornia() -> Any:
    try:
        import kornia.augmentation  # noqa: PLC0415
        import kornia.augmentation.auto  # noqa: PLC0415
    except ImportError as error:
        raise FulldepthError("Augmentation other than flip needs kornia: pip install 'fulldepth[vision]'.") from error
    return kornia.augmentation
