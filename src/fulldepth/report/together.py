"""Several result folders as one page: which go together, under what names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fulldepth.errors import FulldepthError
from fulldepth.figures.skip_results import KINDS, TOGETHER
from fulldepth.results import COLUMNS, SCHEMA_VERSION, TABLE, Results

WORDS = {"measure": "measurement", "training": "training run", "comparison": "comparison"}
"""Kind of a folder -> what it holds, where it is not one of `KINDS`."""


def together(folders: Sequence[str | Path]) -> Results:
    """The folders as one: kind `skips`, rows with the column `folder`, the documents in `parts`.

    Searches come first, then curves, benchmarks and quantisations; among them the order is kept.

    Raises:
        FulldepthError: if a folder is named twice or cannot be read, if one of them is not of `fulldepth skip`, or if
            they are about different models.
    """
    places = [Path(folder) for folder in folders]
    for at, place in enumerate(places):
        if any(place.resolve() == other.resolve() for other in places[:at]):
            raise FulldepthError(f"{place} is named twice.")
    read = [Results.load(place) for place in places]
    labels = names(places)
    _check(labels, read)
    found = sorted(zip(labels, read, strict=True), key=lambda item: KINDS.index(item[1].meta["kind"]))
    tables = [one.table.assign(folder=label) for label, one in found]
    columns = [*COLUMNS, *dict.fromkeys(name for table in tables for name in table.columns if name not in COLUMNS)]
    whole = pd.concat([table.dropna(axis=1, how="all") for table in tables], ignore_index=True)
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": TOGETHER,
        "parts": [{**one.meta, "label": label} for label, one in found],
    }
    return Results(whole.reindex(columns=columns).astype(_types(tables)), document)


def names(places: Sequence[Path]) -> list[str]:
    """As little of the end of each path as tells them apart."""
    parts = [place.resolve().parts for place in places]
    for length in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [str(place.resolve()) for place in places]


def rows_of(places: Sequence[Path]) -> str:
    """Where the rows of a page are, in one sentence."""
    found = names(places)
    if len(found) == 1:
        return f"The file {TABLE} in {found[0]} holds all of them."
    return f"The files {TABLE} in {', '.join(found[:-1])} and {found[-1]} hold all of them."


def _types(tables: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """Whole numbers stay whole where some folders do not have them."""
    whole = {
        name: "Int64" for table in tables for name in table.columns if pd.api.types.is_integer_dtype(table[name].dtype)
    }
    return {**whole, "value": "float64"}


def _check(labels: Sequence[str], read: Sequence[Results]) -> None:
    """Refuse folders that have nothing to do with each other."""
    for label, one in zip(labels, read, strict=True):
        kind = str(one.meta.get("kind"))
        if kind not in KINDS:
            advice = " `fulldepth compare` puts such folders side by side." if kind in ("measure", "training") else ""
            raise FulldepthError(
                f"{label} holds a {WORDS.get(kind, kind)}, which has no place on a page with others: expected folders "
                f"of fulldepth skip ({', '.join(KINDS)}).{advice}"
            )
    stated = [(label, *_subject(one.meta)) for label, one in zip(labels, read, strict=True)]
    for at, (label, described, kind, found) in enumerate(stated):
        for other, before, sort, earlier in stated[:at]:
            if kind and sort and kind != sort:
                raise FulldepthError(f"{label} is about a {kind}, {other} about a {sort}: they belong on pages apart.")
            if found and earlier and described == before and found != earlier:
                raise FulldepthError(
                    f"{label} and {other} are about different models: the weights have the hashes {found[:19]} and "
                    f"{earlier[:19]}. Make a page of each."
                )


def _subject(meta: Mapping[str, Any]) -> tuple[str, str, str]:
    """Precision that was asked for, class and hash of the model; empty where the document does not say."""
    model = meta.get("model") or (meta.get("plan") or {}).get("model") or {}
    precision = str((meta.get("settings") or {}).get("dtype") or "auto")
    return precision, str(model.get("class") or ""), str(model.get("hash") or "")
