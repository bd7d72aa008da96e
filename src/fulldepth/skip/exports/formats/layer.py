"""`layer`: a plain, truly shallower checkpoint of the same class, for plans that skip whole layers."""

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
"""Endings of names whose lists are not one entry a layer, however long they happen to be."""
LISTS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices")
"""Lists that name layers by number, from 0."""
ONLY_BY_LIST = (
    "What a layer computes no longer follows from its number, only from the list: {}. transformers and vLLM read it; "
    "llama.cpp and mlx-lm may count with the original's period instead, and compute another model without an error."
)


class Layer(Format):
    """A checkpoint of the layers that are left, renumbered."""

    name = "layer"
    granularities = ("layer",)

    def check(self, model: PreTrainedModel, skipped: int) -> None:
        """Refuse what would have no layer left, or layers that compute something else under another number.

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
        """The scalars inside the weights; without scalars nothing is folded, so that any family will do."""
        return prepare(anatomy, plan) if heals(plan) else Folding.unscaled(anatomy, "There are no scalars to fold.")

    def write(self, draft: Draft) -> list[str]:
        """Write the layers that are left, and of every list of the configuration with an entry a layer theirs."""
        num_layers = draft.anatomy.num_layers
        kept = [layer for layer in range(1, num_layers + 1) if layer not in draft.plan.blocks]
        config = copy.deepcopy(draft.model.config)
        inner = config.get_text_config(decoder=True)
        cut = slice_lists(inner, kept, num_layers)
        whole = draft.model.config.get_text_config(decoder=True)
        out_of_step = [name for name in cut if list(getattr(inner, name)) != list(getattr(whole, name))[: len(kept)]]
        sliced = sorted([*cut, *renumber_layers(inner, kept, num_layers)])
        prefix = f"{draft.blocks_name}."
        numbers = {f"{layer - 1}": str(index) for index, layer in enumerate(kept)}
        weights = {}
        for name, weight in draft.weights().items():
            if name.startswith(prefix):
                number, _, rest = name.removeprefix(prefix).partition(".")
                if number not in numbers:
                    continue
                name = f"{prefix}{numbers[number]}.{rest}"
            weights[name] = weight
        save(draft, type(draft.model), config, weights)
        lists = f" Cut to them: {', '.join(sliced)}." if sliced else ""
        notes = [draft.folding.note, f"Layers {', '.join(map(str, kept))} of {num_layers} are left, renumbered.{lists}"]
        return [*notes, ONLY_BY_LIST.format(", ".join(out_of_step))] if out_of_step else notes


def slice_lists(config: PreTrainedConfig, kept: list[int], num_layers: int) -> list[str]:
    """Cut a configuration to the layers that are left, in place.

    Args:
        config: of a model of `num_layers` layers.
        kept: 1-based layers.
        num_layers: L.

    Returns:
        The names of the lists that had an entry a layer.
    """

    def cut(values: Any) -> Any:
        return type(values)(values[layer - 1] for layer in kept)

    found = [
        name
        for name, value in vars(config).items()
        if isinstance(value, list | tuple)
        and len(value) == num_layers
        and not name.endswith(NOT_PER_LAYER)
        and name not in LISTS_OF_LAYERS
    ]
    values = {name: cut(getattr(config, name)) for name in found}
    config.num_hidden_layers = len(kept)
    for name, value in values.items():
        setattr(config, name, value)
    return sorted(found)


def renumber_layers(config: PreTrainedConfig, kept: list[int], num_layers: int) -> list[str]:
    """Let a configuration name by their new numbers the layers that are left, in place.

    `mlp_only_layers` and `decoder_sparse_step` (Qwen's mixtures of experts) become a list alone,
    `first_k_dense_replace` (DeepSeek) counts the dense layers that are left, the other lists keep the layers that are.
    Rules that are not known stay, and weights that do not fit are refused when the checkpoint is written.

    Args:
        config: of a model of `num_layers` layers.
        kept: 1-based layers.
        num_layers: L.

    Returns:
        The names of the entries that are not what they were.
    """
    before = {name: getattr(config, name) for name in LISTS_OF_LAYERS if isinstance(getattr(config, name, None), list)}
    after: dict[str, Any] = {
        name: [new for new, layer in enumerate(kept) if layer - 1 in numbers] for name, numbers in before.items()
    }
    if (step := getattr(config, "decoder_sparse_step", None)) is not None and "mlp_only_layers" in before:
        dense = {index for index in range(num_layers) if index in before["mlp_only_layers"] or (index + 1) % step}
        before["decoder_sparse_step"], after["decoder_sparse_step"] = step, 1
        after["mlp_only_layers"] = [new for new, layer in enumerate(kept) if layer - 1 in dense]
    if (first := getattr(config, "first_k_dense_replace", None)) is not None:
        before["first_k_dense_replace"] = first
        after["first_k_dense_replace"] = sum(layer <= first for layer in kept)
    for name, value in after.items():
        setattr(config, name, value)
    return [name for name, value in after.items() if value != before[name]]
