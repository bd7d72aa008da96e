"""The tensors in the arguments of a model's blocks, and the selection of some sequences of a batch in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]
"""Indices and keys that lead to a tensor in nested lists, tuples and dictionaries."""


def tensors_in(arguments: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor with its place."""
    if isinstance(arguments, Tensor):
        yield path, arguments
    elif isinstance(arguments, dict):
        for key, value in arguments.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(arguments, list | tuple):
        for index, value in enumerate(arguments):
            yield from tensors_in(value, (*path, index))


def select_rows(arguments: Any, rows: Tensor, places: Collection[Path]) -> Any:
    """A copy of nested arguments with the rows of the tensors at some places; one tensor of several is selected once.

    Args:
        arguments: nested lists, tuples and dictionaries.
        rows: `[B]` bool, or indices.
        places: of the tensors `[B, ...]`.
    """
    selected: dict[int, Tensor] = {}

    def copy(value: Any, path: Path) -> Any:
        if isinstance(value, Tensor) and path in places:
            if id(value) not in selected:
                selected[id(value)] = value[rows]
            return selected[id(value)]
        if isinstance(value, dict):
            return {key: copy(inner, (*path, key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(copy(inner, (*path, index)) for index, inner in enumerate(value))
        return value

    return copy(arguments, ())
