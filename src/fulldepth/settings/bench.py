"""Settings of `fulldepth skip bench`; defaults < recipe < command line."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from fulldepth.core.errors import FulldepthError
from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import LOADING, Length, Seed
from fulldepth.settings.search import HeldoutSettings, Rows

MOST_ROUNDS = 100_000
MOST_CLIENTS = 4096
TIMED = ("batches", "contexts", "max_new_tokens", "repeats")
LOADED = ("concurrency", "requests")
DATA = ("max_sequences", "sequence_length", "batch_size", "chat")


class BenchSettings(HeldoutSettings):
    """Settings of the timings, and of the data on which losses are computed.

    Where `sequence_length` and `chat` are not given, they are those of the search of the first export with a plan; with
    `data` but without `heldout`, also `max_sequences` and `seed`.
    """

    options: ClassVar = {
        "What is timed": (*TIMED, "seed"),
        "Under load": LOADED,
        "Data": DATA,
        "Loading the model": LOADING,
    }
    applies: ClassVar = (
        Applies((*DATA, "tokenizer"), {"data": SET, "heldout": SET}),
        Applies(("requests",), {"concurrency": SET}),
    )

    max_sequences: Rows | None = None
    """Rows (or windows of text) to read; None = with --data as in the search of the first export, else all."""
    sequence_length: Length | None = None
    """Tokens in a window of plain text; None = as in the search of the first export, else 256, or the model's positions
    if fewer."""
    chat: bool = True
    """Put prompts with responses into the tokenizer's chat template, if it has one; otherwise they are plain text.
    Chats always have the template. Unless it is given, as in the search of the first export."""
    seed: Seed = 0
    """Seed of the held-out fifth and of all other random choices. With --data, unless it is given, that of the search
    of the first export."""
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
    concurrency: Annotated[list[Annotated[int, Field(ge=1, le=MOST_CLIENTS)]], Field(max_length=1000)] | None = None
    """Comma-separated numbers of clients, such as 1,8,32. The models are then timed in servers that batch the clients'
    requests (continuous batching): .gguf files in llama.cpp's, checkpoint folders in vLLM if it is installed."""
    requests: Annotated[PositiveInt, Field(le=MOST_ROUNDS)] = 2
    """Requests that each client sends in a round, one after another."""

    @model_validator(mode="after")
    def _batches_without_load(self) -> BenchSettings:
        """A server decides itself which requests it runs together."""
        if self.concurrency and self.batches != type(self).model_fields["batches"].default:
            raise FulldepthError("--batches has no effect with --concurrency, which names the clients at once.")
        if self.concurrency and self.batch_size != type(self).model_fields["batch_size"].default:
            raise FulldepthError("--batch-size has no effect with --concurrency: no losses are computed.")
        return self
