"""Lens grid of a classifier: the class that every layer predicts for some samples, with their pictures or texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fulldepth.data import balanced_sample, decode_ids, image_name, thumbnail
from fulldepth.distributed import Processes
from fulldepth.execution import TopTokens
from fulldepth.measurement.subject import Subject
from fulldepth.metrics import saturation_layer
from fulldepth.settings.measure import MeasureSettings
from fulldepth.subjects import IMAGES
from fulldepth.targets import IGNORE

SAMPLES = 10
"""Samples in the seeded choice, unless `grid_samples` gives another number."""
EXTREMES = 6
"""Most samples whose prediction settles first, and most of those whose prediction settles last."""
PICTURES = 64
"""Most pictures in a lens grid."""
LONGEST = 200
"""Most characters of a text."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predictions of all layers for one sample."""

    index: int
    """Of the sample in the data."""
    target: int
    """Its class."""
    saturation: int
    """The first of the layers 1..L from which the predicted class stays."""
    top: list[int]
    """[L+1] predicted classes."""
    probability: list[float]
    """[L+1] their probabilities."""

    @property
    def difficulty(self) -> tuple[int, float, int]:
        """Sorts samples from the easiest to the hardest: by saturation layer, then by the final probability."""
        return self.saturation, -self.probability[-1], self.index


class SampleGrid:
    """Collects a seeded choice of labelled samples, and the easiest and the hardest of all, batch by batch.

    The easiest samples settle at the lowest layers; among equals the one whose last prediction is surest comes first.
    What is held does not grow with the data.

    Args:
        subject: a classifier of sequences and its data.
        settings: size of the choice, seed, whether pictures are kept.
    """

    def __init__(self, subject: Subject, settings: MeasureSettings) -> None:
        self.subject, self.pictures = subject, settings.pictures
        labels = [example.class_index for example in subject.sequences.examples]
        known = [index for index, label in enumerate(labels) if label != IGNORE]
        count = SAMPLES if settings.grid_samples is None else settings.grid_samples
        sampled = balanced_sample([labels[index] for index in known], known, count, settings.seed)
        self.chosen = frozenset(known[place] for place in sampled)
        self.extremes = min(EXTREMES, len(known) // 2) if count else 0
        self.kept: list[Predicted] = []

    def add(self, sequence: Tensor, targets: Tensor, top: TopTokens) -> None:
        """Add the samples of a batch: their indices `[P]`, classes `[P]` and predictions."""
        columns = (
            sequence.tolist(),
            targets.tolist(),
            saturation_layer(top.token[1:]).tolist(),
            top.token.T.tolist(),
            top.probability.double().T.tolist(),
        )
        self.kept = self._select([*self.kept, *(Predicted(*row) for row in zip(*columns, strict=True))])

    def _select(self, samples: Sequence[Predicted]) -> list[Predicted]:
        """Those of the samples that are chosen, among the easiest or among the hardest; the easiest first."""
        ordered = sorted(samples, key=lambda sample: sample.difficulty)
        places = range(len(ordered))
        ends = {*places[: self.extremes], *places[len(places) - self.extremes :]}
        return [sample for place, sample in enumerate(ordered) if place in ends or sample.index in self.chosen]

    def grid(self, process: Processes) -> dict[str, Any] | None:
        """The lens grid of all processes' samples as plain data; None in all but the first one, and without samples."""
        everyone = process.gather(self.kept)
        kept = self._select([sample for part in everyone for sample in part])
        if not kept or not process.is_main:
            return None
        chosen = sorted((s for s in kept if s.index in self.chosen), key=lambda s: (s.target, s.index))
        first, last = kept[: self.extremes], kept[len(kept) - self.extremes :][::-1]
        kind = {"images": "images", "objects": "images"}.get(self.subject.sequences.kind, "texts")
        groups = {f"Some of the {kind}": chosen, "Easiest: settle first": first, "Hardest: settle last": last}
        wanted = list(dict.fromkeys(sample.index for group in groups.values() for sample in group))[:PICTURES]
        pictures = {index: picture_of(self.subject, index) for index in wanted} if self.pictures else {}
        return {
            "of": "samples",
            "samples": [
                self._entry(sample, group, pictures.get(sample.index))
                for group, samples in groups.items()
                for sample in samples
            ],
        }

    def _entry(self, sample: Predicted, group: str, picture: str | None) -> dict[str, Any]:
        title = title_of(self.subject, sample.index)
        names = [class_name(self.subject, index) for index in sample.top]
        return {
            "title": title,
            "group": group,
            "picture": picture,
            "tokens": [_shown(self.subject, sample.index, with_name=self.pictures) or title],
            "targets": [class_name(self.subject, sample.target)],
            "saturation": [sample.saturation],
            "grid": [[[name, round(p, 4)]] for name, p in zip(names, sample.probability, strict=True)],
        }


def class_name(subject: Subject, index: int) -> str:
    """Name of a class as the data or else the model call it; its number if neither does."""
    names = subject.sequences.class_names
    if index < len(names):
        return names[index]
    known = getattr(getattr(subject.checkpoint.model, "config", None), "id2label", None) or {}
    return str(known.get(index, index))


def title_of(subject: Subject, index: int) -> str:
    """Number of a sample, from 1 on."""
    kind = {"images": "Image", "objects": "Image", "arrays": "Sample"}.get(subject.sequences.kind, "Text")
    return f"{kind} {index + 1}"


def _shown(subject: Subject, index: int, *, with_name: bool) -> str:
    """File name of an image, or the beginning of a text; empty without either."""
    example = subject.sequences.examples[index]
    if subject.sequences.kind in IMAGES:
        return image_name(example.load) if with_name else ""
    if subject.tokenizer is None or not hasattr(example, "input_ids"):
        return ""
    text = decode_ids(subject.tokenizer, example.input_ids.tolist(), skip_special_tokens=True)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def picture_of(subject: Subject, index: int) -> str | None:
    """Thumbnail of a sample; None if it is no image."""
    if subject.sequences.kind not in IMAGES:
        return None
    return thumbnail(subject.sequences.examples[index].load())
