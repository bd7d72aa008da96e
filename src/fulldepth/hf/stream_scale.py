"""`stream_scale`: the factor by which folding divided a checkpoint's residual stream, as its configuration states it.

Folding (`skip.exports.fold`) multiplies scalars into weights, and leaves a stream `x / c`, where x is the stream of the
plan's model, with its scalars outside the weights. c_0..c_L stand in the configuration, which every later save keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import read_json

ENTRY = "fulldepth_stream_scale"
"""Entry of a configuration: c_0..c_L, such that the states h_0..h_L are those of the plan's model over c. Absent: 1."""
GGUF_ENTRY = "fulldepth.stream_scale"
"""The same in the metadata of a GGUF file."""
EXPORT_NOTES = "fulldepth_skip.json"
"""File of an export with its format, error, notes and plan."""
MOST_BYTES = 256 << 20
"""Largest such file."""


def write_stream_scale(config: Any, scale: Sequence[float]) -> None:
    """State c_0..c_L in the configuration of a language model (of a model with several parts, in that of its text)."""
    text = config.get_text_config(decoder=True)
    if any(factor != 1 for factor in scale):
        setattr(text, ENTRY, [float(factor) for factor in scale])
    else:
        vars(text).pop(ENTRY, None)


def stream_scale(config: Any, num_layers: int) -> tuple[float, ...]:
    """Return c_0..c_L as a configuration states them; 1 where it states none.

    Raises:
        FulldepthError: unless they are L + 1 numbers above 0.
    """
    text = config.get_text_config(decoder=True)
    scale = [1.0] * (num_layers + 1)
    # In our class without skipped blocks (`fast`) c stands at every norm: before attention and MLP, and at the end.
    for stated in (getattr(text, ENTRY, None), (getattr(text, "stream_scale", None) or [])[::2] or None):
        if stated is None:
            continue
        numbers = isinstance(stated, list | tuple) and all(
            isinstance(factor, int | float) and math.isfinite(factor) and factor > 0 for factor in stated
        )
        if not numbers or len(stated) != num_layers + 1:
            raise FulldepthError(
                f"The scale of the stream in the configuration ({ENTRY}) is {one_line(repr(stated), 80)}; expected "
                f"{num_layers + 1} numbers above 0, for the embeddings and {num_layers} layers."
            )
        scale = [factor * further for factor, further in zip(scale, stated, strict=True)]
    return tuple(scale)


def cut_stream_scale(entries: Mapping[str, Any], remaining: Sequence[int]) -> dict[str, list[float]]:
    """Return the entries of a configuration that state scales, cut to some of the layers (1-based)."""
    cut = {}
    if isinstance(scale := entries.get("stream_scale"), list):
        cut["stream_scale"] = scale[: 2 * len(remaining) + 1]  # the class has no checkpoint of other layers
    if isinstance(scale := entries.get(ENTRY), list):
        cut[ENTRY] = [scale[layer] for layer in (0, *remaining)]
    return cut


def known_stream_scale(place: Path, config: Any, num_layers: int) -> tuple[float, ...]:
    """Return c_0..c_L of a checkpoint; 1 for one that was not folded.

    Args:
        place: the checkpoint's folder or file.
        config: its configuration.
        num_layers: L.

    Raises:
        FulldepthError: if it is an export with folded scalars that does not state its scale (made by an older version),
            or as `stream_scale`.
    """
    scale = stream_scale(config, num_layers)
    notes = place / EXPORT_NOTES
    if any(factor != 1 for factor in scale) or getattr(config, "scalars", None) or not notes.is_file():
        return scale
    plan = read_json(notes, most=MOST_BYTES).get("plan")
    scalars = plan.get("scalars") if isinstance(plan, Mapping) else None
    by_layer = scalars.values() if isinstance(scalars, Mapping) else ()
    if any(factor != 1 for factors in by_layer if isinstance(factors, Mapping) for factor in factors.values()):
        raise FulldepthError(
            f"{place} is an export with scalars folded into its weights, which rescale the residual stream. It does "
            "not state by how much, so its states cannot be compared with another model's. Export the plan again "
            "(`fulldepth skip apply`, or `skip heal`), or measure the plan in place (`fulldepth.skip.skipping`)."
        )
    return scale
