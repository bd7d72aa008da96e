"""Packs the lens grid for the page: each distinct token and picture once, probabilities in thousandths."""

from __future__ import annotations

from collections.abc import Mapping
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
TEXTS = {
    TOKENS: {
        "title": "Lens grid",
        "intro": """What the model would say after every layer: columns are positions of the text, rows are layers, the
        deepest at the top.""",
        "column": "position",
        "target": "the true token",
    },
    SAMPLES: {
        "title": "Samples by layer",
        "intro": """The class that the model would predict after every layer: each row is a sample, columns are layers.
        The easiest samples are those whose prediction settles at the lowest layers, the hardest those that change
        until the end.""",
        "column": "layer",
        "target": "the true class",
    },
}
"""Texts around a lens grid."""


class Vocabulary:
    """Distinct tokens in order of first use, with invisible characters marked and long ones shortened; and pictures."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.pictures: dict[str, int] = {}
        """Picture -> index, as far as `PICTURES_LIMIT` allows."""

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
        text = str(picture)
        if not is_picture(picture) or (
            text not in self.pictures and len(text) + sum(map(len, self.pictures)) > PICTURES_LIMIT
        ):
            return None
        return self.pictures.setdefault(text, len(self.pictures))


def pack(grid: Mapping[str, Any] | None, vocabulary: Vocabulary) -> dict[str, Any]:
    """A lens grid for the page: what it is `of`, and its `samples`; none if there is no grid.

    Each sample has `title`, `tokens` and `targets` (indices), `saturation` (layers; null if unknown), and
    by layer 0..L the rows `top` (indices) and `probability` (thousandths; null where unknown). Samples of a classifier
    have `group` and `picture` (index).
    """
    samples = (grid or {}).get("samples") or []
    classes = (grid or {}).get("of") == SAMPLES and all(len(sample["tokens"]) == 1 for sample in samples)
    add = vocabulary.add_prose if classes else vocabulary.add
    packed: list[dict[str, Any]] = [
        {
            "title": short(sample.get("title") or f"Sample {number}", 80),
            "tokens": [add(token) for token in sample["tokens"]],
            "targets": [add(token) for token in sample["targets"]],
            "saturation": list(sample["saturation"]),
            "top": [[add(token) for token, _ in row] for row in sample["grid"]],
            "probability": [
                [None if value is None else round(1000 * min(max(value, 0.0), 1.0)) for _, value in row]
                for row in sample["grid"]
            ],
        }
        for number, sample in enumerate(samples, start=1)
    ]
    if classes:
        for sample, own in zip(samples, packed, strict=True):
            own |= {"group": short(sample.get("group") or "", 80)}
            own |= {"picture": vocabulary.add_picture(sample.get("picture"))}
    return {"of": SAMPLES if classes else TOKENS, "samples": packed}
