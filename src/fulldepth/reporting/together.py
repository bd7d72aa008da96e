"""Combines several result folders into one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from fulldepth.errors import FulldepthError
from fulldepth.figures.skip_results import KINDS, TOGETHER
from fulldepth.results import COLUMNS, SCHEMA_VERSION, TABLE, Results

NAMES = {"measure": "measurement", "training": "training run", "comparison": "comparison"}
"""Kind of a folder not in `KINDS` -> description of its content."""


def together(folders: Sequence[str | Path]) -> Results:
    """The folders combined: kind `skips`, rows with the column `folder`, the documents in `parts`.

    Searches come first, then curves, benchmarks and quantisations; folders of one kind keep their order.

    Raises:
        FulldepthError: if a folder is named twice or cannot be read, if one is not a result of `fulldepth skip`, or if
            they are about different models.
    """
    paths = [Path(folder) for folder in folders]
    for index, path in enumerate(paths):
        if any(path.resolve() == other.resolve() for other in paths[:index]):
            raise FulldepthError(f"{path} is named twice.")
    loaded = [(label, Results.load(path)) for label, path in zip(names(paths), paths, strict=True)]
    _check(loaded)
    loaded.sort(key=lambda item: KINDS.index(item[1].meta["kind"]))
    tables = [results.table.assign(folder=label) for label, results in loaded]
    columns = [*COLUMNS, *dict.fromkeys(name for table in tables for name in table.columns if name not in COLUMNS)]
    rows = pd.concat([table.dropna(axis=1, how="all") for table in tables], ignore_index=True)
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": TOGETHER,
        "parts": [{**results.meta, "label": label} for label, results in loaded],
    }
    return Results(rows.reindex(columns=columns).astype(_types(tables)), document)


def names(paths: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that are unique."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path.resolve()) for path in paths]


def rows_of(paths: Sequence[Path]) -> str:
    """One sentence on which files hold the rows of a page."""
    *others, last = names(paths)
    if not others:
        return f"The file {TABLE} in {last} holds all of them."
    return f"The files {TABLE} in {', '.join(others)} and {last} hold all of them."


def _types(tables: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """Types that keep integer columns integer although some folders lack them."""
    integers = (name for table in tables for name in table.columns if pd.api.types.is_integer_dtype(table[name].dtype))
    return {**dict.fromkeys(integers, "Int64"), "value": "float64"}


def _check(loaded: Sequence[tuple[str, Results]]) -> None:
    """Raise if the folders cannot share a page."""
    for label, results in loaded:
        kind = str(results.meta.get("kind"))
        if kind not in KINDS:
            advice = " `fulldepth compare` puts such folders side by side." if kind in ("measure", "training") else ""
            raise FulldepthError(
                f"{label} holds a {NAMES.get(kind, kind)}, which has no place on a page with others: expected folders "
                f"of fulldepth skip ({', '.join(KINDS)}).{advice}"
            )
    subjects = [(label, *_subject(results.meta)) for label, results in loaded]
    for (other, other_dtype, other_class, other_hash), (label, dtype, class_name, digest) in combinations(subjects, 2):
        if class_name and other_class and class_name != other_class:
            raise FulldepthError(
                f"{label} is about a {class_name}, {other} about a {other_class}: they cannot share a page."
            )
        if digest and other_hash and dtype == other_dtype and digest != other_hash:
            raise FulldepthError(
                f"{label} and {other} are about different models: the weights have the hashes {digest[:19]} and "
                f"{other_hash[:19]}. Make one page for each."
            )


def _subject(meta: Mapping[str, Any]) -> tuple[str, str, str]:
    """Requested precision, class and hash of the model; empty if the document does not state them."""
    model = meta.get("model") or (meta.get("plan") or {}).get("model") or {}
    precision = str((meta.get("settings") or {}).get("dtype") or "auto")
    return precision, str(model.get("class") or ""), str(model.get("hash") or "")
