"""The page of results. `fulldepth.reporting` renders it and depends on `Results`, whose methods write and show it.

The package's `__init__` connects the two, so that `results` imports nothing above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Renderer = Callable[[Any], str]
"""Turns `Results` into an HTML document."""
_renderers: list[Renderer] = []


def connect(renderer: Renderer) -> None:
    """Set the function that renders pages."""
    _renderers[:] = [renderer]


def render(results: Any) -> str:
    """The page of `Results` as one HTML document."""
    return _renderers[0](results)
