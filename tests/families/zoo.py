"""Tiny models of more than two hundred model types, built from stock configurations by their usual field names."""

from __future__ import annotations

import inspect
from functools import cache

import torch
import transformers as tf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiny_models import seeded, strengthened

VOCAB, LENGTH = 96, 16

VALUES = {
    VOCAB: "vocab_size n_words vocab_size_per_layer_input",
    32: "hidden_size d_model n_embd dim embed_dim n_embed model_dim emb_dim image_size",
    20: "embedding_size word_embed_proj_dim",
    24: "lru_width",
    3: "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_channels num_labels",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads time_step_rank "
    "mamba_n_heads mamba_num_heads qk_nope_head_dim",
    2: "num_key_value_heads num_kv_heads linear_num_key_heads n_mamba_heads num_experts_per_tok moe_topk moe_k "
    "type_vocab_size mamba_expand eos_token_id sep_token_id",
    12: "head_dim kv_channels attention_head_dim qkv_head_dim qk_head_dim",
    8: "rotary_dim qk_rope_head_dim sliding_window attention_window patch_size mamba_d_state state_size "
    "linear_key_head_dim hidden_size_per_layer_input",
    10: "kv_lora_rank linear_value_head_dim",
    6: "v_head_dim",
    16: "q_lora_rank mamba_d_head mamba_head_dim moe_intermediate_size",
    28: "shared_expert_intermediate_size",
    40: "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim d_inner ffn_hidden_size",
    64: "hidden_dim mamba_d_ssm",
    1: "n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups n_groups bos_token_id cls_token_id",
    128: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
    0: "pad_token_id num_kv_shared_layers",
}
SMALL = {name: value for value, names in VALUES.items() for name in names.split()}
"""Field of a configuration -> its value here; no two widths that may differ are the same."""
LATENT = {"head_dim": None, "num_key_value_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TIED_HEADS = {"head_dim": 8}
"""Of types whose heads have D / H channels whatever the configuration says."""
TIED_EMBEDDINGS = {"embedding_size": 32}
"""Of types whose embeddings are as wide as their blocks, or whose channels are counted in groups of 32."""
SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
# Of hybrids one of the first two layers attends: without such a layer their classes fail with a cache.
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SPECIAL = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("axk1", "axk2", "mistral4", "deepseek_v32", "glm_moe_dsa"), LATENT),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), LATENT),
    **dict.fromkeys(("helium", "pixtral"), TIED_HEADS),
    **dict.fromkeys(("squeezebert", "bit", "regnet", "resnet"), TIED_EMBEDDINGS),
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "mamba2": {"head_dim": 16},
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "recurrent_gemma": {"block_types": ["recurrent", "attention", "recurrent"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"]},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "kimi_linear": {**HYBRID, **LATENT, **EXPERTS, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {**LATENT, **EXPERTS, "head_dim": 8, "topk_group": 1, "n_group": 1, "layer_group_size": 2},
    "longcat_flash": {**LATENT, "head_dim": 8, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), SWIN),
    "levit": {"image_size": 224, "patch_size": 16},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
}
"""Model type -> fields that need other values, None = the default."""


def config_for(model_type, **fields):
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
def class_name(model_type, task):
    """The stock class of a model type for a task."""
    found = HEADS[task][model_type]
    return found if isinstance(found, str) else found[0]


def build(model_type, task, seed=0, **fields):
    """A tiny random model in evaluation mode, with weights large enough that every part matters."""
    torch.manual_seed(seed)
    return strengthened(getattr(tf, class_name(model_type, task))(config_for(model_type, **fields)).eval(), 3.0)


def inputs(model, seed):
    """Two sequences of random tokens, or two random images."""
    generator = seeded(seed)
    if model.main_input_name == "pixel_values":
        vision = getattr(model.config, "vision_config", model.config)
        size = getattr(vision, "image_size", SMALL["image_size"])
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(2, 3, height, width, generator=generator)}
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
