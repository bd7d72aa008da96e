"""`fulldepth measure`: what every layer of a checkpoint does."""

from fulldepth.measurement.run import measure, measure_into
from fulldepth.settings.measure import MeasureSettings

__all__ = ["MeasureSettings", "measure", "measure_into"]
