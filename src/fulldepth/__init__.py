"""fulldepth measures how much of a Transformer's depth works, trains models that use it, and skips blocks.

Names load on first use (PEP 562), so that importing the package and printing help need no torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from fulldepth.core.tested_versions import untested_warning

__version__ = "0.2.0.dev0"

if (_message := untested_warning()) is not None:
    warnings.warn(_message, stacklevel=2)

if TYPE_CHECKING:
    from fulldepth.cli.demo import demo as demo
    from fulldepth.core.errors import FulldepthError as FulldepthError
    from fulldepth.evaluation import evaluate as evaluate
    from fulldepth.measurement import lens as lens
    from fulldepth.measurement import measure as measure
    from fulldepth.results import Results as Results
    from fulldepth.results import compare as compare
    from fulldepth.results import report as report
    from fulldepth.skip.heal import heal as heal
    from fulldepth.training import train as train

_HOME = {
    "FulldepthError": "core.errors",
    "Results": "results",
    "compare": "results",
    "demo": "cli.demo",
    "evaluate": "evaluation",
    "heal": "skip.heal",
    "lens": "measurement",
    "measure": "measurement",
    "report": "results",
    "train": "training",
}
"""Public name -> the subpackage that defines it."""
_ROOMS = (
    "architectures",
    "core",
    "data",
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
    "subject",
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
