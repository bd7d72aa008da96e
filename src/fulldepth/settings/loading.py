"""Settings shared by several commands: loading a model, and bounds of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fulldepth.settings.layers import Settings

Count = Annotated[int, Field(ge=1, le=10**9)]
Length = Annotated[int, Field(ge=1, le=10_000_000)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Rate = Annotated[float, Field(gt=0, le=1e3)]
"""Upper bounds far above any real use: larger values are typing errors that would exhaust memory or time."""


class LoadingSettings(Settings):
    """How a checkpoint and its tokenizer are loaded."""

    dtype: str = "auto"
    """Precision to load a model in: float32, bfloat16, float16; auto: the checkpoint's own."""
    device: str | None = None
    """cpu, cuda, cuda:1; None = the first accelerator, else the CPU."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    tokenizer: str | None = None
    """Folder or Hub name of the tokenizer; None = the checkpoint's."""
    trust_remote_code: bool = False
    """Run modelling code from the checkpoint."""
