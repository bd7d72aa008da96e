"""`layer`: an ordinary checkpoint of the same class with fewer layers, for plans that skip whole layers."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy, renumber_layers, slice_lists
from fulldepth.skip.exports.fold import Folding, heals, prepare
from fulldepth.skip.exports.formats.checkpoint import Draft, save
from fulldepth.skip.exports.formats.format import Format
from fulldepth.skip.plan import Plan

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
