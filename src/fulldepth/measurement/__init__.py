"""`fulldepth measure`: what every layer of a checkpoint does."""

from fulldepth.measurement.run import lens, measure, measure_into
from fulldepth.settings.measure import LensSettings, MeasureSettings

__all__ = ["LensSettings", "MeasureSettings", "lens", "measure", "measure_into"]
