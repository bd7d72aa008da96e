"""Settings of `fulldepth exit`; defaults < recipe < command line."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from fulldepth.errors import FulldepthError, one_line
from fulldepth.settings.loading import Count, Length, ReadingSettings, Seed

Rule = Literal["confidence", "margin", "entropy", "patience"]
Threshold = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
EXPORTS = ("export_layers", "memory_budget", "effective_depth")
"""Settings that choose the number of layers of a shorter checkpoint; at most one of them."""
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class ExitSettings(ReadingSettings):
    """Everything that determines the results of a sweep; saved with them."""

    options: ClassVar = {
        "When to leave": ("rule", "thresholds", "min_layer", "target_accuracy_drop", "calibration_share"),
        "Data": (
            *("max_sequences", "sequence_length", "batch_size", "rounds", "lens_tokens", "seed", "split", "truncate"),
            *("skip_bad", "order", "bos", "one_per_row", "balanced"),
        ),
        "Generation of language models": ("policy", "prompts", "new_tokens"),
        "A checkpoint with fewer layers": EXPORTS,
        "Loading the model": ("dtype", "device", "tokenizer", "revision", "trust_remote_code"),
    }

    rule: list[Rule] = Field(default=["confidence"], min_length=1)
    """Comma-separated rules; what has to exceed the threshold: confidence (the largest probability), margin (its
    distance to the second), entropy (1 minus the normalised entropy), patience (layers in a row that predict the same,
    divided by all layers)."""
    thresholds: list[Threshold] = Field(default=[0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0], min_length=1, max_length=1000)
    """Comma-separated thresholds above 0 and at most 1; 1 is the full model."""
    min_layer: Count = 1
    """First layer after which a sample may leave; no classifier is applied before it."""
    target_accuracy_drop: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Also choose a threshold for every rule: the lowest whose accuracy, and that of all higher ones, falls by at most
    this much on one part of the data; it is reported on the other part."""
    calibration_share: Share = 0.5
    """Share of the sequences on which that threshold is chosen."""
    max_sequences: Count = 512
    """Sequences to read: a uniform sample of windows, rows or images, by seeded hashes."""
    batch_size: Count | None = None
    """Sequences in a batch; None = 64 for classifiers, which are timed with it, and 8 for language models."""
    rounds: int = Field(default=9, ge=0, le=10_000)
    """Timed passes over the data (of classifiers) or generations (of language models) of the full model and of every
    threshold, in alternation; 0 = nothing is timed, and fewer than 9 give no verdict."""
    lens_tokens: Count | None = 4096
    """Positions in the seeded sample that a language model's lens is applied to; None = all that have a target."""
    seed: Seed = 0
    """Seed of all random samples and of the split."""
    policy: list[Literal["recompute", "propagate"]] = Field(default=["recompute", "propagate"], min_length=1)
    """Comma-separated policies for the layers that a token did not visit: recompute (exact), propagate (its state at
    the exit is passed on)."""
    prompts: int = Field(default=4, ge=0, le=10_000)
    """Sequences whose beginnings are continued, beside the sweep; 0 = nothing is generated."""
    new_tokens: Length = 24
    """Tokens of each continuation."""
    export_layers: Count | None = None
    """Write a checkpoint of the same class with this many first layers, the final norm and the head."""
    memory_budget: str | None = None
    """Write the checkpoint with the most layers whose weights fit into this size, such as 500MB."""
    effective_depth: Share | None = None
    """Write the checkpoint with the fewest layers whose accuracy on the data is at least (1 - this) of the full
    model's, such as 0.05."""

    @field_validator("memory_budget")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None:
            file_size(value)
        return value

    @model_validator(mode="after")
    def _one_export(self) -> ExitSettings:
        given = [name for name in EXPORTS if getattr(self, name) is not None]
        if len(given) > 1:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise FulldepthError(f"{options} each choose the number of layers. Leave all but one of them out.")
        return self

    @property
    def exports(self) -> bool:
        """Whether a checkpoint is written instead of results."""
        return any(getattr(self, name) is not None for name in EXPORTS)


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
