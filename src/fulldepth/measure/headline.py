"""The few numbers to look at first, each with one plain sentence."""

from __future__ import annotations

from typing import Any

import pandas as pd

LARGE_JUMP = 10.0
"""Per cent from which the JREG paper calls a jump large."""
COPY, NOISE = 0.7, 0.3
"""Mean coherence above which a sub-layer mostly copies its input, and below which little of it is left."""


def headline(table: pd.DataFrame, num_layers: int) -> dict[str, dict[str, Any]]:
    """Name -> {value, unit, sentence}, for what was measured.

    Args:
        table: rows of one model.
        num_layers: L.
    """
    found: dict[str, dict[str, Any]] = {}
    _jumps(found, table, num_layers)
    _displacement(found, table, num_layers)
    _coherence(found, table)
    _saturation(found, table, num_layers)
    _effective_depth(found, table, num_layers)
    return {name: entry for name, entry in found.items() if entry["value"] == entry["value"]}


def _value(
    table: pd.DataFrame, measure: str, statistic: str, layer: int | None = None, site: str | None = None
) -> float:
    """One number of the table; NaN where it was not measured."""
    rows = table[(table.measure == measure) & (table.statistic == statistic)]
    if layer is not None:
        rows = rows[rows.layer == layer]
    if site is not None:
        rows = rows[rows.site == site]
    return float(rows.value.iloc[0]) if len(rows) else float("nan")


def _jumps(found: dict[str, dict[str, Any]], table: pd.DataFrame, num_layers: int) -> None:
    for back, name in enumerate(("zeta_L", "zeta_L-1", "zeta_L-2")):
        layer = num_layers - back
        value = _value(table, "jump_rate", "value", layer)
        size = "a large jump" if value >= LARGE_JUMP else "no large jump"
        if back == 0:
            sentence = f"The last layer displaces {value:.1f} percentage points more than the one before: {size}."
        else:
            sentence = f"From layer {layer} on, displacement grows by {value:.1f} percentage points in all: {size}."
        found[name] = {"value": value, "unit": "%", "sentence": sentence}


def _displacement(found: dict[str, dict[str, Any]], table: pd.DataFrame, num_layers: int) -> None:
    value = _value(table, "displacement", "mean", num_layers, "residual")
    others = table[(table.measure == "displacement") & (table.statistic == "mean") & (table.site == "residual")]
    middle = float(others[others.layer < num_layers].value.median()) if len(others) > 1 else float("nan")
    sentence = f"The last layer's displacement is {value:.3f} (0 = copies its input, 0.5 = turns it to a right angle)"
    sentence += f"; the layers before it have a median of {middle:.3f}." if middle == middle else "."
    found["last_layer_displacement"] = {"value": value, "unit": "1", "sentence": sentence}


def _coherence(found: dict[str, dict[str, Any]], table: pd.DataFrame) -> None:
    rows = table[(table.measure == "coherence") & (table.statistic == "mean") & (table.site == "residual")]
    value = float(rows.value.mean()) if len(rows) else float("nan")
    kind = "mostly copies" if value >= COPY else "little is kept" if value <= NOISE else "effective work in between"
    sentence = f"A layer's output coheres with its input at {value:.2f} on average (1 = copy, 0 = noise): {kind}."
    found["mean_coherence"] = {"value": value, "unit": "1", "sentence": sentence}


def _saturation(found: dict[str, dict[str, Any]], table: pd.DataFrame, num_layers: int) -> None:
    rows = table[(table.measure == "saturation") & (table.statistic == "cumulative")].sort_values("layer")
    settled = rows[rows.value >= 0.5]
    value = float(settled.layer.iloc[0]) if len(settled) else float("nan")
    sentence = f"Half of the predictions are settled by layer {value:.0f} of {num_layers} and change no more."
    found["median_saturation"] = {"value": value, "unit": "layers", "sentence": sentence}


def _effective_depth(found: dict[str, dict[str, Any]], table: pd.DataFrame, num_layers: int) -> None:
    value = _value(table, "effective_depth", "relative_eps=0.05")
    absolute = _value(table, "effective_depth", "eps=0.05")
    sentence = (
        f"Layer {value:.0f} of {num_layers} already reaches 95 % of the last layer's accuracy; "
        f"an accuracy of 95 % is reached at layer {absolute:.0f} (by definition L = {num_layers} if never)."
    )
    found["effective_depth"] = {"value": value, "unit": "layers", "sentence": sentence}
