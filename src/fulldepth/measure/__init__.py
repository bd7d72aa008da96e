"""`fulldepth measure`: what every layer of a checkpoint does. The room can be called: `fulldepth.measure(...)`."""

from __future__ import annotations

import sys
import types
from typing import Any

from fulldepth.measure.folder import measure_into
from fulldepth.measure.run import measure
from fulldepth.measure.settings import MeasureSettings
from fulldepth.results import Results

__all__ = ["MeasureSettings", "measure", "measure_into"]


class _Verb(types.ModuleType):
    """The module, callable: `fulldepth.measure` is the room once it is imported, and the public function too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Results:
        """See `fulldepth.measure.measure`."""
        return measure(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
