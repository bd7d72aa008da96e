"""Table of model families: which modules of a model have which role.

A family that is not in the table is found by structure (`fulldepth.hf.finder`), or described by the user with the same
fields.

Paths are dotted attribute names. Those of a `Family` start at the *body* (the model without its head) or at a block;
those of a `Head` start at the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pydantic
from torch import Tensor, nn

from fulldepth.core.errors import FulldepthError, one_line, unknown

Design = Literal["pre", "parallel", "post"]
ValuePart = Literal["whole", "last-third", "last-third-of-each-head"]
Modality = Literal["text", "images"]
Pool = Literal["token", "first", "last", "mean-patches", "mean", "first-and-mean", "mean-of-logits", "inside"]
Tower = Literal["text", "vision", "encoder", "decoder"]
CountedTokens = Literal["all", "eos"]


class DividedByRootWidth(nn.Module):
    """`h / sqrt(D)`, as T5 scales states before tied embeddings."""

    def forward(self, states: Tensor) -> Tensor:
        """`[..., D]`."""
        return states * (states.shape[-1] ** -0.5)


FUNCTIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "root_width": DividedByRootWidth,
}
"""Functions that heads apply between their modules without a module of their own."""


@dataclass(frozen=True)
class Head:
    """The path from `h_L` to the logits: final norm, pooling, then a chain of modules."""

    modules: tuple[str, ...]
    """Paths from the model, or names of `FUNCTIONS`, applied in order; with `pool="inside"` the first module reads
    `[B, T, D]` itself."""
    pool: Pool = "token"
    """`token`: one prediction per position. Otherwise one per sequence, from the first token (`first`), the last token
    that is not padding (`last`), the mean of the patches (`mean-patches`), the mean of all that are not padding
    (`mean`), the first beside the mean of the patches, `[B, 2 D]` (`first-and-mean`), the mean of the logits of all
    that are not padding (`mean-of-logits`), or by the head itself (`inside`)."""
    normed: bool = True
    """True if the final norm comes before pooling and head."""
    scaled_if: str | None = None
    """Attribute of the configuration; where it is true, the states are divided by the root of their width before the
    last module."""
    scale: float | None = None
    """Factor of the logits of tokens; None = that of the configuration (`heads.MULTIPLIERS`, `DIVISORS`), else 1."""
    capped: bool = True
    """True if the soft cap of the configuration (`heads.SOFT_CAPS`), where it has one, caps the logits of tokens."""
    leading: int = 1
    """Positions before the first patch ([CLS] and registers), for `mean-patches` and `first-and-mean`."""
    reads: Pool = "first"
    """What a head with `pool="inside"` reads: `first`, `last`, `mean-patches` or `mean`."""

    @property
    def feature(self) -> Pool:
        """The pooling that makes a sample's feature from its states."""
        if self.pool == "mean-of-logits":
            return "mean"
        return self.reads if self.pool == "inside" else self.pool


OR = "|"
"""Stands between the names of a module that has another one in other blocks of the same model (`Family`)."""


