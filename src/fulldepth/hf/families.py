"""Table of model families: the module names of blocks, attention, MLP, norms, value states and heads.

A family that is not in the table is found by structure (`fulldepth.hf.finder`), or described by the user with the same
fields.
"""

from __future__ import annotations

from dataclasses import replace

from fulldepth.hf.family import Family, Head

LANGUAGE_HEADS = {
    "ForCausalLM": Head(("lm_head",), scale=1.0, capped=False),
    "LMHeadModel": Head(("lm_head",), scale=1.0, capped=False),
    "ForSequenceClassification": Head(("score",), pool="last"),
}

LLAMA = Family(
    "llama",
    blocks="layers",
    attention="self_attn",
    mlp="mlp",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    value="self_attn.v_proj",
    final_norm="norm",
    heads=LANGUAGE_HEADS,
)
"""Llama's names, which most later decoders keep."""

DEPTH_LLAMA = replace(
    LLAMA,
    name="depth_llama",
    value="self_attn.value_states",
    input_norms="tree_norms",
    output="self_attn.o_proj",
    router="self_attn.router",
    attention_connection="attention_connection",
    mlp_connection="mlp_connection",
)
"""This package's Llama with a tree, several streams or a memory; without these switches it is Llama. Value states are
read after routing."""

GEMMA = replace(
    LLAMA,
    name="gemma",
    attention_branch="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_branch="post_feedforward_layernorm",
    heads=LANGUAGE_HEADS | {"ForCausalLM": Head(("lm_head",), scale=1.0)},
)
"""Gemma 2 and 3: norms before and after both branches."""

GPT2 = Family(
    "gpt2",
    blocks="h",
    attention="attn",
    mlp="mlp",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    value="attn.c_attn",
    value_part="last-third",
    final_norm="ln_f",
    heads=LANGUAGE_HEADS,
)

GPT_NEOX = Family(
    "gpt_neox",
    blocks="layers",
    attention="attention",
    mlp="mlp",
    design="parallel",
    design_switch="use_parallel_residual",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    value="attention.query_key_value",
    value_part="last-third-of-each-head",
    final_norm="final_layer_norm",
    heads=LANGUAGE_HEADS,
)

BERT = Family(
    "bert",
    blocks="encoder.layer",
    design="post",
    attention="attention",
    attention_branch="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp="intermediate",
    mlp_branch="output.dense",
    mlp_norm="output.LayerNorm",
    value="attention.self.value",
    heads={
        "ForMaskedLM": Head(("cls",), normed=False),
        "ForPreTraining": Head(("cls.predictions",), normed=False),
        "ForSequenceClassification": Head(("bert.pooler", "dropout", "classifier"), pool="inside", normed=False),
    },
)
"""BERT's names: norms after the sums, no final norm."""

ROBERTA = replace(
    BERT,
    name="roberta",
    heads={
        "ForMaskedLM": Head(("lm_head",), normed=False),
        "ForSequenceClassification": Head(("classifier",), pool="inside", normed=False),
    },
)

ALBERT = Family(
    "albert",
    blocks="encoder.albert_layer_groups",
    calls="num_hidden_layers",
    design="post",
    attention="albert_layers.0.attention",
    attention_branch="albert_layers.0.attention.dense",
    attention_norm="albert_layers.0.attention.LayerNorm",
    mlp="albert_layers.0.ffn",
    mlp_branch="albert_layers.0.ffn_output",
    mlp_norm="albert_layers.0.full_layer_layer_norm",
    value="albert_layers.0.attention.value",
    heads={
        "ForMaskedLM": Head(("predictions",), normed=False),
        "ForPreTraining": Head(("predictions",), normed=False),
        "ForSequenceClassification": Head(
            ("albert.pooler", "albert.pooler_activation", "dropout", "classifier"), pool="first", normed=False
        ),
    },
)
"""ALBERT: layers share groups of weights. Groups of more than one inner layer are one layer here, without branches."""

XLNET = Family(
    "xlnet",
    blocks="layer",
    attention=None,
    mlp=None,
    sequence_first=True,
)
"""XLNet: the attention module includes the residual sum and norm, so the branches are not modules."""

