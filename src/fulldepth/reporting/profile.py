"""The strip of layers: displacement, coherence and settled share of every layer, as shades with their numbers."""

from __future__ import annotations

import math
from typing import Any

from fulldepth.figures.style import SEQUENTIAL
from fulldepth.reporting.phrases import plus_minus
from fulldepth.reporting.story import Facts, Values
from fulldepth.thresholds import IDLE

LOWEST, HIGHEST = 0.005, 0.5
"""Displacements of the lightest and the darkest shade; the shades between them are a logarithmic scale."""


def profile(facts: Facts) -> dict[str, Any] | None:
    """The strip of one model at one step; None without displacement.

    `idle` holds the layers that do little, `limit` says what that is. Each of `rows` has `name`, `hint`, the `figure`
    with the same numbers, and for the layers 1..L `shades` (0 to 10, null where there is no value) and `texts`.
    """
    if not facts.displacement:
        return None
    errors = {layer: plus_minus({"standard_error": error}) for layer, error in facts.errors.items()}
    turned = {
        layer: f"displacement {mean:.3f} {errors.get(layer, '')}".strip() for layer, mean in facts.displacement.items()
    }
    coherent = {layer: f"coherence {value:.2f}" for layer, value in facts.coherence.items()}
    settled = {layer: f"{100 * share:.0f} % of predictions settled" for layer, share in facts.settled.items()}
    logarithms = {layer: _logarithmic(mean) for layer, mean in facts.displacement.items()}
    rows = [
        _row("Displacement", "strong = turns far", "displacement", logarithms, turned, facts.layers),
        _row("Coherence", "strong = copies", "coherence", facts.coherence, coherent, facts.layers),
        _row("Settled", "strong = predictions final", "saturation", facts.settled, settled, facts.layers),
    ]
    limit = f"displacement clearly below {IDLE:g}"
    rows = [row for row in rows if any(row["texts"])]
    return {"layers": facts.layers, "idle": facts.idle, "limit": limit, "rows": rows}


def _logarithmic(value: float) -> float:
    """Position of a displacement between `LOWEST` and `HIGHEST` on a logarithmic scale."""
    return math.log(max(value, LOWEST) / LOWEST) / math.log(HIGHEST / LOWEST)


def _row(name: str, hint: str, figure: str, shares: Values, texts: dict[int, str], layers: int) -> dict[str, Any]:
    """One row; `shares` are in [0, 1] and are limited to that range."""
    depths = range(1, layers + 1)
    most = len(SEQUENTIAL) - 1
    shades = [round(most * min(max(shares[at], 0.0), 1.0)) if at in shares else None for at in depths]
    return {
        "name": name,
        "hint": hint,
        "figure": figure,
        "shades": shades,
        "texts": [texts.get(at, "") for at in depths],
    }
