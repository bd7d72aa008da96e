"""Packs the result table by columns for the browser: distinct strings once, floats in full precision."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

MAX_ROWS = 60_000
"""Maximum number of rows on a page (about 0.8 MB, compressed); pairs of layers are dropped first."""
MAX_STRING = 1000


def pack(table: pd.DataFrame, limit: int = MAX_ROWS) -> dict[str, Any]:
    """`columns`: name -> `{"values": [...], "codes": [...]}` for strings, a list with nulls for numbers.

    `rows` is the number of rows kept, `total` that of the table; `left_out` states which are missing.
    """
    rows, missing = table, ""
    if len(rows) > limit:
        rows, missing = rows[rows["other"].isna()], "Pairs of layers are not among them."
    if len(rows) > limit:
        rows, missing = rows.tail(limit), f"Only the last {limit:,} rows without pairs of layers are among them."
    columns = {str(name): _column(rows[name]) for name in rows.columns}
    return {"columns": columns, "rows": len(rows), "total": len(table), "left_out": missing}


def _column(column: pd.Series) -> Any:
    if pd.api.types.is_float_dtype(column) and not isinstance(column.dtype, pd.Float64Dtype):
        return [value if math.isfinite(value) else None for value in column.tolist()]
    if pd.api.types.is_numeric_dtype(column):
        return [None if pd.isna(value) else value for value in column.tolist()]
    codes, values = pd.factorize(column)
    return {"values": [str(value)[:MAX_STRING] for value in values], "codes": [int(code) for code in codes]}
