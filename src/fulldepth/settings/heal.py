"""Settings of `fulldepth skip heal`."""

from __future__ import annotations

from typing import ClassVar

from fulldepth.settings.search import HeldoutSettings


class HealSettings(HeldoutSettings):
    """How a plan's model is healed, and on which data; how these are read is by default as in the search."""

    options: ClassVar = {
        "Data": ("max_sequences", "sequence_length", "batch_size", "seed"),
        "Loading the model": ("dtype", "device", "tokenizer", "revision", "trust_remote_code"),
        "Writing": ("format",),
    }

    format: str | None = None
    """folded, fast, decilm or layer; None = the one without the removed parts, if there is one for the family."""
