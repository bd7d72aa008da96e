"""Name of the cache in calls and outputs of models: `cache` since transformers 5.24, `past_key_values` before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache, the newer first. Mamba's `cache_params` before transformers 5.24 holds no keys and values."""
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})
"""The name that the installed transformers uses for its own models."""


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument by which a model's forward pass takes its cache.

    Args:
        model: a decoder. Code that a checkpoint carries may use another name than the installed transformers.
    """
    return _argument_of(type(model).forward)


@cache
def _argument_of(forward: Callable[..., Any]) -> str:
    """Return what `cache_argument` returns, cached by forward function, because a decoding loop asks at every step."""
    parameters = inspect.signature(forward).parameters
    accepted = [name for name in CACHE_NAMES if name in parameters]
    return CACHE if CACHE in accepted or not accepted else accepted[0]


def cache_in(output: Any) -> Any:
    """Return the cache in a model's output or in arguments of a forward pass; None if there is none."""
    entries = dict(output) if isinstance(output, Mapping) else {}  # `ModelOutput.get` warns about the older name
    return next((entries[name] for name in CACHE_NAMES if entries.get(name) is not None), None)
