"""Rows of several models in one table, and their times compared with the original's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import pandas as pd

from fulldepth.results import COLUMNS, Finding
from fulldepth.thresholds import BUSY
from fulldepth.uncertainty import FEWEST_ROUNDS, Ratio


def joined(tables: Sequence[pd.DataFrame], **types: str) -> pd.DataFrame:
    """Concatenated tables: the tidy columns, then further ones of these types, in this order."""
    table = pd.concat([part.astype(types) for part in tables if len(part)], ignore_index=True)
    return table[[*COLUMNS, *types]]


def spread(measure: str, site: str, values: Sequence[float], unit: str) -> Iterator[tuple[Any, ...]]:
    """Rows of median, minimum and maximum."""
    for statistic, value in (("median", median(values)), ("min", min(values)), ("max", max(values))):
        yield measure, site, None, None, statistic, value, len(values), unit


def ratio_rows(phase: str, ratio: Ratio, rounds: int) -> Iterator[tuple[Any, ...]]:
    """Rows of `time_ratio`, the time over the original's: median over the rounds, ends of its interval if any."""
    for statistic, value in (("median", ratio.value), ("low", ratio.low), ("high", ratio.high)):
        if math.isfinite(value):
            yield "time_ratio", phase, None, None, statistic, value, rounds, "1"


def compared(ratio: Ratio, rounds: int) -> str:
    """A time compared with the original's, as the end of a sentence."""
    if not math.isfinite(ratio.low):
        enough = f"an interval takes {FEWEST_ROUNDS} rounds, this is {rounds}"
        return f"{ratio.value:.3f} times the original's ({enough})"
    if not ratio.differs:
        return f"no measurable difference from the original's (at most {max(ratio.high - 1, 1 - ratio.low):.1%})"
    return f"{ratio.value:.3f} times the original's (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"


def busy(other_load: float) -> Finding | None:
    """The finding in place of comparisons of times if other programs used more than `BUSY` of the processor."""
    if other_load <= BUSY:
        return None
    text = f"The machine was busy: other programs used {other_load:.0%} of its processor. Times are not compared."
    return Finding(None, "1", text)


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
