"""Settings of `fulldepth generate`; defaults < command line."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from fulldepth.core.errors import FulldepthError
from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import LOADING, Length, LoadingSettings, Seed

AUTO = "auto"


class GenerateSettings(LoadingSettings):
    """Everything that determines a generation; saved with its results."""

    options: ClassVar = {
        "Text": ("chat", "max_new_tokens", "temperature", "top_p", "seed"),
        "Speculation": ("speculate_from",),
        "Early exit": ("threshold", "rule"),
        "Loading the model": LOADING,
    }
    applies: ClassVar = (
        Applies(("rule", "min_layer"), {"threshold": SET}),
        Applies(("draft_length",), {"speculate_from": SET}),
    )

    max_new_tokens: Length = 64
    """Largest number of new tokens for each prompt."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Sample with this temperature; 0 = greedy. None = greedy, or 1 with --top-p below 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Sample from this number of most probable tokens; 0 = all."""
    seed: Seed = 0
    """Seed of the sampling."""
    chat: bool | None = None
    """Put each prompt into the tokenizer's chat template, or continue it as it is; None =
    chat template if the tokenizer has one."""
    speculate_from: int | str | None = None
    """Draft tokens with the first E layers and confirm them with the others: E, or auto (a third of the layers; plain
    decoding where a short trial is not faster), of one prompt. None = no speculation."""
    draft_length: int | str = AUTO
    """Largest number of drafts in a round: K, or auto (4; plain decoding where a short trial is not faster)."""
    threshold: float | None = None
    """In (0, 1]: a token leaves at the first layer at which --rule exceeds it; 1 = the full model."""
    rule: Literal["confidence", "margin", "entropy", "patience"] = "confidence"
    """When a token leaves: confidence (largest probability), margin (largest minus second), entropy (1 minus relative
    entropy) or patience (layers with the same prediction, as a share of all layers)."""
    min_layer: Length = 1
    """First layer at which a token may leave."""

    @field_validator("speculate_from", "draft_length", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, str) and value.isdecimal() and len(value) < 10:
            return int(value)
        if isinstance(value, str) and value != AUTO:
            raise ValueError("expected a whole number or auto")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> GenerateSettings:
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise FulldepthError(
                "--temperature 0 takes the most probable token, so --top-p and top_k have no effect; leave "
                "--temperature out to sample."
            )
        return self

    @property
    def samples(self) -> bool:
        """True if tokens are drawn; else the most probable is taken."""
        return self.temperature != 0 and (self.temperature is not None or self.top_p < 1 or self.top_k > 0)
