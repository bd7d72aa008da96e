"""`fulldepth compare`: measurements side by side. The room can be called: `fulldepth.compare(...)`."""

from __future__ import annotations

import sys
import types
from typing import Any

from fulldepth.compare.run import compare
from fulldepth.compare.settings import CompareSettings
from fulldepth.results import Results

__all__ = ["CompareSettings", "compare"]


class _Verb(types.ModuleType):
    """The module, callable: `fulldepth.compare` is the room once it is imported, and the public function too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Results:
        """See `fulldepth.compare.compare`."""
        return compare(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb
