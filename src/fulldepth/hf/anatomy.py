"""`Anatomy`: a model with its modules by role, so that no other room needs module names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.core.errors import FulldepthError, first_reason
from fulldepth.hf.families import FUNCTIONS, OR, Family, Head, rows_of
from fulldepth.hf.finder import (
    STACKS,
    body_of,
    find_families,
    refuse_choices,
    refuse_unread,
    refuse_without_tower,
    unwrapped,
)
from fulldepth.hf.tasks import task_of


@dataclass(frozen=True)
class Anatomy:
    """A model bound to its family: modules by role. Layers are 1-based here, as in every table."""

    model: PreTrainedModel
    family: Family
    order: tuple[int, ...] = ()
    """0-based index of each layer's block in the list of blocks, for shared blocks. Empty if every block runs once, in
    order."""

    @property
    def task(self) -> str:
        """`causal-lm`, `masked-lm`, `text-classification`, `image-classification`, `detection`, `seq2seq-lm` or
        `representation`.
        """
        if self.family.tower == "decoder":
            generates = type(self.model).__name__.endswith("ForConditionalGeneration")
            return "seq2seq-lm" if generates else "representation"
        return task_of(self.model)

    @property
    def classifies(self) -> bool:
        """True if the model predicts one class for a text or an image."""
        return self.task in ("text-classification", "image-classification")

    @property
    def body(self) -> nn.Module:
        """The model without its head."""
        if self.family.body and hasattr(self.model, self.family.body.partition(".")[0]):
            return self.model.get_submodule(self.family.body)
        return body_of(self.model)

    @property
    def runner(self) -> nn.Module:
        """The module that one pass runs: the body, or the whole model for a decoder that reads an encoder's states."""
        return self.model if self.family.tower == "decoder" else self.body

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Run the forward pass of `runner` on a batch for the whole model."""
        return self.runner(**body_inputs(self, inputs))

    def run_body(self, inputs: Mapping[str, Any]) -> Any:
        """Run the forward pass of `body` on a batch for the whole model."""
        return self.body(**body_inputs(self, inputs))

    @property
    def config(self) -> Any:
        """The configuration of the body (for a tower, the tower's own)."""
        config = getattr(self.body, "config", self.model.config)
        if self.family.modality == "images":
            return image_config(config)
        return text_config(config, decoder=True)

    @property
    def block_list(self) -> nn.ModuleList:
        """The model's own list of blocks."""
        return self.body.get_submodule(self.family.blocks)  # type: ignore[return-value]

    @property
    def blocks_path(self) -> str:
        """Path of the list of blocks from the model, as in the names of weights."""
        blocks = self.block_list
        return next(name for name, module in self.model.named_modules() if module is blocks)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The block of each layer, Python indices 0..L-1; the same block may stand for several layers."""
        blocks = self.block_list
        calls = getattr(self.config, self.family.calls) if self.family.calls else len(blocks)
        order = self.order or tuple(call * len(blocks) // calls for call in range(calls))
        return blocks if order == tuple(range(len(blocks))) else [blocks[index] for index in order]  # type: ignore[return-value]

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.blocks)

    @property
    def layers(self) -> range:
        """The numbers of all layers, 1..L."""
        return range(1, self.num_layers + 1)

    @property
    def width(self) -> int:
        """D, channels of the residual stream."""
        names = ("hidden_size", "d_model", "n_embd", "dim")
        for name in names:
            if isinstance(width := getattr(self.config, name, None), int):
                return width
        raise FulldepthError(
            f"The configuration of {type(self.model).__name__} does not state the width of its residual stream; "
            f"expected one of {', '.join(names)}."
        )

    def part(self, layer: int, role: str) -> nn.Module | None:
        """The module with a role (a field of `Family`) in a 1-based layer; None where the family has none there.

        `attention_branch` and `mlp_branch` fall back to the attention and the MLP themselves.
        """
        path = getattr(self.family, role)
        if path is None and role.endswith("_branch"):
            path = getattr(self.family, role.removesuffix("_branch"))
        for name in () if path is None else path.split(OR):
            with suppress(AttributeError):
                return self.blocks[layer - 1].get_submodule(name)
        return None

    def has(self, role: str) -> bool:
        """Return True if every layer has a module with this role."""
        return len(self.layers_with(role)) == self.num_layers

    def layers_with(self, role: str) -> list[int]:
        """The 1-based layers that have a module with this role."""
        return [layer for layer in self.layers if self.part(layer, role) is not None]

    def reader(self, layer: int) -> nn.Module:
        """The module whose input is x of a 1-based layer: the block, or its attention norm where x is a sum."""
        norm = self.part(layer, "attention_norm") if self.part(layer, "input_norms") is not None else None
        return self.blocks[layer - 1] if norm is None else norm

    def router_vectors(self, layer: int) -> Tensor | None:
        """[heads, sources, D] weight of a 1-based layer's dynamic router; None where the layer has none."""
        weight = getattr(self.part(layer, "router"), "weight", None)
        if weight is None or weight.ndim != 2 or weight.device.type == "meta":
            return None
        return weight.detach().unflatten(0, (-1, layer))

    @property
    def has_streams(self) -> bool:
        """True if blocks hold several residual streams."""
        return self.family.attention_connection is not None and self.part(1, "attention_connection") is not None

    @property
    def not_serial(self) -> str | None:
        """A clause that says what layers read besides the layer before them; None if they read nothing else."""
        reasons = {
            "its layers read a tree of earlier outputs": bool(self.layers_with("input_norms")),
            "its blocks hold several residual streams (Hyper-Connections)": self.has_streams,
            "its attention reads a memory of earlier layers": bool(self.layers_with("router")),
        }
        return first_reason(reasons)

    def stream(self, states: Tensor) -> Tensor:
        """Return the residual stream `[B, T, D]` in a block's input or output; the sum if there are several streams."""
        states = states.transpose(0, 1) if self.family.sequence_first else states
        return states.sum(-2) if self.has_streams else states

    def select(self, states: Tensor, rows: Tensor) -> Tensor:
        """Return the sequences of a block's input or output that `rows: [B]` (bool) selects."""
        return states[:, rows] if self.family.sequence_first else states[rows]

    def handed_on(self, states: Tensor) -> Tensor:
        """Return the next block's input for a block's output: the same states, unless a norm stands between blocks."""
        return self.normalise_once(states) if self.norm_between else states

    @property
    def norm_between(self) -> bool:
        """True if the final norm also stands between blocks."""
        return self.family.norm_between is not None and bool(getattr(self.config, self.family.norm_between, False))

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm after the last block; None for families without one."""
        path = self.family.final_norm
        return None if path is None else self.body.get_submodule(path)

    def normalise(self, states: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Apply the final norm to residual states `[..., D]`; a model without one returns them unchanged.

        Args:
            states: states of any layer.
            norm: function to call in place of the final norm's module.
        """
        states = self.normalise_once(states, norm)
        return self.normalise_once(states, norm) if self.norm_between else states

    def normalise_once(self, states: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Apply the final norm once, also in models whose last layer applies it twice (`norm_between`)."""
        norm = norm or self.final_norm
        return states if norm is None else norm(states)

    @property
    def projection(self) -> nn.Module | None:
        """The map to the space that both towers share; None for models without one."""
        path = self.family.projection
        return None if path is None else getattr(self.model, path, None)

    @property
    def branch_scale(self) -> float:
        """The factor of both branches in the residual sum."""
        name = self.family.branch_scale
        return float(getattr(self.config, name)) if name else 1.0

    @property
    def head(self) -> Head | None:
        """The path from `h_L` to the logits; None for models without a prediction head."""
        heads = self.family.heads or {}
        kind = type(self.model).__name__
        return next((head for suffix, head in heads.items() if kind.endswith(suffix)), None)

    def head_modules(self, head: Head) -> list[nn.Module]:
        """The modules of a head, in order; functions of `FUNCTIONS` as modules.

        Raises:
            AttributeError: if the model has no module of that name.
        """
        modules = dict(self.model.named_modules())
        return [
            FUNCTIONS[path]() if path in FUNCTIONS and path not in modules else self.model.get_submodule(path)
            for path in head.modules
        ]

    @property
    def searches_head(self) -> bool:
        """True if the head must be found by following the tensors of a forward pass."""
        return self.head is None and self.task != "representation" and self.family.heads != {}

    @property
    def max_positions(self) -> int | None:
        """Length of the longest sequence that the model has positions for, or of BigBird the `full_attention_length`;
        None = no limit.
        """
        limit = getattr(self.config, "max_position_embeddings", None)
        if not isinstance(limit, int) or limit <= 0:  # XLNet uses -1
            return None
        return min(limit - unused_positions(self.body), full_attention_length(self.body) or limit)

    @property
    def vocab_size(self) -> int | None:
        """Number of rows of the embedding matrix; None for images."""
        if self.family.modality != "text":
            return None
        for owner in (self.body, self.model):
            with suppress(NotImplementedError, AttributeError):  # some wrappers of decoders define no embeddings
                embeddings: Any = owner.get_input_embeddings()  # type: ignore[operator]
                return int(embeddings.weight.shape[0])
        return getattr(self.config, "vocab_size", None)

    def value_states(self, projected: Tensor) -> Tensor:
        """Return the value states `[B, T, Dv]` in the output of the `value` projection, `[B, T, *]`."""
        if self.family.value_part == "whole":
            return projected
        whole = self.family.value_part == "last-third"
        heads = projected.unflatten(-1, (1 if whole else self.config.num_attention_heads, -1))
        return heads[..., -heads.shape[-1] // 3 :].flatten(-2)

    def projections(self) -> Iterator[tuple[str, int, nn.Module]]:
        """Yield every weight matrix of every block: its name inside the block, its 1-based layer, its module. A matrix
        with adapters counts once, and its module is PEFT's (`is_adapted`).
        """
        for name, layer, module in self._modules_of_blocks():
            weight = getattr(module, "weight", None)
            is_matrix = isinstance(weight, Tensor) and weight.ndim == 2  # torch's quantised layers have a method
            if name and is_matrix and not isinstance(module, nn.Embedding):
                yield name, layer, module

    def expert_projections(self) -> Iterator[tuple[str, int, nn.Parameter | None]]:
        """Yield every tensor `[E, m, n]` that stores the matrices of E experts: the parameter's name inside the block,
        its 1-based layer, the parameter. The parameter is None for experts whose matrices are stored in another way or
        have adapters.
        """
        for path, layer, module in self._modules_of_blocks():
            if is_adapted(module):
                inner = stacked_experts(module.get_base_layer())
                yield from ((f"{path}.{name}".removesuffix(".weight"), layer, None) for name in inner)
                continue
            stacked = stacked_experts(module)
            yield from ((f"{path}.{name}".removesuffix(".weight"), layer, p) for name, p in stacked.items())
            weight = getattr(module, "weight", None)
            is_matrix = isinstance(weight, Tensor) and weight.ndim == 2  # found by `projections`
            has_parameters = next(module.parameters(recurse=False), None) is not None
            if has_parameters and not stacked and not is_matrix and "expert" in type(module).__name__.lower():
                yield path, layer, None

    def _modules_of_blocks(self) -> Iterator[tuple[str, int, Any]]:
        """Yield every module of every block, except those inside a wrapper with adapters: its name inside the block
        (empty for the block), its 1-based layer, the module.
        """
        for layer, block in enumerate(self.blocks, start=1):
            inside: tuple[str, ...] = ()
            for name, module in block.named_modules():
                if name.startswith(inside):
                    continue
                inside += (f"{name}.",) if is_adapted(module) else ()
                yield name, layer, module


def is_adapted(module: nn.Module) -> bool:
    """Return True if a module is PEFT's wrapper of a layer with adapters that are not merged into its weights."""
    return isinstance(getattr(module, "base_layer", None), nn.Module) and callable(getattr(module, "merge", None))


def stacked_experts(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter `[E, m, n]` of a module that stores the matrices of E experts as one; empty for others."""
    count = getattr(module, "num_experts", None)
    holds_experts = count is None and "expert" in type(module).__name__.lower()
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and (len(parameter) == count or holds_experts)
    }


def anatomy_candidates(
    model: PreTrainedModel, *, tower: str | None = None, override: Mapping[str, Any] | None = None
) -> list[Anatomy]:
    """The anatomies that may fit a model, likeliest first; `execution.find_anatomy` checks which one does.

    Args:
        model: a loaded model, possibly inside a wrapper that `unwrapped` knows.
        tower: `text` or `vision`, `encoder` or `decoder`, for models that have both.
        override: fields of `Family`, in place of the table and the finder.

    Raises:
        FulldepthError: if the model is not in the table and has no list of blocks, or a tower has to be chosen.
    """
    model = unwrapped(model)
    refuse_choices(model)
    if override:
        return [_described(Anatomy(model, Family.from_mapping(override)))]
    rows = rows_of(model.config.model_type)
    if rows is None:
        return [Anatomy(model, family) for family in find_families(model, tower)]
    # A type of one row needs no check: a bare tower has a model type of its own.
    present = list(rows) if len(rows) == 1 else [row for row in (_located(model, row) for row in rows) if row]
    if len(present) > 1 and tower is None:
        if present[0].tower in STACKS:
            refuse_unread(model)
            refuse_without_tower(model)
        towers = " or ".join(str(row.tower) for row in present)
        raise FulldepthError(
            f"{type(model).__name__} has two towers. Choose one (tower: {towers}) for fulldepth measure and "
            "Objective.attach; measure also reads both on images with texts (columns image and text). Other commands "
            "take a checkpoint of one tower."
        )
    if len(present) > 1:
        present = [row for row in present if row.tower == tower]
    if not present:
        wanted = tower or " or ".join(str(row.tower) for row in rows)
        raise FulldepthError(
            f"{type(model).__name__} has no {wanted} in the place that is known for models of type "
            f"{model.config.model_type}; describe the anatomy in the settings (anatomy.blocks=PATH)."
        )
    candidates = [
        Anatomy(model, replace(row, design="pre"))
        if row.design_switch and getattr(model.config, row.design_switch, True) is False
        else Anatomy(model, row)
        for row in present
    ]
    depths = [_depth(candidate) for candidate in candidates]
    if all(depth is None for depth in depths):
        raise FulldepthError(
            f"{type(model).__name__} is not built as models of type {model.config.model_type} are: it has no "
            f"{candidates[0].family.blocks}. Correct model_type or architectures in its config.json, or describe the "
            "anatomy in the settings (anatomy.blocks=PATH)."
        )
    if not any(depths):
        raise FulldepthError(
            f"This {type(model).__name__} has no layers: {candidates[0].family.blocks} is empty. Its configuration has "
            "to state at least one."
        )
    return candidates


def _depth(anatomy: Anatomy) -> int | None:
    """Return the number of blocks in the model's list; None if the list is not in its place."""
    try:
        return len(anatomy.block_list)
    except AttributeError:
        return None


def _located(model: PreTrainedModel, row: Family) -> Family | None:
    """Return the row of a tower with the path of its body, which some classes keep inside another part; None if the
    model lacks it.
    """
    if hasattr(model, str(row.body)):
        return row
    parts = (name for name, part in model.named_children() if hasattr(part, str(row.body)))
    return next((replace(row, body=f"{name}.{row.body}") for name in parts), None)


def _described(anatomy: Anatomy) -> Anatomy:
    """Return an anatomy that the settings describe, after a check that its paths exist."""
    family = anatomy.family
    kind = type(anatomy.model).__name__
    for name, start in (("body", anatomy.model), ("blocks", anatomy.body), ("final_norm", anatomy.body)):
        path = getattr(family, name)
        try:
            module = None if path is None else start.get_submodule(path)
        except AttributeError as error:
            raise FulldepthError(f"anatomy.{name}={path} names no module of {kind}: {error}.") from error
        if name == "blocks" and not isinstance(module, nn.ModuleList):
            raise FulldepthError(
                f"anatomy.blocks={path} is a {type(module).__name__}; expected a ModuleList of blocks."
            )
    if family.branch_scale and not hasattr(anatomy.config, family.branch_scale):
        raise FulldepthError(f"The configuration of {kind} has no {family.branch_scale} (anatomy.branch_scale).")
    return anatomy


def first_broken_weight(model: nn.Module) -> str | None:
    """The name of the first weight that holds NaN or infinity; None if all floating-point weights are finite.

    In a parameter that its module lists in `minus_infinity_prunes`, -inf marks a pruned weight and is accepted, unless
    a row (along the last dimension) holds nothing else. For a sharded weight, only this process's part is read.
    """
    checked: set[int] = set()
    for path, module in model.named_modules():
        prunable = getattr(module, "minus_infinity_prunes", ())
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in checked or parameter.device.type == "meta" or not parameter.dtype.is_floating_point:
                continue
            checked.add(id(parameter))
            values = parameter.detach()
            values = values.to_local() if isinstance(values, DTensor) else values
            if type(values) is not Tensor and hasattr(values, "dequantize"):
                values = values.dequantize()
            if name in prunable:
                values = values.masked_fill((values == -torch.inf) & (values > -torch.inf).any(-1, keepdim=True), 0.0)
            if not all_finite(values):
                return f"{path}.{name}" if path else name
    return None


def all_finite(values: Tensor) -> bool:
    """Return True if no value is NaN or infinite. The sum, which is fast, decides unless it overflows."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def text_config(config: Any, decoder: bool = False) -> Any:
    """Return the text part of a configuration (with `decoder`, that of the decoder), or the configuration itself if it
    has no parts, as outside of transformers.
    """
    return config.get_text_config(decoder=decoder) if hasattr(config, "get_text_config") else config


def image_config(config: Any) -> Any:
    """Return the image part of a configuration, or the configuration itself if it has no parts."""
    return getattr(config, "vision_config", config)


def end_tokens(model: PreTrainedModel, tokenizer: Any = None) -> list[int]:
    """Return the tokens that end a model's text: those of its generation configuration, and the tokenizer's."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    listed = [stated] if isinstance(stated, int) else list(stated or ())
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    return listed if of_tokenizer is None or of_tokenizer in listed else [*listed, of_tokenizer]


def config_parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Name -> configuration: the whole one under the empty name, and the configurations that are its entries."""
    return {"": config} | {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}


def layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The configuration of a 1-based layer: the model's own, except where entries differ by layer
    (`per_layer_config`), which cannot be read from the model's.
    """
    return config.per_layer_config[layer - 1] if getattr(config, "is_heterogeneous", False) else config


def full_attention_length(model: nn.Module) -> int | None:
    """Tokens up to which BigBird attends to all of them; None for models that read all texts in the same way.

    It reads longer texts with sparse attention until it has read a shorter one, so their states depend on what it read
    before.
    """
    for module in model.modules():
        if getattr(module, "attention_type", None) == "block_sparse":
            config: Any = module.config
            return int((5 + 2 * config.num_random_blocks) * config.block_size)
    return None


def first_rotation_length(config: Any) -> int | None:
    """Tokens up to which a model with LongRoPE rotates its keys by the first of two lists of factors; None for others.

    All sequences of a batch are rotated as its longest one.
    """
    stated = getattr(config, "rope_parameters", None) or {}
    of_layers = [parameters for parameters in stated.values() if isinstance(parameters, dict)] or [stated]
    name = "original_max_position_embeddings"
    for rope in of_layers:
        if rope.get("rope_type") == "longrope":
            return int(rope.get(name) or getattr(config, name, None) or 0) or None
    return None


def unused_positions(model: nn.Module) -> int:
    """Number of rows of the position table before the first token's row. In RoBERTa and related models positions start
    after the index of the padding token; 0 in other models.
    """
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        counts_itself = isinstance(module, nn.Embedding) and type(module) is not nn.Embedding  # a class's own positions
        if name.endswith("position_embeddings") and isinstance(padding, int) and not counts_itself:
            return padding + 1
    return 0


def sample_inputs(anatomy: Anatomy) -> dict[str, Tensor]:
    """Two short sequences of tokens, or two images of noise, on the device of the model's first weights."""
    placed = (weight.device for weight in anatomy.model.parameters() if weight.device.type != "meta")
    device = next(placed, torch.device("cpu"))
    if anatomy.family.modality == "text":
        tokens = torch.arange(16, device=device).view(2, 8) % (anatomy.vocab_size or 2)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    size = getattr(anatomy.config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(anatomy.config, "num_channels", 3)
    noise = torch.linspace(-1, 1, 2 * channels * height * width, device=device, dtype=anatomy.model.dtype)
    return {"pixel_values": noise.sin().view(2, channels, height, width)}


def body_inputs(anatomy: Anatomy, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the body's forward pass. A decoder's cache is off, because it would only take memory."""
    if anatomy.family.tower == "vision" and "pixel_values" in inputs:
        inputs = {"pixel_values": inputs["pixel_values"]}  # a whole CLIP also takes text
    if anatomy.family.tower == "encoder":
        return dict(inputs)
    decodes = anatomy.task in ("causal-lm", "seq2seq-lm") or getattr(anatomy.config, "use_cache", None) is True
    return {**inputs, "use_cache": False} if decodes and anatomy.family.modality == "text" else dict(inputs)


def logits_of(output: Any) -> Tensor | None:
    """Return the logits in a model's output; None if it holds none."""
    entries = (output.get(name) for name in ("prediction_logits", "logits")) if isinstance(output, Mapping) else ()
    return next((logits for logits in entries if isinstance(logits, Tensor)), None)
