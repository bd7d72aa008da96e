"""Configuration entries that announce layers which transformers does not load and exports do not hold."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedConfig

from fulldepth.hf.anatomy import config_parts

PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Entries with the number of further layers that predict more than the next token, as families name them."""
MARKS = ("mtp", "nextn")
"""Parts of the names of such layers' weights."""


def withdraw_promises(config: PreTrainedConfig, weights: Iterable[str]) -> list[str]:
    """Set the number of layers for multi-token prediction to 0 where a model holds none, in place.

    Args:
        config: configuration of the model to write; its parts are changed, too.
        weights: names of the model's weights.

    Returns:
        A sentence for each entry that changed.
    """
    if any(mark in part for name in weights for part in name.split(".") for mark in MARKS):
        return []
    notes = []
    for name in PREDICTORS:
        for part in config_parts(config).values():
            if name in vars(part) and getattr(part, name):
                setattr(part, name, 0)
                notes.append(f"The layers for multi-token prediction are not part of this model: {name} is now 0.")
    return sorted(set(notes))
