"""Model classes of this project; importing this room registers them with transformers' Auto classes."""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fulldepth.architectures.depth_llama import DepthLlamaConfig, DepthLlamaForCausalLM, DepthLlamaModel, build_tree
from fulldepth.architectures.skipped import SKIPPED, TESTED_TRANSFORMERS, DeciLMConfig, DeciLMForCausalLM


def _register(config: Any, model: Any, causal_lm: Any) -> None:
    """Register the classes of a model type with transformers' Auto classes."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    # Checkpoints carry their modelling files, for `trust_remote_code` where this package is absent.
    config.register_for_auto_class()
    model.register_for_auto_class("AutoModel")
    causal_lm.register_for_auto_class("AutoModelForCausalLM")


_register(DepthLlamaConfig, DepthLlamaModel, DepthLlamaForCausalLM)
for _model in SKIPPED.values():
    _register(_model.config_class, _model.model_class, _model)  # type: ignore[attr-defined]
# DeciLM is not registered here, because other checkpoints of its type carry code for more variations.
DeciLMConfig.register_for_auto_class()
DeciLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "SKIPPED",
    "TESTED_TRANSFORMERS",
    "DeciLMConfig",
    "DeciLMForCausalLM",
    "DepthLlamaConfig",
    "DepthLlamaForCausalLM",
    "DepthLlamaModel",
    "build_tree",
]
