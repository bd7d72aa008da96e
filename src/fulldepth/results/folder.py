"""`Results`: a verb's table and document, with figures; writes and reads the result folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fulldepth import figures
from fulldepth.errors import FulldepthError
from fulldepth.files import atomic, reading, remove_leftovers
from fulldepth.results import consistency, document, table
from fulldepth.results.finding import Finding

if TYPE_CHECKING:
    import plotly.graph_objects as go

DOCUMENT, TABLE, PAGE = "results.json", "results.parquet", "report.html"
STORED = "table"
"""Entry of the stored document: `sha256` and `bytes` of the table that belongs to it. Not part of `Results.meta`."""
HELD = {
    "settings.yaml": "a training run",
    "plan.json": "a plan of fulldepth skip",
    "progress.json": "an unfinished search of fulldepth skip",
}
"""File -> contents of a folder with this file, into which other commands must not write results."""


class TableMismatchError(FulldepthError):
    """The table of a folder is not the one that its document was written with.

    Args:
        folder: the result folder.
        meta: the document.
    """

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        super().__init__(
            f"The results in {folder} do not belong together: {TABLE} is not the table that {DOCUMENT} was written "
            "with. The folder was interrupted while it was written, is being written now, or a file was changed. Make "
            "the results again."
        )
        self.meta = meta


@dataclass
class Results:
    """Results of a verb: `table` (tidy, one row per statistic) and `meta` (settings, model, data, headline, ...)."""

    table: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def headline(self) -> dict[str, dict[str, Any]]:
        """Name -> {value, unit, sentence}: the most important numbers, each with one sentence."""
        return dict(self.meta.get("headline") or {})

    @property
    def is_series(self) -> bool:
        """Whether the rows belong to several training checkpoints (column `step`)."""
        return "step" in self.table.columns

    @property
    def is_comparison(self) -> bool:
        """Whether the rows belong to several models (columns `model`, `difference`)."""
        return self.meta.get("kind") == "comparison"

    def figures(self) -> dict[str, go.Figure]:
        """Name -> plotly figure, for every figure that these results have data for."""
        return figures.build(self.table, self.meta)

    def values(self, measure: str, statistic: str, site: str | None = None, other: int | None = None) -> pd.Series:
        """The values of one statistic by layer, for example `values("displacement", "mean", "residual")`.

        Raises:
            FulldepthError: if there is no such row.
        """
        rows = self.table[(self.table.measure == measure) & (self.table.statistic == statistic)]
        if site is not None:
            rows = rows[rows.site == site]
        if other is not None:
            rows = rows[rows.other == other]
        if rows.empty:
            have = sorted({f"{m} {s}" for m, s in zip(self.table.measure, self.table.statistic, strict=True)})
            raise FulldepthError(f"No rows for {measure} {statistic} at site {site}. There are: {', '.join(have)}.")
        return rows.set_index("layer")["value"]

    def save(self, directory: str | Path) -> Path:
        """Write `results.json` and `results.parquet` into `directory` (created if absent), each atomically.

        The document states the sha256 of the table, so that a folder of an interrupted write is refused.

        Raises:
            FulldepthError: if the folder cannot be written.
        """
        folder = Path(directory)
        meta = {"schema_version": document.SCHEMA_VERSION, **self.meta}
        try:
            rows = self.table.to_parquet(index=False)
            stamp = {"sha256": hashlib.sha256(rows).hexdigest(), "bytes": len(rows)}
            text = json.dumps(meta | {STORED: stamp}, indent=1, allow_nan=False, default=str)
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            with atomic(folder / DOCUMENT) as document_part, atomic(folder / TABLE) as table_part:
                document_part.write_text(text, encoding="utf-8")
                table_part.write_bytes(rows)
        except OSError as error:
            raise FulldepthError(f"Cannot write results into {folder}: {error.strerror or error}.") from error
        return folder

    @classmethod
    def load(cls, directory: str | Path) -> Results:
        """Read a result folder.

        Raises:
            TableMismatchError: if the table is not the one that the document was written with.
            FulldepthError: if a file is missing, broken or too large, was written by a newer version, or holds values
                of the wrong type or out of range.
        """
        folder = Path(directory)
        for name in (DOCUMENT, TABLE):
            if not (folder / name).is_file():
                raise FulldepthError(f"{folder} is not a result folder: it has no {name}.")
        meta = document.read(folder / DOCUMENT)
        stored = meta.pop(STORED, None)
        if stored is not None and stored != _stamp(folder / TABLE):
            raise TableMismatchError(folder, meta)
        rows = table.read(folder / TABLE)
        consistency.check(folder, meta, rows)
        return cls(rows, meta)


def _stamp(path: Path) -> dict[str, Any]:
    """sha256 and size of a table's file."""
    with reading(path), path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def holder(folder: str | Path) -> str | None:
    """Description of a folder that holds something else than results; None for other folders."""
    return next((contents for name, contents in HELD.items() if (Path(folder) / name).exists()), None)


def finite(value: Any) -> Any:
    """`value` for JSON: findings as objects, NaN and infinities as None."""
    if isinstance(value, Finding):
        return finite(value.document())
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
