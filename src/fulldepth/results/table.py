"""The table of a result folder: columns and types, a reader for untrusted files, and one value per layer of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from fulldepth.core.errors import FulldepthError, one_line, unknown
from fulldepth.core.files import reading
from fulldepth.results.document import MOST_LAYERS

COLUMNS = ["measure", "site", "layer", "other", "statistic", "value", "count", "unit"]
"""Columns of every table. A series adds `step`; a comparison adds `model`, `difference` and `difference_error`, one of
groups also `seed`, `deviation`, `lower_bound`, `upper_bound` and `p`."""
TEXT = {"measure", "site", "statistic", "unit", "model", "state", "folder"}
REAL = {"value", "difference", "difference_error", "deviation", "lower_bound", "upper_bound", "p"}
WHOLE = {
    **dict.fromkeys(("layer", "other", "removed"), MOST_LAYERS),
    **dict.fromkeys(("count", "batch", "context", "seed"), (1 << 63) - 1),
    "step": 1 << 53,
}
"""Column of whole numbers -> its largest value; the smallest is 0."""
STATED = ("measure", "statistic", "unit", "step")
"""Columns without missing values."""

MOST_BYTES = 2 << 30
"""Largest table: its file, its columns without compression, and its expanded text."""
MOST_ROWS = 20_000_000
MOST_COLUMNS = 100


def tabulate(rows: list[Any], **extra: Any) -> pd.DataFrame:
    """Rows (tuples in the order of `COLUMNS`) as a table with nullable integer columns, plus constant columns."""
    table = pd.DataFrame(rows, columns=COLUMNS)
    for column in ("layer", "other", "count"):
        table[column] = table[column].astype("Int64")
    table["value"] = table["value"].astype("float64")
    for name, value in extra.items():
        table[name] = value
    return table


def stacked(tables: Sequence[pd.DataFrame], **types: str) -> pd.DataFrame:
    """Concatenated tables: the tidy columns, then further ones of these types, in this order."""
    filled = [part for part in tables if len(part)] or [tabulate([], **dict.fromkeys(types))]
    table = pd.concat([part.astype(types) for part in filled], ignore_index=True)
    return table[[*COLUMNS, *types]]


def read_table(path: Path, required: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """The table in a parquet file.

    Args:
        path: the file.
        required: columns that it must have.

    Raises:
        FulldepthError: if it cannot be read, is larger than the limits of this module, lacks a column, or a column
            holds values of the wrong type or out of range.
    """
    if path.stat().st_size > MOST_BYTES:
        raise FulldepthError(f"Cannot read {path}: it is larger than {MOST_BYTES >> 20:,} MiB.")
    with reading(path):
        file = pyarrow.parquet.ParquetFile(path)
        schema = file.schema_arrow
        described = file.metadata
        rows = file.metadata.num_rows
        names: list[str] = schema.names
        size = sum(described.row_group(index).total_byte_size for index in range(described.num_row_groups))
    with file:
        if missing := [column for column in required if column not in names]:
            raise FulldepthError(f"{path} lacks the columns {', '.join(missing)}.")
        if len(names) > MOST_COLUMNS or len(set(names)) < len(names):
            raise FulldepthError(
                f"Cannot read {path}: it has {len(names):,} columns (at most {MOST_COLUMNS}), or a column twice."
            )
        if not (0 <= rows <= MOST_ROWS and 0 <= size <= MOST_BYTES):
            raise FulldepthError(
                f"Cannot read {path}: it declares {rows:,} rows and {size:,} bytes of values, at most {MOST_ROWS:,} "
                f"and {MOST_BYTES:,} are read."
            )
        for name, kind in zip(names, schema.types, strict=True):
            _check_type(path, name, kind, rows)
        with reading(path):
            texts = [name for name, kind in zip(names, schema.types, strict=True) if _is_text(kind)]
            columns = pyarrow.parquet.ParquetFile(path, read_dictionary=texts).read()
            columns.validate(full=True)
    total = 0  # bytes of text after expanding the dictionary, which stores each distinct text once
    for chunk in (chunk for name in texts for chunk in columns[name].chunks):
        lengths = np.asarray(pyarrow.compute.binary_length(chunk.dictionary).fill_null(0), dtype=np.int64)
        counts = np.bincount(chunk.indices.drop_null().to_numpy(), minlength=len(lengths))
        total += int((lengths * counts).sum())
    if total > MOST_BYTES // 2:
        raise FulldepthError(f"Cannot read {path}: it holds {total:,} bytes of text.")
    with reading(path):
        table = pd.DataFrame({name: _series(columns[name], name) for name in names})
    for name in table.columns:
        if name in STATED and table[name].isna().any():
            raise FulldepthError(f"Cannot read {path}: the column {name} has missing values.")
        values = table[name].dropna() if name in WHOLE else pd.Series()
        if len(values) and not 0 <= (worst := values.min() if values.min() < 0 else values.max()) <= WHOLE[name]:
            raise FulldepthError(f"Cannot read {path}: the column {name} holds {worst}, expected 0 to {WHOLE[name]}.")
    return table


def _is_text(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner))


def _check_type(path: Path, name: str, kind: pa.DataType, rows: int) -> None:
    """Refuse a column of the wrong type. Unknown columns may hold numbers or text; empty columns may be untyped."""
    is_kind = {
        "text": _is_text(kind),
        "numbers": pa.types.is_floating(kind),
        "whole numbers": pa.types.is_integer(kind),
        "true and false": pa.types.is_boolean(kind),
    }
    required = "text" if name in TEXT else "numbers" if name in REAL else "whole numbers" if name in WHOLE else None
    empty = pa.types.is_null(kind) and (rows == 0 or name not in (*STATED, *REAL))
    if not (empty or (any(is_kind.values()) if required is None else is_kind[required])):
        expected = required or "numbers or text"
        raise FulldepthError(
            f"Cannot read {path}: the column {one_line(name, 60)} is of type {one_line(kind, 60)}, expected {expected}."
        )


def _series(column: pa.ChunkedArray, name: str) -> pd.Series:
    """A column with the pandas type that `tabulate` gives it."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return column.cast(pa.large_string()).to_pandas()
    if name == "step" or (pa.types.is_null(kind) and name in TEXT):
        return column.to_pandas()
    if name in WHOLE or pa.types.is_integer(kind):
        return column.cast(pa.int64()).to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return column.cast(pa.float64()).to_pandas() if name in REAL else column.to_pandas()


