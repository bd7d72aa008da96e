"""Export formats."""

from fulldepth.skip.exports.formats.checkpoint import SHARD_SIZE, Draft, as_stock, as_text
from fulldepth.skip.exports.formats.decilm import DeciLM
from fulldepth.skip.exports.formats.fast import Fast
from fulldepth.skip.exports.formats.format import Folded, Format, Layer

FORMATS: dict[str, Format] = {format.name: format for format in (Folded(), Fast(), DeciLM(), Layer())}
"""Name -> format."""

__all__ = ["FORMATS", "SHARD_SIZE", "Draft", "Format", "as_stock", "as_text"]