VIT = Family(
    "vit",
    blocks="layers",
    attention="attention",
    mlp="mlp",
    attention_norm="layernorm_before",
    mlp_norm="layernorm_after",
    value="attention.v_proj",
    final_norm="layernorm",
    modality="images",
    heads={"ForImageClassification": Head(("classifier",), pool="first")},
)

CLIP_TEXT = Family(
    "clip-text",
    blocks="encoder.layers",
    attention="self_attn",
    mlp="mlp",
    attention_norm="layer_norm1",
    mlp_norm="layer_norm2",
    value="self_attn.v_proj",
    final_norm="final_layer_norm",
    body="text_model",
    tower="text",
    projection="text_projection",
    counted_tokens="eos",
    heads={},
)

CLIP_VISION = replace(
    CLIP_TEXT,
    name="clip-vision",
    final_norm="post_layernorm",
    body="vision_model",
    tower="vision",
    projection="visual_projection",
    modality="images",
    counted_tokens=None,
    heads={"ForImageClassification": Head(("classifier",), pool="mean-patches", normed=False)},
)

T5_ENCODER = Family(
    "t5-encoder",
    blocks="block",
    attention="layer.0.SelfAttention",
    mlp="layer.1.DenseReluDense",
    attention_norm="layer.0.layer_norm",
    mlp_norm="layer.1.layer_norm",
    value="layer.0.SelfAttention.v",
    final_norm="final_layer_norm",
    body="encoder",
    tower="encoder",
    heads={},
)

T5_DECODER = replace(
    T5_ENCODER,
    name="t5-decoder",
    attention=None,
    mlp=None,
    mlp_norm=None,
    body="decoder",
    tower="decoder",
    heads={"ForConditionalGeneration": Head(("lm_head",), scaled_if="scale_decoder_outputs")},
)
"""Cross-attention stands between attention and MLP, so a layer has three branches and none is named here."""

UMT5_DECODER = replace(
    T5_DECODER, heads={"ForConditionalGeneration": Head(("lm_head",), scaled_if="tie_word_embeddings")}
)

DETR = Family(
    "detr",
    blocks="decoder.layers",
    attention="self_attn",
    mlp="mlp",
    design="post",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    value="self_attn.v_proj",
    final_norm="decoder.layernorm",
    norm_between="auxiliary_loss",
    layers_entry="decoder_layers",
    modality="images",
    counted_tokens="all",
    backbone="backbone",
    box_head="bbox_predictor",
    heads={"ForObjectDetection": Head(("class_labels_classifier",))},
)

FAMILIES: dict[str, tuple[Family, ...]] = {
    "llama": (LLAMA,),
    "depth_llama": (DEPTH_LLAMA,),
    "mistral": (replace(LLAMA, name="mistral"),),
    "qwen2": (replace(LLAMA, name="qwen2"),),
    "qwen3": (replace(LLAMA, name="qwen3"),),
    "gemma2": (replace(GEMMA, name="gemma2"),),
    "gemma3_text": (replace(GEMMA, name="gemma3"),),
    "gpt2": (GPT2,),
    "gpt_neox": (GPT_NEOX,),
    "bert": (BERT,),
    "roberta": (ROBERTA,),
    "albert": (ALBERT,),
    "xlnet": (XLNET,),
    "vit": (VIT,),
    "deit": (replace(VIT, name="deit"),),
    "clip": (CLIP_TEXT, CLIP_VISION),
    "clip_text_model": (CLIP_TEXT,),
    "clip_vision_model": (CLIP_VISION,),
    "detr": (DETR,),
    "t5": (T5_ENCODER, T5_DECODER),
    "mt5": (T5_ENCODER, T5_DECODER),
    "umt5": (T5_ENCODER, UMT5_DECODER),
}
"""model_type -> its rows (two for models of two towers)."""
SKIPPED = "fulldepth_skipped_"
"""Prefix of the `model_type` of a family's class without skipped parts."""


def rows_of(model_type: str) -> tuple[Family, ...] | None:
    """The rows of a model type, or of the family of a class without skipped parts; None if it is not in the table."""
    rows = FAMILIES.get(model_type.removeprefix(SKIPPED))
    if rows is None or not model_type.startswith(SKIPPED):
        return rows
    return tuple(replace(row, sparse=True) for row in rows)
