"""fulldepth measures how much of a Transformer's depth works, trains models that use it, and skips blocks.

Names load on first use (PEP 562), so that importing the package and printing help need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fulldepth.api.comparing import compare as compare
    from fulldepth.api.demonstrating import demo as demo
    from fulldepth.api.evaluating import evaluate as evaluate
    from fulldepth.api.measuring import measure as measure
    from fulldepth.api.reporting import report as report
    from fulldepth.api.training import train as train
    from fulldepth.errors import FulldepthError as FulldepthError
    from fulldepth.results import Results as Results

_HOME = {
    "FulldepthError": "errors",
    "Results": "results",
    "compare": "api.comparing",
    "demo": "api.demonstrating",
    "evaluate": "api.evaluating",
    "measure": "api.measuring",
    "report": "api.reporting",
    "train": "api.training",
}
"""Public name -> the subpackage that defines it."""
_ROOMS = (
    "architectures",
    "comparison",
    "data",
    "early_exit",
    "evaluation",
    "execution",
    "exit",
    "hf",
    "losses",
    "measurement",
    "metrics",
    "reporting",
    "results",
    "settings",
    "skip",
    "subjects",
    "training",
)

__all__ = ["__version__", *_HOME, *_ROOMS]


def __getattr__(name: str) -> Any:
    """Import a public name or subpackage on first access."""
    if name in _HOME:
        return getattr(importlib.import_module(f"fulldepth.{_HOME[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"fulldepth.{name}")
    raise AttributeError(f"module 'fulldepth' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
