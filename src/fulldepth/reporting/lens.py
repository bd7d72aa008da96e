"""Packs the lens grid for the page: each distinct token once, probabilities in thousandths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulldepth.reporting.phrases import short, visible

TOKEN_LIMIT = 40
"""Maximum number of characters of a token."""


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

    Each has `title`, `tokens`, `targets` (indices), `saturation` (layers), and by layer 0..L the rows `top` (indices)
    and `probability` (thousandths; null where unknown).
    """
    return [
        {
            "title": short(sample.get("title") or f"Sample {number}", 80),
            "tokens": [vocabulary.add(token) for token in sample["tokens"]],
            "targets": [vocabulary.add(token) for token in sample["targets"]],
            "saturation": list(sample["saturation"]),
            "top": [[vocabulary.add(token) for token, _ in row] for row in sample["grid"]],
            "probability": [[_thousandths(value) for _, value in row] for row in sample["grid"]],
        }
        for number, sample in enumerate((grid or {}).get("samples") or [], start=1)
    ]


def _thousandths(value: float | None) -> int | None:
    return None if value is None else round(1000 * min(max(value, 0.0), 1.0))
