"""`fulldepth_skipped_*`: stock decoders without the parts that a skip plan removed.

These files import only torch, transformers and each other, so that a checkpoint can carry them.
"""

from fulldepth.architectures.skipped.configuration_decilm import DeciLMConfig
from fulldepth.architectures.skipped.configuration_skipped import older_rope
from fulldepth.architectures.skipped.modeling_decilm import DeciLMForCausalLM
from fulldepth.architectures.skipped.modeling_skipped import (
    LAYOUTS,
    TESTED_TRANSFORMERS,
    SkippedForCausalLM,
    SkippedModel,
    causal_lm_class,
)

SKIPPED: dict[str, type] = {model_type: causal_lm_class(model_type) for model_type in LAYOUTS}
"""`model_type` of a stock decoder -> the class without skipped parts; its `model_class` is the decoder alone."""

__all__ = [
    "SKIPPED",
    "TESTED_TRANSFORMERS",
    "DeciLMConfig",
    "DeciLMForCausalLM",
    "SkippedForCausalLM",
    "SkippedModel",
    "older_rope",
]
