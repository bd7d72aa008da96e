"""DeciLM (`nemotron-nas`) for transformers: a Llama without the parts that `block_configs` leaves out."""

from __future__ import annotations

# transformers 4 copies those files of carried code that this one names, and not what they name in their turn.
from .cache_skipped import compact  # noqa: F401
from .configuration_decilm import DeciLMConfig
from .configuration_skipped import config_class  # noqa: F401
from .modeling_skipped import SkippedLlamaForCausalLM, SkippedLlamaModel


class DeciLMModel(SkippedLlamaModel):
    """The decoder without a head."""

    config_class = DeciLMConfig


class DeciLMForCausalLM(SkippedLlamaForCausalLM):
    """The decoder with a language-model head."""

    config_class = DeciLMConfig
    model_class = DeciLMModel


__all__ = ["DeciLMForCausalLM", "DeciLMModel"]
