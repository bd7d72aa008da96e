"""`fast`: a checkpoint of a class without the skipped blocks: smaller on disk, in memory and in the cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.architectures import SKIPPED
from fulldepth.core.errors import FulldepthError
from fulldepth.hf import Anatomy
from fulldepth.hf.rounding import TOLERANCE
from fulldepth.hf.scalars import GRANULARITIES, ROLES
from fulldepth.skip.exports.fold import Folding, heals, prepare_folding
from fulldepth.skip.exports.formats.checkpoint import Draft, plain_values, save
from fulldepth.skip.exports.formats.format import Format, code_note
from fulldepth.skip.plan import Plan


class Fast(Format):
    """A checkpoint of a class without the skipped parts, and the code that transformers needs to load it."""

    name = "fast"
    granularities = GRANULARITIES
    reader = "carried"
    text_only = True

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Refuse a family that has no such class.

        Raises:
            FulldepthError: with the families that have one.
        """
        family = model.config.get_text_config(decoder=True).model_type
        if family not in SKIPPED:
            raise FulldepthError(
                f"There is no class for {family} models without some of their parts. Available: "
                f"{', '.join(sorted(SKIPPED))}."
            )

    def keeps_scalars(self, model: PreTrainedModel) -> bool:
        """Return True if the class multiplies by a plan's scalars, because the family's weights cannot hold them."""
        kind: Any = SKIPPED[model.config.model_type]
        return bool(kind.model_class.layout.keeps_scalars)

    def folding(self, anatomy: Anatomy, plan: Plan) -> Folding:
        """The folding, unless the class keeps the scalars; any error is accepted, because `write` corrects the eps."""
        if self.keeps_scalars(anatomy.model) and heals(plan):
            return Folding.unscaled(anatomy, "The scalars stay outside the weights.")
        return prepare_folding(anatomy, plan, most=math.inf)

    def tolerance(self, folding: Folding, dtype: torch.dtype) -> float:
        """The tolerance of rounding alone: the eps of the class's norms follows the scale of the stream."""
        return TOLERANCE[dtype]

    def write(self, draft: Draft) -> list[str]:
        """Write a checkpoint of the class without the skipped parts, with its code."""
        family = draft.model.config.model_type
        kind: Any = SKIPPED[family]
        in_config = self.keeps_scalars(draft.model) and heals(draft.plan)
        attention, mlp = (draft.plan.lacking(part) for part in ROLES)
        config = kind.config_class(
            **plain_values(draft.model.config),
            skipped_attention=attention,
            skipped_mlp=mlp,
            stream_scale=None if in_config else list(draft.folding.stream_scale),
            scalars=draft.plan.scalars if in_config else None,
        )
        with torch.device("meta"):
            own_names = kind(config).state_dict().keys()
        skipped = tuple(f"{draft.anatomy.blocks_path}.{layer - 1}." for layer in {*attention, *mlp})
        state = draft.weights()
        weights = {name: weight for name, weight in state.items() if name in own_names or not name.startswith(skipped)}
        save(draft, kind, config, weights)
        return [
            "The scalars are in the configuration: this family's weights cannot hold them."
            if in_config
            else "The scalars are in the weights, and each norm's eps follows the scale of the stream that it reads.",
            code_note(config),
        ]
