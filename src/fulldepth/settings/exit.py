"""Settings of `fulldepth exit`; defaults < recipe < command line."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import LOADING, Count, LayerReadingSettings, Length, Share

Rule = Literal["confidence", "margin", "entropy", "patience"]
Threshold = Annotated[float, Field(gt=0, le=1)]
EXPORTS = ("layers", "effective_depth")
"""Settings that choose the number of layers of a shorter checkpoint; one of them."""
READING = ("max_sequences", "sequence_length", "batch_size", "seed", "split", "skip_bad")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class ExitSettings(LayerReadingSettings):
    """Everything that determines the results of a sweep; saved with them."""

    options: ClassVar = {
        "When to leave": ("rule", "threshold", "target_accuracy_drop", "repeats", "max_new_tokens"),
        "Data": READING,
        "Loading the model": LOADING,
    }
    applies: ClassVar = (
        Applies(("max_new_tokens",), {"prompts": SET}),
        Applies(("calibration_share",), {"target_accuracy_drop": SET}),
    )

    rule: list[Rule] = Field(default=["confidence"], min_length=1)
    """Comma-separated rules; what has to exceed the threshold: confidence (the largest probability), margin (its
    distance to the second), entropy (1 minus the normalised entropy), patience (layers in a row that predict the same,
    divided by all layers)."""
    threshold: list[Threshold] = Field(default=[0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0], min_length=1, max_length=1000)
    """Comma-separated thresholds above 0 and at most 1; 1 is the full model."""
    min_layer: Count = 1
    """First layer after which a sample may leave; no classifier is applied before it."""
    target_accuracy_drop: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Also choose a threshold for every rule: the lowest whose accuracy, and that of all higher ones, falls by at most
    this much on one part of the data; it is reported on the other part."""
    calibration_share: Share = 0.5
    """Share of the documents, rows or images on which that threshold is chosen; of a single document, share of its
    sequences."""
    repeats: int = Field(default=9, ge=0, le=10_000)
    """Timed passes over the data (of classifiers) or generations (of language models) of the full model and of every
    threshold, in alternation; 0 = nothing is timed, and fewer than 9 give no verdict."""
    prompts: int = Field(default=4, ge=0, le=10_000)
    """Sequences whose beginnings are continued, beside the sweep; 0 = nothing is generated."""
    max_new_tokens: Length = 24
    """Tokens of each continuation."""


class LayersSettings(LayerReadingSettings):
    """How many layers a shorter checkpoint gets, and how they are read; one of the first two."""

    options: ClassVar = {"How many layers": EXPORTS, "Data": READING, "Loading the model": LOADING}
    applies: ClassVar = (
        Applies(
            (*READING, "lens_tokens", "order", "bos", "one_per_row", "truncate", "score", "chat"),
            {"effective_depth": SET},
        ),
    )

    layers: Count | None = None
    """This many first layers."""
    effective_depth: Share | None = None
    """The fewest layers whose accuracy on the data is at least (1 - this) of the full model's, such as 0.05."""

    @model_validator(mode="after")
    def _one_choice(self) -> LayersSettings:
        given = [name for name in EXPORTS if getattr(self, name) is not None]
        if len(given) != 1:
            options = " or ".join(map(self.option, EXPORTS))
            stated = "both" if given else "neither"
            raise FulldepthError(f"How many layers to keep? Give {options}, got {stated}.")
        return self


def file_size(text: str) -> int:
    """Bytes of a size such as `500MB` or `1.5GiB`.

    Raises:
        FulldepthError: if it is not a positive number with a unit.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMG]I?B)", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size <= 0:
        raise FulldepthError(f"Expected a size such as 500MB or 1.5GiB, got {one_line(repr(text), 60)}.")
    return size
