"""Settings of `fulldepth skip bench` and `skip quantise`; defaults < recipe < command line."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from fulldepth.settings.layers import Settings
from fulldepth.settings.loading import Length
from fulldepth.settings.search import HeldoutSettings, SearchSettings

MOST_ROUNDS = 100_000
TIMED = ("batches", "contexts", "max_new_tokens", "repeats")
DATA = ("max_sequences", "sequence_length", "batch_size")
LOADING = ("dtype", "device", "tokenizer", "revision", "trust_remote_code")


class TimingSettings(Settings):
    """What is timed."""

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


class BenchSettings(TimingSettings, HeldoutSettings):
    """Settings of the timings, and of the data on which losses are computed."""

    options: ClassVar = {"What is timed": (*TIMED, "seed"), "Data": DATA, "Loading the model": LOADING}


class QuantiseSettings(TimingSettings, SearchSettings):
    """Settings of the timings, and those of the second search that replace the plan's."""

    options: ClassVar = {"What is timed": TIMED, "Loading the model": ("trust_remote_code",)}

    batches: list[Length] = Field(default=[1], min_length=1, max_length=1000)
    """Comma-separated numbers of sequences run at once."""
    contexts: list[Length] = Field(default=[128], min_length=1, max_length=1000)
    """Comma-separated lengths of the prompt in tokens, each timed with every batch size."""
