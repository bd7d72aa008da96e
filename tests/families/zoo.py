"""Tiny models of more than two hundred model types, built from stock configurations by their usual field names."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import transformers as tf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, LENGTH = 96, 16

SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_words"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "n_embed", "model_dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), 20),
    "lru_width": 24,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "qkv_head_dim"), 12),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim", "sliding_window", "attention_window", "patch_size"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "linear_key_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "linear_value_head_dim"), 10),
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    **dict.fromkeys(("q_lora_rank", "mamba_d_head", "mamba_head_dim", "moe_intermediate_size"), 16),
    "qk_head_dim": 12,
    "shared_expert_intermediate_size": 28,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner"), 40),
    "ffn_hidden_size": 40,
    **dict.fromkeys(("hidden_dim", "mamba_d_ssm"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("linear_num_value_heads", "time_step_rank", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "type_vocab_size", "mamba_expand"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "mamba_n_groups"), 1),
    "n_groups": 1,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 128),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("num_channels", "num_labels"), 3),
    "pad_token_id": 0,
    "image_size": 32,
}
"""Field of a configuration -> its value here; no two widths that may differ are the same."""
LATENT = {"head_dim": None, "num_key_value_heads": 4}
TIED_HEADS = {"head_dim": 8}
"""Of types whose heads have D / H channels whatever the configuration says."""
TIED_EMBEDDINGS = {"embedding_size": 32}
"""Of types whose embeddings are as wide as their blocks, or whose channels are counted in groups of 32."""
SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("axk1", "axk2", "mistral4"), LATENT),
    **dict.fromkeys(("helium", "pixtral"), TIED_HEADS),
    **dict.fromkeys(("squeezebert", "bit", "regnet", "resnet"), TIED_EMBEDDINGS),
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {"num_hidden_layers": 3},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), SWIN),
    "levit": {"image_size": 224, "patch_size": 16},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
}
"""Model type -> fields that need other values, None = the default."""


def config_for(model_type: str, **fields: Any) -> Any:
    """A small configuration of a model type; sub-configurations are small too."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    stored = default.to_dict()
    known = (
        set(stored) | set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "__dataclass_fields__", {}))
    )
    aliases = getattr(kind, "attribute_map", {})
    chosen = {
        name: value
        for name, value in SMALL.items()
        if name in known and name not in aliases and not isinstance(stored.get(name), list | tuple)
    }
    for name in getattr(kind, "sub_configs", None) or {}:
        inner = getattr(getattr(default, name, None), "model_type", None)
        if inner in CONFIG_MAPPING:
            chosen[name] = config_for(inner).to_dict()
    chosen |= SPECIAL.get(model_type, {}) | fields
    return kind(**{name: value for name, value in chosen.items() if value is not None})


HEADS = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image-text-to-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "text-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "representation": modeling_auto.MODEL_MAPPING_NAMES,
}


@cache
def class_name(model_type: str, task: str) -> str:
    """The stock class of a model type for a task."""
    found = HEADS[task][model_type]
    return found if isinstance(found, str) else found[0]


def build(model_type: str, task: str, seed: int = 0, **fields: Any) -> tf.PreTrainedModel:
    """A tiny random model in evaluation mode, with weights large enough that every part matters."""
    torch.manual_seed(seed)
    model = getattr(tf, class_name(model_type, task))(config_for(model_type, **fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # gains and biases that are not 1 and 0 catch a forgotten norm or bias
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(3.0)
    return model


def inputs(model: tf.PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Two sequences of random tokens, or two random images."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        vision = getattr(model.config, "vision_config", model.config)
        size = getattr(vision, "image_size", SMALL["image_size"])
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(2, 3, height, width, generator=generator)}
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
