"""`fulldepth compare`: differences between measurements, or between training runs."""

from fulldepth.comparison.run import compare
from fulldepth.settings.compare import CompareSettings

__all__ = ["CompareSettings", "compare"]
