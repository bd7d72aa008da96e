"""Detects a notebook, without importing IPython."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` in a notebook; None elsewhere, also in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    display: Callable[..., Any] | None = getattr(sys.modules.get("IPython.display"), "display", None)
    return display if hasattr(shell, "kernel") else None
