"""DeciLM (`nemotron-nas`) for transformers: a Llama without the parts that `block_configs` marks `no_op`."""

from __future__ import annotations

# transformers 4 copies the files that this one imports, but not the files that those import.
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
