"""Early exit, checkpoints with fewer layers, and self-speculative decoding."""

from fulldepth.execution.decoding import Decoder, Generation
from fulldepth.exit.elastic import LayersExport, export_layers
from fulldepth.exit.generation import Written, generate, generate_texts
from fulldepth.exit.sweep import sweep
from fulldepth.settings.exit import ExitSettings

__all__ = [
    "Decoder",
    "ExitSettings",
    "Generation",
    "LayersExport",
    "Written",
    "export_layers",
    "generate",
    "generate_texts",
    "sweep",
]
