"""Rows of several models in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import pandas as pd

from fulldepth.results import COLUMNS


def joined(tables: Sequence[pd.DataFrame], **types: str) -> pd.DataFrame:
    """Concatenated tables: the tidy columns, then further ones of these types, in this order."""
    table = pd.concat([part.astype(types) for part in tables if len(part)], ignore_index=True)
    return table[[*COLUMNS, *types]]


def spread(measure: str, site: str, values: Sequence[float], unit: str) -> Iterator[tuple[Any, ...]]:
    """Rows of median, minimum and maximum."""
    for statistic, value in (("median", median(values)), ("min", min(values)), ("max", max(values))):
        yield measure, site, None, None, statistic, value, len(values), unit


def with_differences(table: pd.DataFrame, original: str, *keys: str) -> pd.DataFrame:
    """The table with the column `difference`: the value minus the original's, in the row's unit.

    Args:
        table: has the column `model`.
        original: the model that the others are compared with; its own rows get NaN.
        keys: columns that two rows must share to be compared, besides measure, site and statistic.
    """
    shared = ["measure", "site", "statistic", *keys]
    base = table[table["model"] == original][[*shared, "value"]]
    merged = table[[*shared, "value"]].merge(base, on=shared, how="left", suffixes=("", "_original"))
    difference = (merged["value"] - merged["value_original"]).to_numpy(copy=True)
    return table.assign(difference=difference)
