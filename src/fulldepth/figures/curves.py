"""Extracts curves from the tidy table; missing rows give nothing, NaN gives a gap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

NO_FIRST = ":no-first"
"""Suffix of statistics taken without each sequence's first token."""


@dataclass(frozen=True)
class Curve:
    """One statistic over layers. False if no layer has a finite value."""

    layers: list[int]
    values: list[float | None]
    counts: list[str]
    """Number of observations of each value as text; "?" if unknown."""

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values)

    @property
    def custom(self) -> list[list[str]]:
        """`[[layer name, count], ...]` for hover boxes."""
        names = ["Embeddings" if layer == 0 else f"Layer {layer}" for layer in self.layers]
        return [[name, count] for name, count in zip(names, self.counts, strict=True)]


def number(value: Any) -> float | None:
    """A finite float, or None."""
    if pd.isna(value):
        return None
    real = float(value)
    return real if math.isfinite(real) else None


def counted(value: Any) -> str:
    """A count with thousands separators; "?" if missing."""
    return "?" if pd.isna(value) else f"{int(value):,}"


def select(table: pd.DataFrame, measure: str, statistic: str | None = None, site: str | None = None) -> pd.DataFrame:
    """The rows of one measure, and of one statistic and site if given."""
    keep = table["measure"] == measure
    if statistic is not None:
        keep &= table["statistic"] == statistic
    if site is not None:
        keep &= table["site"] == site
    return table[keep]


def curve(
    table: pd.DataFrame,
    measure: str,
    statistic: str,
    site: str | None = "residual",
    other: int | None = None,
    column: str = "value",
) -> Curve:
    """A statistic by layer, ascending; `other` is the second layer if the rows are pairs."""
    rows = select(table, measure, statistic, site)
    if other is not None:
        rows = rows[(rows["other"] == other).fillna(False).astype(bool)]
    rows = rows.dropna(subset=["layer"]).drop_duplicates("layer", keep="last").sort_values("layer")
    return Curve(
        [int(layer) for layer in rows["layer"]],
        [number(value) for value in rows[column]],
        [counted(count) for count in rows["count"]],
    )


def num_layers(table: pd.DataFrame, model: Mapping[str, Any] | None) -> int:
    """L, from the model's entry or else from the table."""
    stated = (model or {}).get("num_layers")
    if isinstance(stated, int) and stated > 0:
        return stated
    deepest = table["layer"].max()
    return 1 if pd.isna(deepest) else max(int(deepest), 1)