@dataclass(frozen=True)
class Family:
    """The module names of one family of models, by role.

    Names from the block may be several, `linear_attn|self_attn`: in each block the first one that it has.
    """

    name: str
    blocks: str
    """`ModuleList` of the blocks, from the body."""
    attention: str | None
    """Attention module, from the block."""
    mlp: str | None
    """Module that reads the attention sub-layer's output x' (MLP or its first part), from the block."""
    design: Design = "pre"
    """`pre`: x' = x + A, y = x' + M (A and M may include norms: sandwich). `parallel`: y = x + A + M.
    `post`: x' = norm(x + A), y = norm(m + M), where m is the MLP's input."""
    design_switch: str | None = None
    """Attribute of the configuration; where it is false, the design is `pre`."""
    attention_branch: str | None = None
    """Module whose output A is added to the stream; the attention module unless named."""
    mlp_branch: str | None = None
    """Module whose output M is added to the stream; the MLP unless named."""
    attention_norm: str | None = None
    """Norm before attention (pre, parallel) or after the sum (post)."""
    mlp_norm: str | None = None
    """Norm before the MLP (pre, parallel) or after the sum (post)."""
    value: str | None = None
    """Projection to the value states, from the block."""
    value_part: ValuePart = "whole"
    """The channels of that projection that are the value states."""
    final_norm: str | None = None
    """Norm after the last block, from the body."""
    norm_between: str | None = None
    """Attribute of the configuration; where it is true, the final norm also stands between blocks."""
    branch_scale: str | None = None
    """Attribute of the configuration that multiplies both branches."""
    input_norms: str | None = None
    """Norms of the earlier states whose sum is a block's x (tree), from the block. In such a block x is the input of
    `attention_norm`; in others it is the block's own input."""
    output: str | None = None
    """Projection that joins the attention heads (W_O), from the block."""
    router: str | None = None
    """Module that returns the weights of the attention's memory, from the block; absent in layer 1."""
    attention_connection: str | None = None
    """Module that mixes the residual streams before attention (Hyper-Connections), from the block. Blocks that have it
    hold several streams, `[B, T, n, D]`; measures and the final norm read their sum."""
    mlp_connection: str | None = None
    """Module that mixes the residual streams before the MLP."""
    calls: str | None = None
    """Attribute of the configuration with the number of layers L, for blocks that layers share. Call i of L (from 0)
    runs block `i * blocks // L`."""
    sequence_first: bool = False
    """True if blocks work on `[T, B, D]`."""
    sparse: bool = False
    """True if layers may lack a branch."""
    body: str | None = None
    """Path from the model to the body; None = the model's own base model."""
    tower: Tower | None = None
    """Tower or stack that this row describes, for models with two. A decoder runs with the whole model."""
    projection: str | None = None
    """Module that maps the pooled state, after the final norm, to the space that both towers share, from the model."""
    modality: Modality = "text"
    counted_tokens: CountedTokens | None = None
    """The default token policy of models without a language-model head; None = it follows from the task."""
    backbone: str | None = None
    """Convolutions before the Transformer, from the body."""
    box_head: str | None = None
    """Module of a detector that predicts a box from the state of each query, from the model."""
    heads: Mapping[str, Head] | None = None
    """Ending of the model's class name -> its head; None = found by following the tensors to the logits."""
    is_proposed: bool = False
    """True if `fulldepth.hf.finder` named the blocks alone: attention and MLP are found by their sums."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Family:
        """Make a family from settings whose keys are names of these fields, or of `HEAD_FIELDS`.

        Raises:
            FulldepthError: for an unknown field, a value of the wrong type, or when `blocks` is missing.
        """
        names = [*(f.name for f in fields(cls) if f.name not in ("heads", "is_proposed")), *HEAD_FIELDS]
        for name in values:
            if name not in names:
                raise unknown("anatomy field", name, names)
        if "blocks" not in values:
            raise FulldepthError("An anatomy needs at least `blocks`, the path of the ModuleList of blocks.")
        document = {name: value for name, value in values.items() if name not in HEAD_FIELDS}
        document = {"name": "from settings", "attention": None, "mlp": None} | document
        head = {name: values[name] for name in ("pool", "normed") if name in values}
        if head and "head" not in values:
            raise FulldepthError("anatomy.pool and anatomy.normed describe a head; name its modules with anatomy.head.")
        if isinstance(values.get("head"), str):
            modules = tuple(part.strip() for part in values["head"].split("+"))
            document["heads"] = {"": {"modules": modules, **head}}
        elif "head" in values:  # null: it has none
            document["heads"] = values["head"] or {}
        try:
            return pydantic.TypeAdapter(cls).validate_python(document)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = problem["loc"][-1]
            value = one_line(repr(problem["input"]), 60)
            raise FulldepthError(f"anatomy.{where} is {value}: {problem['msg']}.") from error


HEAD_FIELDS = ("head", "pool", "normed")
"""Fields of settings that describe the head: `head` is its modules from the model, joined by `+`, or null for none."""
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

GLM4 = replace(
    LLAMA,
    name="glm4",
    attention_branch="post_self_attn_layernorm",
    mlp_branch="post_mlp_layernorm",
)
"""GLM-4 of 2025: norms before and after both branches."""

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
    modality="images",
    counted_tokens="all",
    backbone="backbone",
    box_head="bbox_predictor",
    heads={"ForObjectDetection": Head(("class_labels_classifier",))},
)

FAMILIES: dict[str, tuple[Family, ...]] = {
    "llama": (LLAMA,),
    "depth_llama": (DEPTH_LLAMA,),
    **{name: (replace(LLAMA, name=name),) for name in ("mistral", "qwen2", "qwen3")},
    "gemma2": (replace(GEMMA, name="gemma2"),),
    "gemma3_text": (replace(GEMMA, name="gemma3"),),
    "glm4": (GLM4,),
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
"""Model type -> its rows (two for models of two towers)."""
SKIPPED = "fulldepth_skipped_"
"""Prefix of the `model_type` of a family's class without skipped parts."""


def rows_of(model_type: str) -> tuple[Family, ...] | None:
    """Return the rows of a model type, or of the family of a class without skipped parts; None if it is not listed."""
    rows = FAMILIES.get(model_type.removeprefix(SKIPPED))
    if rows is None or not model_type.startswith(SKIPPED):
        return rows
    return tuple(replace(row, sparse=True) for row in rows)