RESIDUAL = "residual"
"""Site of the states between layers."""
NOT_KEYS = {"measure", "statistic", "layer", "count", "unit", *REAL}
"""Columns that do not distinguish rows of one statistic; all others do."""


def select_values(table: pd.DataFrame, measure: str, statistic: str, where: Mapping[str, Any]) -> pd.Series:
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
    required = {name: value for name, value in where.items() if value is not None}
    for name, value in required.items():
        if name not in table.columns:
            raise unknown("column of these results", name, [c for c in table.columns if c not in NOT_KEYS])
        rows = rows[rows[name] == value]
    if rows.empty:
        have = sorted({f"{m} {s}" for m, s in zip(table["measure"], table["statistic"], strict=True)})
        stated = "".join(f", {name} {value!r}" for name, value in required.items())
        raise FulldepthError(f"No rows for {measure} {statistic}{stated}. There are: {', '.join(have)}.")
    if "removed" in rows.columns and bool(rows["removed"].notna().all()):
        index = "removed"
    else:
        index = "step" if "step" in rows.columns and bool(rows["layer"].isna().all()) else "layer"
    if rows[index].duplicated().any():
        names = [name for name in rows.columns if name not in NOT_KEYS | {index}]
        values = {name: rows[name].dropna().unique() for name in names if rows[name].nunique(dropna=False) > 1}
        choices = "; ".join(
            f"{name} is {one_line(', '.join(map(repr, present.tolist())), 200)}" for name, present in values.items()
        )
        # of several sites, suggest the residual stream
        narrowed = required | {
            name: RESIDUAL if RESIDUAL in present else present.tolist()[-1] for name, present in values.items()
        }
        example = ", ".join(f"{name}={value!r}" for name, value in narrowed.items())
        raise FulldepthError(
            f"Several rows of {measure} {statistic} for one {index}: {choices or 'equal rows'}. Choose one, for "
            f"example values({measure!r}, {statistic!r}, {example})."
        )
    return rows.set_index(index)["value"]
