"""Settings shared by several commands: loading a model, and bounds of numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fulldepth.settings.layers import Settings

Count = Annotated[int, Field(ge=1, le=10**9)]
Length = Annotated[int, Field(ge=1, le=10_000_000)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Rate = Annotated[float, Field(gt=0, le=1e3)]
"""Upper bounds far above any real use: larger values are typing errors that would exhaust memory or time."""
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]
"""A part of a whole, neither nothing nor all."""

Precision = Literal["float32", "autocast", "bfloat16"]
"""Of a training."""
LOADING = ("dtype", "device", "tokenizer", "revision", "trust_remote_code")
"""Settings of `LoadingSettings` that have an option."""
SPREADING = ("dtype", "device", "device_map", "tokenizer", "revision", "trust_remote_code")
"""The same, of commands that can spread a model over devices."""


class LoadingSettings(Settings):
    """How a checkpoint and its tokenizer are loaded."""

    dtype: str = "auto"
    """Precision to load a model in: float32, bfloat16, float16; auto: the checkpoint's own."""
    device: str | None = None
    """cpu, cuda, cuda:1; None = cuda if there is one, else the CPU."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    tokenizer: str | None = None
    """Folder or Hub name of the tokenizer; None = the checkpoint's."""
    trust_remote_code: bool = False
    """Run modelling code from the checkpoint."""


class ReadingSettings(LoadingSettings):
    """How a checkpoint is loaded, and which data are read and prepared for it."""

    max_sequences: Count = 256
    """Sequences to read: a uniform, seeded sample of windows, rows or images."""
    order: Literal["random", "first"] = "random"
    """first: the first windows or rows instead of a sample; windows then cross the ends of documents."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether every window of plain text for a causal model begins with the BOS token; auto: if the tokenizer puts it
    before a text."""
    one_per_row: bool = False
    """One sequence for each row of plain text, cut at the sequence length, instead of windows."""
    score: Literal["responses", "all"] = "responses"
    """Tokens that are predicted in prompts with responses and in chats: those of the responses, or all."""
    chat: bool = True
    """Put prompts with responses into the tokenizer's chat template, if it has one; otherwise they are plain text.
    Chats always have the template."""
    sequence_length: Length | None = None
    """Tokens in a sequence; None = 256, or the model's positions if fewer, and whole texts for a classifier."""
    seed: Seed = 0
    """Seed of all random samples."""
    split: str | None = None
    """Split of a Hub data set or an image folder."""
    skip_bad: bool = False
    """Leave bad data out and count them instead of refusing them: damaged images, bad entries of a COCO file, and for a
    classifier labels outside its classes, empty texts and texts longer than its positions."""
    truncate: bool = False
    """Cut prompt-response pairs that are longer than the sequence length, and labelled texts for a classifier that are
    longer than the model's positions, instead of refusing them."""


class LayerReadingSettings(ReadingSettings):
    """How the predictions of every layer are read."""

    max_sequences: Count = 512
    """Sequences to read: a uniform, seeded sample of windows, rows or images."""
    batch_size: Count | None = None
    """Sequences in a batch; None = 64 for classifiers, which are timed with it, and 8 for language models."""
    lens_tokens: Count | None = 4096
    """Positions in the seeded sample that a language model's lens is applied to; None = all that have a target."""
    seed: Seed = 0
    """Seed of all random samples and of the split."""
