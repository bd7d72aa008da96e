"""Early exit, checkpoints with fewer layers, and self-speculative decoding."""

from fulldepth.execution.decoding import Decoder, Generation, generate
from fulldepth.exit.elastic import LayersExport, export_layers
from fulldepth.exit.run import sweep, sweep_with
from fulldepth.settings.exit import ExitSettings

__all__ = [
    "Decoder",
    "ExitSettings",
    "Generation",
    "LayersExport",
    "export_layers",
    "generate",
    "sweep",
    "sweep_with",
]
