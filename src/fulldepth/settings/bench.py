"""Settings of `fulldepth skip bench`; defaults < recipe < command line."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import LOADING, Length
from fulldepth.settings.search import HeldoutSettings

MOST_ROUNDS = 100_000
TIMED = ("batches", "contexts", "max_new_tokens", "repeats")
DATA = ("max_sequences", "sequence_length", "batch_size")


class BenchSettings(HeldoutSettings):
    """Settings of the timings, and of the data on which losses are computed."""

    options: ClassVar = {"What is timed": (*TIMED, "seed"), "Data": DATA, "Loading the model": LOADING}
    applies: ClassVar = (Applies((*DATA, "tokenizer"), {"data": SET, "heldout": SET}),)

    batches: list[Length] = Field(default=[1, 4], min_length=1, max_length=1000)
    """Comma-separated numbers of sequences run at once."""
    contexts: list[Length] = Field(default=[128, 512], min_length=1, max_length=1000)
    """Comma-separated lengths of the prompt in tokens, each timed with every batch size; the default lengths are
    shortened to the model's positions."""
    max_new_tokens: Length = 16
    """Tokens decoded after the prompt, one at a time, while the cache grows."""
    repeats: Annotated[PositiveInt, Field(le=MOST_ROUNDS)] = 9
    """Rounds; every model is timed once in each. Ratios of times have an interval from 9 rounds on."""
    warmup: Annotated[NonNegativeInt, Field(le=MOST_ROUNDS)] = 1
    """Runs of every model before the first round, not counted."""
