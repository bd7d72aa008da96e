"""Selects one value per layer (or step) from a result table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fulldepth.errors import FulldepthError, names_of, one_line, unknown

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
    index = _index(rows)
    if rows[index].duplicated().any():
        raise FulldepthError(
            f"Several rows of {measure} {statistic} for one {index}: {_choices(rows, index)}. Choose one, for example "
            f"values({measure!r}, {statistic!r}, {_example(rows, index, chosen)})."
        )
    return rows.set_index(index)["value"]


def _index(rows: pd.DataFrame) -> str:
    """`removed` in a curve, `step` for rows without layers over training, else `layer`."""
    if "removed" in rows.columns and bool(rows["removed"].notna().all()):
        return "removed"
    return "step" if "step" in rows.columns and bool(rows["layer"].isna().all()) else "layer"


def _keys(rows: pd.DataFrame, index: str) -> list[str]:
    """Columns with several values (or some missing) among the rows."""
    names = [name for name in rows.columns if name not in NOT_KEYS | {index}]
    return [name for name in names if rows[name].nunique(dropna=False) > 1]


def _choices(rows: pd.DataFrame, index: str) -> str:
    """The columns that distinguish the rows, with their values."""
    values = {name: rows[name].dropna().unique() for name in _keys(rows, index)}
    return "; ".join(f"{name} is {_listed(found)}" for name, found in values.items()) or "equal rows"


def _listed(values: Any) -> str:
    return names_of(values, 200) if isinstance(values[0], str) else one_line(", ".join(map(str, values)), 200)


def _example(rows: pd.DataFrame, index: str, chosen: Mapping[str, Any]) -> str:
    """Arguments that choose one row for each layer; of several sites the stream before the final norm."""
    values = {name: rows[name].dropna().unique() for name in _keys(rows, index)}
    one = dict(chosen) | {name: RESIDUAL if RESIDUAL in found else found[-1] for name, found in values.items()}
    shown = {name: repr(value) if isinstance(value, str) else value for name, value in one.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())
