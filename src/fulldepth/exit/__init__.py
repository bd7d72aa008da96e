"""Leaves a model early: a sweep over rules and thresholds, and checkpoints with fewer layers."""

from fulldepth.exit.elastic import LayersExport, export_layers
from fulldepth.exit.run import sweep, sweep_with
from fulldepth.settings.exit import ExitSettings

__all__ = ["ExitSettings", "LayersExport", "export_layers", "sweep", "sweep_with"]
