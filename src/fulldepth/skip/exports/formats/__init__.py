"""Formats of an export, one file each: `GRANULARITIES` of plans that it can hold, `check`, and `write`."""

from fulldepth.skip.exports.formats import decilm, fast, folded, layer
from fulldepth.skip.exports.formats.checkpoint import SHARD_SIZE, Draft, as_stock, without_bars

FORMATS = {"folded": folded, "fast": fast, "decilm": decilm, "layer": layer}
"""Name -> module."""
CARRY_CODE = ("fast", "decilm")
"""Formats whose model is not one of transformers' own."""

__all__ = ["CARRY_CODE", "FORMATS", "SHARD_SIZE", "Draft", "as_stock", "without_bars"]
