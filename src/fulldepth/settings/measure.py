"""Settings of `fulldepth measure`; defaults < recipe < command line."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from fulldepth.settings.loading import Count, Length, LoadingSettings, Seed

TokenPolicy = Literal["auto", "all", "no-first", "last", "cls", "eos"]


class MeasureSettings(LoadingSettings):
    """Everything that determines the results of a measurement; saved with them."""

    options: ClassVar = {
        "What to measure": ("measures", "tokens", "words", "reference"),
        "Samples": (
            *("max_sequences", "sequence_length", "batch_size", "lens_tokens", "reservoir_tokens"),
            *("entropy_sequences", "seed", "split", "truncate"),
        ),
        "Loading the model": (
            *("dtype", "device", "device_map", "tokenizer", "revision", "tower", "trust_remote_code"),
        ),
    }

    measures: list[str] | None = None
    """Comma-separated names from displacement, jump_rate, coherence, cosine, cka, norm_ratio, lens_accuracy,
    lens_loss, saturation, effective_depth, nc1, renyi_entropy, separability, spectral_norm, mmd, retrieval_weight,
    expected_retrieval, stream_mixing; None = all that model and data allow."""
    max_sequences: Count = 256
    """Sequences to read."""
    sequence_length: Length | None = None
    """Tokens in a sequence; None = 256, or the model's positions if fewer."""
    batch_size: Count = 8
    """Sequences in one forward pass; does not affect results."""
    tokens: TokenPolicy = "auto"
    """Which tokens count: all, no-first, last, cls (the first), eos; never padding. auto: all for language models
    and vision without a class token; cls, last or eos for classifiers and CLIP."""
    words: list[str] = Field(default_factory=list)
    """Comma-separated look-alike words whose linear separability is measured: is,are,was,were."""
    lens_tokens: Count | None = None
    """Positions in the seeded sample that the lens is applied to; None = all that have a target."""
    reservoir_tokens: Count = 2048
    """Tokens kept for measures that are not sums (centred cosine, CKA, NC1, MMD); exact while the data fit."""
    entropy_sequences: Count = 64
    """Sequences used for the matrix entropies."""
    grid_samples: int = Field(default=3, ge=0, le=1000)
    """Sequences shown in the lens grid."""
    seed: Seed = 0
    """Seed of all random samples."""
    split: str | None = None
    """Split of a Hub data set or an image folder."""
    truncate: bool = False
    """Cut prompt-response pairs that are longer than the sequence length instead of refusing them."""
    tower: Literal["text", "vision"] | None = None
    """text or vision, for models with two towers."""
    device_map: str | dict[str, Any] | None = None
    """auto: spread a large model over devices, CPU and disk."""
    reference: str | None = None
    """Model that MMD compares with, layer by layer."""
    anatomy: dict[str, Any] | None = None
    """Names of the model's parts (fields of `fulldepth.hf.Family`), for a family neither listed nor detected."""
