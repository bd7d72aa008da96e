"""Formats of an export, one file each: `GRANULARITIES` of plans that it can hold, `check`, and `write`."""

from transformers import PreTrainedModel

from fulldepth.skip.exports.formats import decilm, fast, folded, layer
from fulldepth.skip.exports.formats.checkpoint import SHARD_SIZE, Draft, as_stock, as_text, without_bars

FORMATS = {"folded": folded, "fast": fast, "decilm": decilm, "layer": layer}
"""Name -> module."""
CARRY_CODE = ("fast", "decilm")
"""Formats whose model is not one of transformers' own."""
TEXT_ALONE = ("fast",)
"""Formats that hold the language model alone of a model that also reads images."""


def in_forward(model: PreTrainedModel, format: str) -> bool:
    """Whether a format keeps the scalars of a stock model beside its weights, so that nothing is folded."""
    return format == "fast" and fast.keeps_scalars(model)


__all__ = [
    "CARRY_CODE",
    "FORMATS",
    "SHARD_SIZE",
    "TEXT_ALONE",
    "Draft",
    "as_stock",
    "as_text",
    "in_forward",
    "without_bars",
]
