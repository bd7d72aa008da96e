"""Packs the lens grid for the page: each distinct token and picture once, probabilities in thousandths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulldepth.reporting.phrases import short, visible
from fulldepth.results import is_picture

TOKEN_LIMIT = 40
"""Maximum number of characters of a token."""
PROSE_LIMIT = 160
"""Maximum number of characters of a text, a class or a file name."""
PICTURES_LIMIT = 2_000_000
"""Maximum number of characters of all pictures of a page; those beyond it are left out."""
TOKENS, SAMPLES = "tokens", "samples"
"""What a lens grid is of."""


@dataclass(frozen=True)
class LensTexts:
    """Texts around the lens grid."""

    title: str = "Lens grid"
    intro: str = (
        "What the model would say after every layer: columns are positions of the text, rows are layers, the deepest "
        "at the top."
    )
    column: str = "position"
    target: str = "the true token"


OF_SAMPLES = LensTexts(
    "Samples by layer",
    "The class that the model would predict after every layer: each row is a sample, columns are layers. The easiest "
    "samples are those whose prediction settles at the lowest layers, the hardest those that change until the end.",
    "layer",
    "the true class",
)


class Vocabulary:
    """Distinct tokens in order of first use, with invisible characters marked and long ones shortened; and pictures."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.pictures: dict[str, int] = {}
        """Picture -> index, as far as `PICTURES_LIMIT` allows."""
        self._room = PICTURES_LIMIT

    def add(self, token: object) -> int:
        """Index of a token."""
        raw = "" if token is None else str(token)
        shown = visible(raw if len(raw) <= TOKEN_LIMIT else raw[: TOKEN_LIMIT - 1] + "…")
        return self.index.setdefault(shown, len(self.index))

    def add_prose(self, text: object) -> int:
        """Index of a text, a class or a file name, whose spaces stay spaces."""
        return self.index.setdefault("" if text is None else short(text, PROSE_LIMIT), len(self.index))

    def add_picture(self, picture: object) -> int | None:
        """Index of a thumbnail; None for anything else, and if the page has no room for it."""
        if not is_picture(picture):
            return None
        text = str(picture)
        if text not in self.pictures:
            if len(text) > self._room:
                return None
            self._room -= len(text)
        return self.pictures.setdefault(text, len(self.pictures))


def kind_of(grid: Mapping[str, Any] | None) -> str:
    """What a lens grid is of: `TOKENS` or `SAMPLES`."""
    stated, samples = (grid or {}).get("of"), (grid or {}).get("samples") or []
    return SAMPLES if stated == SAMPLES and all(len(sample["tokens"]) == 1 for sample in samples) else TOKENS


def pack(grid: Mapping[str, Any] | None, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The samples of one lens grid; empty if there is none.

    Each has `title`, `tokens` and `targets` (indices), `saturation` (layers; null if unknown), and by layer 0..L the
    rows `top` (indices) and `probability` (thousandths; null where unknown). Samples of a classifier have `group` and
    `picture` (index).
    """
    add = vocabulary.add if kind_of(grid) == TOKENS else vocabulary.add_prose
    return [
        {
            "title": short(sample.get("title") or f"Sample {number}", 80),
            "tokens": [add(token) for token in sample["tokens"]],
            "targets": [add(token) for token in sample["targets"]],
            "saturation": list(sample["saturation"]),
            "top": [[add(token) for token, _ in row] for row in sample["grid"]],
            "probability": [[_thousandths(value) for _, value in row] for row in sample["grid"]],
            **(_pictured(sample, vocabulary) if kind_of(grid) != TOKENS else {}),
        }
        for number, sample in enumerate((grid or {}).get("samples") or [], start=1)
    ]


def _pictured(sample: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """What samples have besides predictions."""
    return {
        "group": short(sample.get("group") or "", 80),
        "picture": vocabulary.add_picture(sample.get("picture")),
    }


def _thousandths(value: float | None) -> int | None:
    return None if value is None else round(1000 * min(max(value, 0.0), 1.0))
