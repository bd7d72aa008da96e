"""Checks of the forward passes' arguments: one cache under either of its names, and no argument that is not read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values"))
"""Name of the cache in the installed transformers: `cache` since 5.24, `past_key_values` before."""
HANDED_ON = (
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "num_items_in_batch",
    "is_causal",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)
"""Arguments beyond the signature that `Trainer`, its collators and attention implementations hand on."""
LOSS_ARGUMENTS = ("shift_labels", "ignore_index")
"""Arguments of the loss of a language model, besides `num_items_in_batch`."""


def single_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache that was passed under one of its two names.

    Raises:
        ValueError: if two different caches were passed.
    """
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument; pass one of them")
    return past_key_values if cache is None else cache


def refuse_unknown(model: object, names: Iterable[str], known: Iterable[str] = HANDED_ON) -> None:
    """Refuse arguments of a forward pass that no part of the model reads.

    Raises:
        TypeError: with the names.
    """
    if unknown := sorted(set(names).difference(known)):
        raise TypeError(f"{type(model).__name__}.forward() takes no argument {', '.join(map(repr, unknown))}")


__all__ = ["CACHE", "HANDED_ON", "LOSS_ARGUMENTS", "refuse_unknown", "single_cache"]
