"""`fulldepth_skipped_*`: stock decoders without the parts that a skip plan removed.

Files that import only torch, transformers and each other, so that a checkpoint can carry them.
"""

from fulldepth.architectures.skipped import modeling_skipped
from fulldepth.architectures.skipped.configuration_decilm import DeciLMConfig
from fulldepth.architectures.skipped.configuration_skipped import older_rope
from fulldepth.architectures.skipped.modeling_decilm import DeciLMForCausalLM
from fulldepth.architectures.skipped.modeling_skipped import SkippedForCausalLM, SkippedModel

SKIPPED: dict[str, type] = {
    "llama": modeling_skipped.SkippedLlamaForCausalLM,
    "mistral": modeling_skipped.SkippedMistralForCausalLM,
    "qwen2": modeling_skipped.SkippedQwen2ForCausalLM,
    "qwen3": modeling_skipped.SkippedQwen3ForCausalLM,
    "gemma2": modeling_skipped.SkippedGemma2ForCausalLM,
    "gemma3_text": modeling_skipped.SkippedGemma3TextForCausalLM,
    "gpt2": modeling_skipped.SkippedGPT2ForCausalLM,
    "gpt_neox": modeling_skipped.SkippedGPTNeoXForCausalLM,
}
"""`model_type` of a stock decoder -> the class without skipped parts; its `model_class` is the decoder alone."""

__all__ = ["SKIPPED", "DeciLMConfig", "DeciLMForCausalLM", "SkippedForCausalLM", "SkippedModel", "older_rope"]
