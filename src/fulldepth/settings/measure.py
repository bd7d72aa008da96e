"""Settings of `fulldepth measure`; defaults < recipe < command line."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fulldepth.core.errors import FulldepthError
from fulldepth.settings.loading import LOADING, SPREADING, Count, Length, LoadingSettings, ReadingSettings

TokenPolicy = Literal["auto", "all", "no-first", "last", "cls", "eos", "patches", "mean", "mean-patches"]

SAMPLES = ("lens_tokens", "entropy_sequences", "reservoir_tokens")
"""Settings that limit a sample; None = no limit."""
SPEED_ONLY = {"batch_size", "device", "device_map"}
"""Settings that do not affect the results."""


class MeasureSettings(ReadingSettings):
    """Everything that determines the results of a measurement; saved with them."""

    options: ClassVar = {
        "What to measure": ("measures", "token_policy", "words", "reference"),
        "Data": ("max_sequences", "sequence_length", "batch_size", "score", "exact", "seed", "split", "skip_bad"),
        "Loading the model": SPREADING,
    }

    measures: Annotated[list[str], Field(min_length=1)] | None = None
    """Comma-separated names from displacement, jump_rate, coherence, cosine, cka, norm_ratio, contribution,
    lens_accuracy, lens_loss, lens_f1, saturation, effective_depth, nc1, renyi_entropy, separability, spectral_norm,
    mmd, retrieval_weight, expected_retrieval, average_precision; None = all that model and data allow."""
    batch_size: Count = 8
    """Sequences in one forward pass; does not affect results."""
    token_policy: TokenPolicy = "auto"
    """Which tokens count: all, no-first, last, cls (the first), eos, patches, or one vector each: mean, mean-patches;
    never padding. auto: all for language models, what the head reads for classifiers and CLIP."""
    words: list[str] = Field(default_factory=list)
    """Comma-separated look-alike words whose linear separability is measured: is,are,was,were."""
    exact: bool = False
    """Sample nothing: the lens reads all positions, the entropies all sequences, and all tokens are kept for the
    measures that are not sums."""
    lens_tokens: Count | None = 1024
    """Positions in the seeded sample that the lens is applied to; None = all that have a target."""
    reservoir_tokens: Count | None = 2048
    """Tokens kept for measures that are not sums (centred cosine, CKA, NC1, MMD); exact while the data fit. None =
    all."""
    entropy_sequences: Count | None = 16
    """Sequences in the seeded sample used for the matrix entropies; None = all."""
    grid_samples: int = Field(default=3, ge=0, le=1000)
    """Sequences shown in the lens grid of a model that predicts tokens."""
    grid_top: int = Field(default=1, ge=1, le=100)
    """Most probable tokens kept in each cell of the lens grid."""
    grid_positions: int = Field(default=48, ge=1, le=4096)
    """First positions of a sequence that the lens grid shows."""
    tower: Literal["text", "vision", "encoder", "decoder"] | None = None
    """text or vision, encoder or decoder: measure this part of a model alone."""
    device_map: str | dict[str, Any] | None = None
    """auto: spread a large model over devices, CPU and disk."""
    reference: str | None = None
    """Model that MMD compares with, layer by layer."""
    anatomy: dict[str, Any] | None = None
    """Names of the model's parts (fields of `fulldepth.hf.Family`), for a family neither listed nor detected."""

    @model_validator(mode="before")
    @classmethod
    def _exact_means_no_samples(cls, values: Any) -> Any:
        """`exact` sets the size of every sample to None; a size given beside it is a contradiction."""
        if not (isinstance(values, dict) and values.get("exact") is True):
            return values
        if given := [name for name in SAMPLES if values.get(name) is not None]:
            options = " and ".join(map(cls.option, given))
            raise FulldepthError(f"--exact samples nothing, so it contradicts {options}. Leave one of them out.")
        return {**values, **dict.fromkeys(SAMPLES)}


class LensSettings(LoadingSettings):
    """Settings of `fulldepth lens`."""

    options: ClassVar = {
        "Lens": ("generate", "top_k", "sequence_length"),
        "Loading the model": LOADING,
    }

    generate: int = Field(default=0, ge=0, le=4096)
    """Tokens by which the model continues a text, each the most probable one; the grid then shows the steps that
    predicted them. 0 = the grid shows the text."""
    top_k: int = Field(default=5, ge=1, le=100)
    """Most probable tokens of every layer and position."""
    sequence_length: Length | None = None
    """Tokens after which a text is cut; None = 256, or the model's positions if fewer."""
