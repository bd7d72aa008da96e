"""Damages result folders at random, by a seed: in the document, in the table, or in the bytes of either."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fulldepth.results import DOCUMENT, TABLE, Results


class Literal(str):
    """Text that stands in the document as it is, without quotation marks."""


def nested(depth: int) -> Any:
    value: Any = []
    for index in range(depth):
        value = {"a": value} if index % 2 else [value]
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, -5, 1, 7, 1000, 1025, 10**9, 2**53, 2**63, 10**30, 10**99, 0.5, -0.0, 1e-320, 1e308,
    -1e308, "", "x", "5", "NaN", "x" * 5000, "\x00\u202e<script>", "{0}%{x}", [], {}, [1, "a", None], [[]], [{}],
    {"a": 1}, {"": None}, {"__proto__": 1}, nested(20), nested(80), [0] * 300, Literal("NaN"), Literal("1e999"),
    Literal("Infinity"), Literal("9" * 5000), Literal('"\\ud800"'), Literal("{]"),
    "measure", "training", "comparison", "skip", "curve", "bench", "quantise", "skips", "relative",
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a document, at most three of each list."""
    found = [at]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*at, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) // 2, len(value) - 1}) if value else ():
            found += places(value[index], (*at, index))
    return found


def damaged_document(document: dict[str, Any], draw: random.Random) -> str:
    """The document with one to three other values, as text."""
    value: Any = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        paths = [path for path in places(value) if path]
        by_depth = draw.choice(sorted({len(path) for path in paths}) or [0])
        candidates = [path for path in paths if len(path) == by_depth]
        if not candidates:
            break
        *inner, last = draw.choice(candidates)
        parent = value
        for key in inner:
            parent = parent[key]
        action = draw.random()
        if action < 0.12:
            del parent[last]
        elif action < 0.2 and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        elif action < 0.3:
            other: Any = value
            for key in draw.choice(paths):
                other = other[key]
            parent[last] = copy.deepcopy(other)
        else:
            kind = type(parent[last])
            alike = [one for one in VALUES if type(one) is kind or one is None]
            parent[last] = copy.deepcopy(draw.choice(alike if draw.random() < 0.5 else VALUES))
    return written(value)


def written(value: Any) -> str:
    """A document as text, with its literals."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(written(inner) for inner in value) + "]"
    return json.dumps(value)


CELLS = (None, 0, -1, -5, 1, 1000, 1024, 1025, 10**9, 2**53, 2**53 + 1, 2**62)
NUMBERS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e308, -1e308, 1e-320)
WORDS = (None, "", "x", "mean", "displacement", "cka", "residual", "model", "x" * 3000, "mean:a:b", "\x00", "base")


def damaged_table(table: pd.DataFrame, draw: random.Random) -> pa.Table:
    """The table with other values, or with other columns."""
    table = table.reset_index(drop=True).copy()
    name = draw.choice(list(table.columns))
    count = max(1, round(len(table) * draw.choice((0.001, 0.05, 1.0))))
    few = draw.sample(range(len(table)), k=min(count, len(table)))
    action = draw.randrange(9)
    if action == 0:
        table = table.drop(columns=name)
    elif action == 1:
        other = draw.choice(("x", "step", "model", "x" * 9000, "", "value"))
        table = table.drop(columns=other, errors="ignore").rename(columns={name: other})
    elif action == 2:
        table = table.iloc[: draw.choice((0, 1, len(table) // 2))]
    elif action == 3:
        table = pd.concat([table, table.iloc[few]]).sample(frac=1, random_state=draw.randrange(1000))
    elif action == 4:
        table[draw.choice(("step", "model", "difference", "removed", "state", "batch", "folder", "new"))] = draw.choice(
            (1, "x", 0.5, True, None)
        )
    elif action < 7:
        table = _other_cells(table, name, few, draw)
    made = pa.Table.from_pandas(table, preserve_index=False)
    if action >= 7 and name in made.column_names:
        made = made.set_column(made.column_names.index(name), name, _other_type(made[name], draw))
    return made


def _other_cells(table: pd.DataFrame, name: str, rows: list[int], draw: random.Random) -> pd.DataFrame:
    """Other values of the same type in some rows of a column."""
    if pd.api.types.is_integer_dtype(table[name]):
        table[name] = table[name].astype("Int64")
        table.loc[rows, name] = draw.choice(CELLS)
    elif pd.api.types.is_float_dtype(table[name]):
        table.loc[rows, name] = draw.choice(NUMBERS)
    else:
        table[name] = table[name].astype(object)
        table.loc[rows, name] = draw.choice(WORDS)
    return table


def _other_type(column: pa.ChunkedArray, draw: random.Random) -> pa.Array:
    """A column of the same length and another type."""
    count = len(column)
    return draw.choice(
        (
            lambda: pa.nulls(count),
            lambda: pa.array(["7"] * count),
            lambda: pa.array(["7"] * count).dictionary_encode(),
            lambda: pa.array(np.full(count, 7.5)),
            lambda: pa.array(np.full(count, 2**64 - 1, dtype=np.uint64)),
            lambda: pa.array([[1, 2]] * count, type=pa.list_(pa.int64())),
            lambda: pa.array([{"a": 1}] * count, type=pa.struct([("a", pa.int64())])),
            lambda: pa.array([b"\xff"] * count),
            lambda: pa.array([True] * count),
            lambda: pa.array([0] * count, type=pa.timestamp("ns")),
            lambda: pa.array([None] * count, type=pa.decimal128(38, 2)),
        )
    )()


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut, or with a few other bytes, or with a piece of itself somewhere else."""
    if not content:
        return b"x"
    if draw.random() < 0.3:
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.choice((1, 3, 30))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def damage(results: Results, folder: Path, draw: random.Random) -> str:
    """Write results into a folder, damage them there, and say how."""
    results.save(folder, page=False)
    document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
    if draw.random() < 0.9:
        del document["table"]  # an earlier version's: the table is read whatever it holds
        (folder / DOCUMENT).write_text(json.dumps(document), encoding="utf-8")
    how = draw.choice(("document", "document", "document", "table", "table", "bytes"))
    if how == "document":
        (folder / DOCUMENT).write_text(damaged_document(document, draw), encoding="utf-8")
    elif how == "table":
        pq.write_table(damaged_table(results.table, draw), folder / TABLE)
    else:
        path = folder / draw.choice((DOCUMENT, TABLE))
        path.write_bytes(damaged_bytes(path.read_bytes(), draw))
    return how
