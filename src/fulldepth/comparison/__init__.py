"""`fulldepth compare`: measurements side by side."""

from fulldepth.comparison.run import compare
from fulldepth.settings.compare import CompareSettings

__all__ = ["CompareSettings", "compare"]
