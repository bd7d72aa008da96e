"""Random changes of training images; each depends on the seed, the epoch and the image alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fulldepth.data.labelled import Item
from fulldepth.data.sequences import Batch, Picture, collate_images
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
        self._before: list[Callable[[Tensor], Tensor]] | None = None
        self._after: list[Callable[[Tensor], Tensor]] = []
        if not self._changes_pixels:
            return
        if getattr(processor, "do_normalize", False) and None in (processor.image_mean, processor.image_std):
            raise FulldepthError(
                f"A {type(processor).__name__} does not say how it normalises; augmentation needs that."
            )
        _kornia()

    def __call__(self, items: Sequence[Item]) -> Batch:
        """The changed images, with their labels or boxes."""
        pictures = [self._perhaps_mirrored(item) for item in items]
        processor = _Unnormalised(self.processor) if self._changes_pixels else self.processor
        batch = collate_images(pictures, range(len(pictures)), processor)
        if self._changes_pixels:
            batch.inputs["pixel_values"] = self._changed(batch.inputs["pixel_values"], items)
        return batch

    def _perhaps_mirrored(self, item: Item) -> Picture:
        picture: Picture = item.example
        drawn = _seed(self.seed, item.epoch, item.index, "flip") % 2
        return picture.mirrored() if self.settings.flip and drawn else picture

    def _changed(self, plain: Tensor, items: Sequence[Item]) -> Tensor:
        """`[B, C, H, W]` float32 pixel values, from those without normalisation."""
        if self._before is None:
            self._before, self._after = _changes(self.settings, plain.shape[-2:])
        rows = []
        with torch.random.fork_rng(devices=[]):
            for pixels, item in zip(plain.split(1), items, strict=True):
                torch.manual_seed(_seed(self.seed, item.epoch, item.index))
                for change in self._before:
                    pixels = change(pixels)
                pixels = self._normalise(pixels)
                for change in self._after:
                    pixels = change(pixels)
                rows.append(pixels)
        return torch.cat(rows)

    def _normalise(self, pixels: Tensor) -> Tensor:
        if not self.processor.do_normalize:
            return pixels
        mean, deviation = self.processor.image_mean, self.processor.image_std
        return (pixels - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(deviation).view(-1, 1, 1)


class _Unnormalised:
    """A processor without its normalisation."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, **options: Any) -> Any:
        return self.processor(do_normalize=False, **options)


def _changes(settings: AugmentationSettings, size: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """The changes before and after normalisation."""
    kornia = _kornia()
    edges = (int(size[0]), int(size[1]))
    before: list[Any] = []
    if settings.crop:
        before.append(kornia.RandomCrop(edges, padding=settings.crop))
    if settings.rotation:
        before.append(kornia.RandomRotation(settings.rotation))
    if settings.randaugment:
        before.append(kornia.auto.RandAugment(n=settings.randaugment, m=settings.magnitude))
    return before, [kornia.RandomErasing(p=settings.erasing)] if settings.erasing else []


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
