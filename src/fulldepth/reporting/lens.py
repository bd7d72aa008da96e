"""Packs the lens grid for the page: each distinct token once, probabilities in thousandths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulldepth.reporting.phrases import short, visible

TOKEN_LIMIT = 40
"""Maximum number of characters of a token."""


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
    exits: bool = False
    """Whether the key explains outlined exits."""


OF_GENERATION = LensTexts(
    "Lens grid of the generation",
    "What the model would say after every layer at each decoding step: columns are steps, rows are layers, the deepest "
    "at the top. The head of a column is the token that the step reads.",
    "step",
    "the generated token",
    exits=True,
)


class Vocabulary:
    """Distinct tokens in order of first use, with invisible characters marked and long tokens shortened."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def add(self, token: object) -> int:
        """Index of a token."""
        raw = "" if token is None else str(token)
        shown = visible(raw if len(raw) <= TOKEN_LIMIT else raw[: TOKEN_LIMIT - 1] + "…")
        return self.index.setdefault(shown, len(self.index))


def pack(grid: Mapping[str, Any] | None, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The samples of one lens grid; empty if there is none.

    Each has `title`, `tokens` and `targets` (indices), `saturation` and `exits` (layers; null if unknown), and by layer
    0..L the rows `top` (indices) and `probability` (thousandths; null where unknown).
    """
    return [
        {
            "title": short(sample.get("title") or f"Sample {number}", 80),
            "tokens": [vocabulary.add(token) for token in sample["tokens"]],
            "targets": [vocabulary.add(token) for token in sample["targets"]],
            "saturation": list(sample["saturation"]),
            "exits": sample.get("exits"),
            "top": [[vocabulary.add(token) for token, _ in row] for row in sample["grid"]],
            "probability": [[_thousandths(value) for _, value in row] for row in sample["grid"]],
        }
        for number, sample in enumerate((grid or {}).get("samples") or [], start=1)
    ]


def _thousandths(value: float | None) -> int | None:
    return None if value is None else round(1000 * min(max(value, 0.0), 1.0))
