"""Influences of groups of clusters on the numbers of a result; they give the errors of paired differences.

The file `groups.parquet` has the key columns of a row of the table (`KEYS`, in a series also `step`) and one float
column for each group, `group_0` to `group_{G-1}`: what the group adds to the deviation of the row's value, in the
value's unit (`fulldepth.core.uncertainty`). Results with the same clusters have the same groups, so their influences
subtract. The entry `groups` of the document identifies the clusters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import sha256_of
from fulldepth.core.uncertainty import GROUPS
from fulldepth.results import table

KEYS = ["measure", "site", "layer", "other", "statistic"]
"""Columns that an entry shares with the row of its value."""


def groups_of(influences: pd.DataFrame) -> list[str]:
    """Names of the columns of groups."""
    return [name for name in influences.columns if name not in (*KEYS, "step")]


def gathered(entries: Iterable[tuple[Any, ...]], groups: int) -> pd.DataFrame | None:
    """Entries (tuples in the order of `KEYS`, then influences) as a table; None without entries.

    Influences are kept in float32, which is precise to 1e-7 of an influence.

    Args:
        entries: the entries. A measure may have influences of the first groups only; those of the others become NaN.
        groups: number of groups G.
    """
    entries = list(entries)
    if not entries:
        return None
    frame = pd.DataFrame([entry[:-1] for entry in entries], columns=KEYS)
    for column in ("layer", "other"):
        frame[column] = frame[column].astype("Int64")
    values = np.full((len(entries), groups), np.nan, dtype=np.float32)
    for row, entry in zip(values, entries, strict=True):
        row[: len(entry[-1])] = entry[-1]
    return frame.join(pd.DataFrame(values, columns=[f"group_{group}" for group in range(groups)]))


def groups_entry(clusters: Collection[int], unit: str, text: str = "") -> dict[str, Any]:
    """The entry `groups` of a document.

    Args:
        clusters: identity of the cluster of each sequence.
        unit: name of a cluster, such as `document`.
        text: hash of the text, needed if identities are unique only within a text.

    Returns:
        `count` (number of groups), `unit`, `clusters` (their number), and `hash`: equal for two results whose clusters
        are the same, and which therefore have the same groups.
    """
    present = np.unique(np.asarray(list(clusters), dtype=np.uint64))
    digest = sha256_of(text.encode() + present.astype("<u8").tobytes())
    return {"count": min(len(present), GROUPS), "unit": unit, "clusters": len(present), "hash": f"sha256:{digest}"}


def joined_influences(parts: Iterable[tuple[Mapping[str, Any], pd.DataFrame | None]]) -> pd.DataFrame | None:
    """The influences of several results, given as (document, influences), as one table.

    None unless all have influences of the same groups.
    """
    parts = list(parts)
    frames = [frame for _, frame in parts if frame is not None]
    hashes = {(meta.get("groups") or {}).get("hash") for meta, _ in parts}
    return pd.concat(frames, ignore_index=True) if len(frames) == len(parts) and len(hashes) == 1 else None


def read_influences(path: Path) -> pd.DataFrame:
    """The influences in a file.

    Raises:
        FulldepthError: if it cannot be read, exceeds the limits of `fulldepth.results.table`, lacks a column, or has
            columns that are not numbers of groups in order.
    """
    frame = table.read_table(path, KEYS)
    groups = groups_of(frame)
    if len(groups) > GROUPS or groups != [f"group_{group}" for group in range(len(groups))]:
        listed = one_line(", ".join(groups), 200) or "none"
        raise FulldepthError(f"Cannot read {path}: expected columns group_0, group_1, ... of groups, got {listed}.")
    if unreal := [name for name in groups if not pd.api.types.is_float_dtype(frame[name])]:
        raise FulldepthError(f"Cannot read {path}: the column {unreal[0]} is not of floating-point numbers.")
    if frame.duplicated([name for name in (*KEYS, "step") if name in frame.columns]).any():
        raise FulldepthError(f"Cannot read {path}: it has several entries for one number.")
    return frame
