"""Schema of the table of model families: which modules of a model have which role.

Paths are dotted attribute names. Those of a `Family` start at the *body* (the model without its head) or at a block;
those of a `Head` start at the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from torch import Tensor, nn

from fulldepth.errors import FulldepthError, unknown

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
    """Whether the final norm comes before pooling and head."""
    scaled_if: str | None = None
    """Attribute of the configuration; where it is true, the states are divided by the root of their width before the
    last module."""
    scale: float | None = None
    """Factor of the logits of tokens; None = `logit_scale` or `1 / logits_scaling` of the configuration, else 1."""
    capped: bool = True
    """Whether `final_logit_softcapping` of the configuration, where it has one, caps the logits of tokens."""
    leading: int = 1
    """Positions before the first patch ([CLS] and registers), for `mean-patches` and `first-and-mean`."""
    reads: Pool = "first"
    """Of `pool="inside"`: what the head reads, `first`, `last`, `mean-patches` or `mean`."""

    @property
    def feature(self) -> Pool:
        """How a sample's feature follows from its states."""
        if self.pool == "mean-of-logits":
            return "mean"
        return self.reads if self.pool == "inside" else self.pool


@dataclass(frozen=True)
class Family:
    """The module names of one family of models, by role."""

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
    """The same before the MLP."""
    calls: str | None = None
    """For blocks that are shared between layers: attribute of the configuration with the number of layers L; call i of
    L (from 0) runs block `i * blocks // L`."""
    layers_entry: str | None = None
    """For one stack of several: attribute of the configuration with its number of layers, all that changes where the
    model is cut to its first layers. None = there is one stack, or the model cannot be cut."""
    sequence_first: bool = False
    """Whether blocks work on `[T, B, D]`."""
    sparse: bool = False
    """Whether layers may lack a branch."""
    body: str | None = None
    """Path from the model to the body; None = the model's own base model."""
    tower: Tower | None = None
    """For models of two towers or stacks: the one that this row describes. A decoder runs with the whole model."""
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

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Family:
        """A family from settings whose keys are the names of these fields, or of `HEAD_FIELDS`.

        Raises:
            FulldepthError: for an unknown field, a value of the wrong type, or when `blocks` is missing.
        """
        names = [*(f.name for f in fields(cls) if f.name != "heads"), *HEAD_FIELDS]
        for name in values:
            if name not in names:
                raise unknown("anatomy field", name, names)
        for name, literal in CHOICES.items():
            if name in values and values[name] not in get_args(literal):
                raise unknown(f"value of anatomy.{name}:", str(values[name]), get_args(literal))
        for name, value in values.items():
            flag = name in ("sparse", "sequence_first", "normed")
            if not (
                isinstance(value, bool) if flag else isinstance(value, str) or (value is None and name != "blocks")
            ):
                expected = "true or false" if flag else "a path or name as text"
                raise FulldepthError(f"anatomy.{name} is {value!r}; expected {expected}.")
        if "blocks" not in values:
            raise FulldepthError("An anatomy needs at least `blocks`, the path of the ModuleList of blocks.")
        fields_of_family = {name: value for name, value in values.items() if name not in HEAD_FIELDS}
        defaults = {"name": "from settings", "attention": None, "mlp": None, "heads": _head_from(values)}
        return cls(**{**defaults, **fields_of_family})


HEAD_FIELDS = ("head", "pool", "normed")
"""Fields of settings that describe the head: `head` is its modules from the model, joined by `+`, or null for none."""
CHOICES = {
    "design": Design,
    "value_part": ValuePart,
    "pool": Pool,
    "modality": Modality,
    "counted_tokens": CountedTokens,
}
"""Field of settings -> its values."""


def _head_from(values: Mapping[str, Any]) -> dict[str, Head] | None:
    """The head that settings describe, for any class of model; None where it has to be found."""
    if "head" not in values:
        if {"pool", "normed"} & values.keys():
            raise FulldepthError("anatomy.pool and anatomy.normed describe a head; name its modules with anatomy.head.")
        return None
    if values["head"] is None:
        return {}
    modules = tuple(part.strip() for part in values["head"].split("+"))
    return {"": Head(modules, pool=values.get("pool", "token"), normed=values.get("normed", True))}
