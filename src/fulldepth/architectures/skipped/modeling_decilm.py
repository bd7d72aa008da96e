"""DeciLM (`nemotron-nas`) for transformers: a Llama without the parts that `block_configs` leaves out."""

from __future__ import annotations

from .configuration_decilm import DeciLMConfig
from .modeling_skipped import SkippedLlamaForCausalLM, SkippedLlamaModel


class DeciLMModel(SkippedLlamaModel):
    """The decoder without a head."""

    config_class = DeciLMConfig  # type: ignore[assignment]


class DeciLMForCausalLM(SkippedLlamaForCausalLM):
    """The decoder with a language-model head."""

    config_class = DeciLMConfig  # type: ignore[assignment]
    model_class = DeciLMModel


__all__ = ["DeciLMForCausalLM", "DeciLMModel"]
