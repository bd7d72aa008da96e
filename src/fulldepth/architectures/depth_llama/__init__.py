"""`depth_llama`. Its files import only torch, transformers and each other, so that a checkpoint can carry them."""

from fulldepth.architectures.depth_llama.configuration_depth_llama import DepthLlamaConfig, build_tree
from fulldepth.architectures.depth_llama.modeling_depth_llama import DepthLlamaForCausalLM, DepthLlamaModel

__all__ = ["DepthLlamaConfig", "DepthLlamaForCausalLM", "DepthLlamaModel", "build_tree"]
