"""`layer`: an ordinary checkpoint of the same class with fewer layers, for plans that skip whole layers."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy
from fulldepth.skip.exports.fold import Folding, heals, prepare
from fulldepth.skip.exports.formats.checkpoint import Draft, save
from fulldepth.skip.exports.formats.format import Format
from fulldepth.skip.plan import Plan

NOT_PER_LAYER = ("token_id", "token_ids", "architectures", "labels", "section")
"""Endings of names of lists that never have one entry per layer, even if their length is L."""
LISTS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices")
"""Lists of layer numbers, from 0."""
ONLY_BY_LIST = (
    "What a layer computes no longer follows from its number, only from the list: {}. transformers and vLLM read it; "
    "llama.cpp and mlx-lm may count with the original's period instead, and compute another model without an error."
)


class Layer(Format):
    """A checkpoint of the remaining layers, renumbered."""

    name = "layer"
    granularities = ("layer",)

    def check(self, model: PreTrainedModel, skipped: int) -> None:
        """Refuse a plan that skips all layers, and a model whose layers depend on their number.

        Raises:
            FulldepthError: with the reason.
        """
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        if skipped >= num_layers:
            raise FulldepthError(f"The plan skips all {num_layers} layers; a checkpoint needs at least one.")
        if getattr(model.config, "scale_attn_by_inverse_layer_idx", False):
            raise FulldepthError(
                "This model scales attention by the number of the layer (scale_attn_by_inverse_layer_idx), so its "
                "layers cannot be renumbered. Use --format folded."
            )

    def folding(self, anatomy: Anatomy, plan: Plan) -> Folding:
        """The folding; a plan without scalars needs none, so that every family is accepted."""
        return prepare(anatomy, plan) if heals(plan) else Folding.unscaled(anatomy, "There are no scalars to fold.")

    def write(self, draft: Draft) -> list[str]:
        """Write the remaining layers, and their entries of every list of the configuration with one entry per layer."""
        num_layers = draft.anatomy.num_layers
        remaining = [layer for layer in range(1, num_layers + 1) if layer not in draft.plan.blocks]
        config = copy.deepcopy(draft.model.config)
        inner = config.get_text_config(decoder=True)
        cut = slice_lists(inner, remaining, num_layers)
        original = draft.model.config.get_text_config(decoder=True)
        out_of_step = [
            name for name in cut if list(getattr(inner, name)) != list(getattr(original, name))[: len(remaining)]
        ]
        sliced = sorted([*cut, *renumber_layers(inner, remaining, num_layers)])
        prefix = f"{draft.blocks_name}."
        numbers = {f"{layer - 1}": str(index) for index, layer in enumerate(remaining)}
        weights = {}
        for name, weight in draft.weights().items():
            if name.startswith(prefix):
                number, _, own_name = name.removeprefix(prefix).partition(".")
                if number not in numbers:
                    continue
                name = f"{prefix}{numbers[number]}.{own_name}"
            weights[name] = weight
        save(draft, type(draft.model), config, weights)
        lists = f" Cut to them: {', '.join(sliced)}." if sliced else ""
        notes = [
            draft.folding.note,
            f"Layers {', '.join(map(str, remaining))} of {num_layers} are left, renumbered.{lists}",
        ]
        return [*notes, ONLY_BY_LIST.format(", ".join(out_of_step))] if out_of_step else notes


def slice_lists(config: PreTrainedConfig, remaining: list[int], num_layers: int) -> list[str]:
    """Cut a configuration to the remaining layers, in place.

    Args:
        config: of a model of `num_layers` layers.
        remaining: 1-based layers.
        num_layers: L.

    Returns:
        The names of the lists that had one entry per layer.
    """

    def cut(values: Any) -> Any:
        return type(values)(values[layer - 1] for layer in remaining)

    names = [
        name
        for name, value in vars(config).items()
        if isinstance(value, list | tuple)
        and len(value) == num_layers
        and not name.endswith(NOT_PER_LAYER)
        and name not in LISTS_OF_LAYERS
    ]
    values = {name: cut(getattr(config, name)) for name in names}
    config.num_hidden_layers = len(remaining)
    for name, value in values.items():
        setattr(config, name, value)
    return sorted(names)


def renumber_layers(config: PreTrainedConfig, remaining: list[int], num_layers: int) -> list[str]:
    """Renumber the remaining layers in a configuration's lists of layer numbers, in place.

    `mlp_only_layers` and `decoder_sparse_step` (Qwen's mixtures of experts) become a list alone,
    `first_k_dense_replace` (DeepSeek) counts the remaining dense layers, the other lists keep the remaining layers.
    Other rules are left unchanged; weights that do not fit them are refused when the checkpoint is written.

    Args:
        config: of a model of `num_layers` layers.
        remaining: 1-based layers.
        num_layers: L.

    Returns:
        The names of the entries that changed.
    """
    before = {name: getattr(config, name) for name in LISTS_OF_LAYERS if isinstance(getattr(config, name, None), list)}
    after: dict[str, Any] = {
        name: [new for new, layer in enumerate(remaining) if layer - 1 in numbers] for name, numbers in before.items()
    }
    if (step := getattr(config, "decoder_sparse_step", None)) is not None and "mlp_only_layers" in before:
        dense = {index for index in range(num_layers) if index in before["mlp_only_layers"] or (index + 1) % step}
        before["decoder_sparse_step"], after["decoder_sparse_step"] = step, 1
        after["mlp_only_layers"] = [new for new, layer in enumerate(remaining) if layer - 1 in dense]
    if (first := getattr(config, "first_k_dense_replace", None)) is not None:
        before["first_k_dense_replace"] = first
        after["first_k_dense_replace"] = sum(layer <= first for layer in remaining)
    for name, value in after.items():
        setattr(config, name, value)
    return [name for name, value in after.items() if value != before[name]]
