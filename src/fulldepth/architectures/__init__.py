"""Model classes of this project, known to transformers' Auto classes once this room is imported."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fulldepth.architectures.depth_llama import DepthLlamaConfig, DepthLlamaForCausalLM, DepthLlamaModel, build_tree

AutoConfig.register(DepthLlamaConfig.model_type, DepthLlamaConfig, exist_ok=True)
AutoModel.register(DepthLlamaConfig, DepthLlamaModel, exist_ok=True)
AutoModelForCausalLM.register(DepthLlamaConfig, DepthLlamaForCausalLM, exist_ok=True)
# Checkpoints carry their modelling files, for `trust_remote_code` where this package is absent.
DepthLlamaConfig.register_for_auto_class()
DepthLlamaModel.register_for_auto_class("AutoModel")
DepthLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["DepthLlamaConfig", "DepthLlamaForCausalLM", "DepthLlamaModel", "build_tree"]
