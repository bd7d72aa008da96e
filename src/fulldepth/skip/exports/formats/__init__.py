"""Formats of an export, one file each: `GRANULARITIES` of plans that it can hold, `check`, and `write`."""

from fulldepth.skip.exports.formats import decilm, fast, folded, layer
from fulldepth.skip.exports.formats.checkpoint import Draft, as_stock, as_text, without_bars

FORMATS = {"folded": folded, "fast": fast, "decilm": decilm, "layer": layer}
"""Name -> module."""
CARRY_CODE = ("fast", "decilm")
"""Formats whose model is not one of transformers' own."""
TEXT_ALONE = ("fast",)
"""Formats that hold the language model alone of a model that also reads images."""

__all__ = ["CARRY_CODE", "FORMATS", "TEXT_ALONE", "Draft", "as_stock", "as_text", "without_bars"]
