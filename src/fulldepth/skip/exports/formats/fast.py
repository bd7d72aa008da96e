"""`fast`: skipped blocks do not exist, neither on disk nor in memory nor in the cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.architectures import SKIPPED
from fulldepth.errors import FulldepthError
from fulldepth.skip.exports.fold import heals
from fulldepth.skip.exports.formats.checkpoint import Draft, plain_values, save

GRANULARITIES = ("attention", "mlp")


def check(model: PreTrainedModel, skipped: int) -> None:
    """Refuse a family that has no such class.

    Raises:
        FulldepthError: with those that have one.
    """
    family = model.config.get_text_config(decoder=True).model_type
    if family not in SKIPPED:
        raise FulldepthError(
            f"There is no class for {family} models without some of their parts. Available: "
            f"{', '.join(sorted(SKIPPED))}."
        )


def keeps_scalars(model: PreTrainedModel) -> bool:
    """Whether the class multiplies by a plan's scalars itself, as the family's weights cannot hold them."""
    kind: Any = SKIPPED[model.config.model_type]
    return bool(kind.model_class.layout.keeps_scalars)


def write(draft: Draft) -> list[str]:
    """Write a checkpoint of the class without the skipped parts, with its code."""
    family = draft.model.config.model_type
    kind: Any = SKIPPED[family]
    beside = keeps_scalars(draft.model) and heals(draft.plan)
    attention = draft.plan.granularity == "attention"
    layers = sorted(draft.plan.blocks)
    config = kind.config_class(
        **plain_values(draft.model.config),
        skipped_attention=layers if attention else [],
        skipped_mlp=[] if attention else layers,
        stream_scale=None if beside else list(draft.folding.stream_scale),
        scalars=draft.plan.scalars if beside else None,
    )
    with torch.device("meta"):
        known = kind(config).state_dict().keys()
    skipped = tuple(f"{draft.blocks_name}.{layer - 1}." for layer in layers)
    state = draft.weights()
    weights = {name: weight for name, weight in state.items() if name in known or not name.startswith(skipped)}
    save(draft, kind, config, weights)
    return [
        "The scalars are in the configuration: this family's weights cannot hold them."
        if beside
        else "The scalars are in the weights, and each norm's eps follows the scale of the stream that it reads.",
        f"transformers knows {config.model_type} only with trust_remote_code=True; fulldepth.skip.load needs nothing.",
    ]
