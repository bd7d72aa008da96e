"""What can be set for `fulldepth measure`; defaults < recipe < command line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from fulldepth.recipes import Settings

MOST = 10**9
"""Largest count that can be asked for."""
MOST_TOKENS = 10**7
"""Longest sequence."""
MOST_SEED = 2**32 - 1
"""Largest seed that scikit-learn takes."""
Count = Annotated[PositiveInt, Field(le=MOST)]

TokenPolicy = Literal["auto", "all", "no-first", "last", "cls", "eos"]


class MeasureSettings(Settings):
    """Everything that decides which numbers a run gives; saved with them."""

    measures: list[str] | None = None
    """Names of measures; None = every measure that the model and the data allow."""
    max_sequences: Count = 256
    """Sequences to read."""
    sequence_length: Annotated[PositiveInt, Field(le=MOST_TOKENS)] | None = None
    """Tokens in a sequence; None = 256, or the model's positions if these are fewer."""
    batch_size: Count = 8
    """Sequences in one forward pass; changes speed and memory, no number."""
    tokens: TokenPolicy = "auto"
    """Which tokens count: all, no-first, last, cls (the first), eos. `auto`: all for language models, cls for encoders
    that classify and for vision with a class token (all without one), last for decoders that classify, eos for CLIP's
    text tower."""
    words: list[str] = Field(default_factory=list)
    """Look-alike words whose linear separability is measured, for example is, are, was, were."""
    lens_tokens: Count | None = None
    """Read only this many positions (a seeded sample) with the lens; None = every position that has a target."""
    reservoir_tokens: Count = 2048
    """Tokens kept for what is no sum (centred cosine, CKA, NC1, MMD); exact while the data fit."""
    entropy_sequences: Count = 64
    """Sequences that enter the matrix entropies."""
    grid_samples: int = Field(default=3, ge=0, le=1000)
    """Sequences shown in the lens grid."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of every sample that is drawn."""
    split: str | None = None
    """Split of a Hub data set or an image folder."""
    truncate: bool = False
    """Cut prompt-response pairs that are longer than the sequence length, rather than refuse them."""
    tower: Literal["text", "vision"] | None = None
    """Which tower of a two-tower model."""
    dtype: str = "auto"
    """Precision to load the model in; auto = the checkpoint's own."""
    device: str | None = None
    """Device; None = the first accelerator, else the CPU."""
    device_map: str | dict[str, Any] | None = None
    """`auto` spreads a model over devices, CPU and disk."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    tokenizer: str | None = None
    """Folder or Hub name of the tokenizer, where the model's folder has none."""
    reference: str | None = None
    """Model that MMD compares with."""
    trust_remote_code: bool = False
    """Run modelling code that the checkpoint carries."""
    anatomy: dict[str, Any] | None = None
    """Names of the model's parts (fields of `fulldepth.hf.Family`), for a family that is neither listed nor found."""
