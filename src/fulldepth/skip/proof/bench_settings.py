"""What can be set for `fulldepth skip bench`; defaults < recipe < command line."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from fulldepth.skip.settings import ReadingSettings

MOST_ROUNDS = 100_000
Rounds = Annotated[NonNegativeInt, Field(le=MOST_ROUNDS)]
Length = Annotated[PositiveInt, Field(le=10_000_000)]
Count = Annotated[PositiveInt, Field(le=10**9)]


class BenchSettings(ReadingSettings):
    """Everything that decides what is timed, and how data are read for the losses."""

    batches: list[Length] = Field(default=[1, 4], min_length=1, max_length=1000)
    """Sequences run at once."""
    contexts: list[Length] = Field(default=[128, 512], min_length=1, max_length=1000)
    """Tokens of the prompt; every one is timed with every batch size."""
    new_tokens: Length = 16
    """Tokens decoded after the prompt, one at a time, while the cache grows."""
    repeats: Annotated[PositiveInt, Field(le=MOST_ROUNDS)] = 5
    """Rounds; every model is timed once in each."""
    warmup: Rounds = 1
    """Runs of every model before the first round, not counted."""
    tasks: list[str] | None = None
    """Tasks of lm-eval, by name or as YAML files, that every model is scored on; needs the extra `evaluate`."""
    task_limit: Count | None = None
    """The first so many examples of each task only."""
    device: str | None = None
    """Device; None = the first accelerator, else the CPU."""
    dtype: str = "auto"
    """Precision to load the models in; auto = each checkpoint's own."""
