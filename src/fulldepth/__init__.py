"""fulldepth: how much of a Transformer's depth really works.

Names load on first use (PEP 562), so that importing the package, and the command line's help, need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fulldepth.autoclasses import announce

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fulldepth.compare import compare as compare
    from fulldepth.errors import FulldepthError as FulldepthError
    from fulldepth.measure import measure as measure
    from fulldepth.results import Results as Results
    from fulldepth.train import train as train

_HOME = {"FulldepthError": "fulldepth.errors", "Results": "fulldepth.results"}
_ROOMS = (
    "architectures",
    "capture",
    "compare",
    "data",
    "figures",
    "hf",
    "losses",
    "measure",
    "metrics",
    "report",
    "results",
    "skip",
    "train",
)

__all__ = ["FulldepthError", "Results", "__version__", *_ROOMS]


def __getattr__(name: str) -> Any:
    """A public name, or a room, imported when first asked for."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"fulldepth.{name}")
    raise AttributeError(f"module 'fulldepth' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


announce()
