"""Selects one value per layer (or step) from a result table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fulldepth.errors import FulldepthError, one_line, unknown

RESIDUAL = "residual"
"""Site of the states between layers."""
NOT_KEYS = {"measure", "statistic", "layer", "value", "count", "unit", "difference", "difference_error"}
"""Columns that do not distinguish rows of one statistic; all others do."""


def select(table: pd.DataFrame, measure: str, statistic: str, where: Mapping[str, Any]) -> pd.Series:
    """The values of one statistic by layer; without layers by step of a training, in a removal curve by `removed`.

    Args:
        table: tidy rows.
        measure: name in the column `measure`.
        statistic: name in the column `statistic`.
        where: column -> required value; None = any.

    Raises:
        FulldepthError: if there is no such row or column, or a layer has several rows.
    """
    rows = table[(table["measure"] == measure) & (table["statistic"] == statistic)]
    chosen = {name: value for name, value in where.items() if value is not None}
    for name, value in chosen.items():
        if name not in table.columns:
            raise unknown("column of these results", name, [c for c in table.columns if c not in NOT_KEYS])
        rows = rows[rows[name] == value]
    if rows.empty:
        have = sorted({f"{m} {s}" for m, s in zip(table["measure"], table["statistic"], strict=True)})
        stated = "".join(f", {name} {value!r}" for name, value in chosen.items())
        raise FulldepthError(f"No rows for {measure} {statistic}{stated}. There are: {', '.join(have)}.")
    if "removed" in rows.columns and bool(rows["removed"].notna().all()):
        index = "removed"
    else:
        index = "step" if "step" in rows.columns and bool(rows["layer"].isna().all()) else "layer"
    if rows[index].duplicated().any():
        names = [name for name in rows.columns if name not in NOT_KEYS | {index}]
        values = {name: rows[name].dropna().unique() for name in names if rows[name].nunique(dropna=False) > 1}
        choices = "; ".join(
            f"{name} is {one_line(', '.join(map(repr, found.tolist())), 200)}" for name, found in values.items()
        )
        # of several sites the stream before the final norm
        one = chosen | {name: RESIDUAL if RESIDUAL in found else found.tolist()[-1] for name, found in values.items()}
        example = ", ".join(f"{name}={value!r}" for name, value in one.items())
        raise FulldepthError(
            f"Several rows of {measure} {statistic} for one {index}: {choices or 'equal rows'}. Choose one, for "
            f"example values({measure!r}, {statistic!r}, {example})."
        )
    return rows.set_index(index)["value"]
