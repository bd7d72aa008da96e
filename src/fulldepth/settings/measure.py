"""Settings of `fulldepth measure`; defaults < recipe < command line."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fulldepth.core.errors import FulldepthError
from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import LOADING, SPREADING, Count, Length, LoadingSettings, ReadingSettings

TokenPolicy = Literal["auto", "all", "no-first", "last", "cls", "eos", "patches", "mean", "mean-patches"]
EffectPart = Literal["layer", "attention", "mlp"]

DEFAULT = "default"
"""Word in `measures` that stands for all measures that are computed when none is named."""
SAMPLES = ("lens_tokens", "entropy_sequences", "reservoir_tokens")
"""Settings that limit a sample; None = no limit."""
PLAIN_LENS = ("lens_accuracy", "lens_loss", "saturation", "effective_depth")
"""Measures of the last layer's classifier on the states as they are."""
LINEAR_LENS = ("linear_lens_accuracy", "linear_lens_loss")
"""Measures of the linear lens, which needs text to be fitted on."""
FITTING = ("fit", "fit_sequences")
"""Settings that say what it is fitted on."""
OF_EFFECTS = ("effect_parts", "effect_positions", "effect_first")
"""Settings of layer_effect."""
MOST_SAMPLES = 1000
"""Most sequences in the lens grid."""
MOST_SHOWN = 4096
"""Most positions of a sequence in the lens grid."""
SPEED_ONLY = {"batch_size", "device", "device_map"}
"""Settings that do not affect the results."""


class MeasureSettings(ReadingSettings):
    """Everything that determines the results of a measurement; saved with them."""

    options: ClassVar = {
        "What to measure": ("measures", "token_policy", "words", "reference", "fit"),
        "Data": (
            "max_sequences",
            "sequence_length",
            "batch_size",
            "score",
            "chat",
            "exact",
            "seed",
            "split",
            "skip_bad",
        ),
        "Loading the model": SPREADING,
    }

    measures: Annotated[list[str], Field(min_length=1)] | None = None
    """Comma-separated names from default (which others add to: `default,layer_effect`), displacement, jump_rate,
    coherence, cosine, cka, norm_ratio, contribution, lens_accuracy, lens_loss, lens_f1, saturation, effective_depth,
    linear_lens_accuracy, linear_lens_loss, nc1, renyi_entropy, separability, spectral_norm, mmd, retrieval_weight,
    expected_retrieval, average_precision, layer_effect; None = all that model and data allow, without the linear lens
    and layer_effect, which take forward passes of their own."""
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
    lens_tokens: Count | Literal["auto"] | None = "auto"
    """Positions in the seeded sample that the lens is applied to; None = all that have a target. auto: 1,024, fewer
    where their products with the head would cost more than 1.25 forward passes over the data (at least 128)."""
    reservoir_tokens: Count | None = 2048
    """Tokens kept for measures that are not sums (centred cosine, NC1, MMD, the 90 % quantile of layer_effect); exact
    while the data fit. None = all."""
    entropy_sequences: Count | None = 16
    """Sequences in the seeded sample used for the matrix entropies; None = all."""
    grid_samples: int = Field(default=3, ge=0, le=MOST_SAMPLES)
    """Sequences shown in the lens grid of a model that predicts tokens."""
    grid_top: int = Field(default=1, ge=1, le=100)
    """Most probable tokens kept in each cell of the lens grid."""
    grid_positions: int = Field(default=48, ge=1, le=MOST_SHOWN)
    """First positions of a sequence that the lens grid shows."""
    effect_parts: list[EffectPart] = Field(default=["layer"], min_length=1)
    """Comma-separated parts that layer_effect removes from each layer in turn: layer, attention, mlp."""
    effect_positions: int = Field(default=4, ge=1, le=64)
    """Positions t drawn in each sequence for layer_effect on later tokens: a part is removed before t, and effects are
    read from t on."""
    effect_first: bool = False
    """Whether layer_effect also removes parts at the first token of a sequence, which many models use as an attention
    sink."""
    tower: Literal["text", "vision", "encoder", "decoder"] | None = None
    """text or vision, encoder or decoder: measure this part of a model alone."""
    device_map: str | dict[str, Any] | None = None
    """auto: spread a large model over devices, CPU and disk."""
    reference: str | None = None
    """Model that MMD compares with, layer by layer."""
    fit: str | None = None
    """Data that the linear lens is fitted on, the training part if they have one; None = documents of the measured data
    that are not read."""
    fit_sequences: Count | None = None
    """Sequences that the linear lens is fitted on; None = so many that they hold 20 positions for each channel of the
    model."""
    anatomy: dict[str, Any] | None = None
    """Names of the model's parts (fields of `fulldepth.hf.Family`), for a family neither listed nor detected."""

    @property
    def named_measures(self) -> set[str]:
        """The measures that are asked for by name: one that cannot be computed is refused."""
        return {*(self.measures or ())} - {DEFAULT}

    @property
    def default_measures(self) -> bool:
        """True if the default measures are computed: those that model and data allow."""
        return self.measures is None or DEFAULT in self.measures

    @model_validator(mode="after")
    def _have_their_measure(self) -> MeasureSettings:
        """Refuse settings of a measure that is not among those that are computed."""
        fields = type(self).model_fields
        of_defaults = () if self.default_measures else ((("reference",), ("mmd",)), (("words",), ("separability",)))
        for settings, measures in ((FITTING, LINEAR_LENS), (OF_EFFECTS, ("layer_effect",)), *of_defaults):
            given = [
                name for name in settings if getattr(self, name) != fields[name].get_default(call_default_factory=True)
            ]
            if given and self.named_measures.isdisjoint(measures):
                names = " or ".join(measures)
                raise FulldepthError(f"{self.option(given[0])} has no effect without {names} among --measures.")
        return self

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
        "Lens": ("generate", "top_k", "sequence_length", "linear", "fit"),
        "Loading the model": LOADING,
    }
    applies: ClassVar = (Applies(FITTING, {"linear": SET}),)

    generate: int = Field(default=0, ge=0, le=4096)
    """Tokens by which the model continues a text, each the most probable one; the grid then shows the steps that
    predicted them. 0 = the grid shows the text."""
    top_k: int = Field(default=5, ge=1, le=100)
    """Most probable tokens of every layer and position."""
    sequence_length: Length | None = None
    """Tokens after which a text is cut, at most 4,096; None = 256, or the model's positions if fewer (with --generate,
    a text is not cut unless this is given)."""
    linear: bool = False
    """Map the states of every layer to the last layer's first, by least squares: the linear lens, which does not
    mistake a rotated state for ignorance."""
    fit: str | None = None
    """Data that the linear lens is fitted on, the training part if they have one; None = corpus:builtin."""
    fit_sequences: Count | None = None
    """Sequences that the linear lens is fitted on; None = so many that they hold 20 positions for each channel of the
    model."""
