"""Export formats."""

from fulldepth.errors import unknown
from fulldepth.skip.exports.formats.checkpoint import SHARD_SIZE, Draft, as_stock, as_text
from fulldepth.skip.exports.formats.decilm import DeciLM
from fulldepth.skip.exports.formats.fast import Fast
from fulldepth.skip.exports.formats.format import Folded, Format, Layer

FORMATS: dict[str, Format] = {format.name: format for format in (Folded(), Fast(), DeciLM(), Layer())}
"""Name -> format."""


def known_format(name: str) -> str:
    """Return the name of an export format.

    Raises:
        FulldepthError: if there is no such format.
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return name


__all__ = ["FORMATS", "SHARD_SIZE", "Draft", "Format", "as_stock", "as_text", "known_format"]
