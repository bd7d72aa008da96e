"""The result folder: one tidy table, one JSON document, one page. Reads and writes it; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fulldepth import figures
from fulldepth.errors import FulldepthError
from fulldepth.files import atomic

if TYPE_CHECKING:
    import plotly.graph_objects as go

SCHEMA_VERSION = 1
COLUMNS = ["measure", "site", "layer", "other", "statistic", "value", "count", "unit"]
"""Columns of every table. A series adds `step`; a comparison adds `model` and `difference`."""
DOCUMENT, TABLE, PAGE = "results.json", "results.parquet", "report.html"


@dataclass
class Results:
    """What a verb found: `table` (tidy, one row a statistic) and `meta` (everything needed to read and repeat it)."""

    table: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def headline(self) -> dict[str, dict[str, Any]]:
        """Name -> {value, unit, sentence}: the few numbers to look at first, each with one plain sentence."""
        return dict(self.meta.get("headline", {}))

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
        """Write `results.json` and `results.parquet` into `directory` (made if absent), each whole or not at all.

        Raises:
            FulldepthError: if the folder cannot be written.
        """
        folder = Path(directory)
        document = json.dumps({"schema_version": SCHEMA_VERSION, **self.meta}, indent=1, allow_nan=False, default=str)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic(folder / TABLE) as part:
                self.table.to_parquet(part, index=False)
            with atomic(folder / DOCUMENT) as part:
                part.write_text(document, encoding="utf-8")
        except OSError as error:
            raise FulldepthError(f"Cannot write results into {folder}: {error.strerror or error}.") from error
        return folder

    @classmethod
    def load(cls, directory: str | Path) -> Results:
        """Read a result folder.

        Raises:
            FulldepthError: if a file is missing or broken, or was written by a newer version.
        """
        folder = Path(directory)
        for name in (DOCUMENT, TABLE):
            if not (folder / name).is_file():
                raise FulldepthError(f"{folder} is not a result folder: it has no {name}.")
        try:
            meta = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
            table = pd.read_parquet(folder / TABLE)
        except (ValueError, OSError) as error:
            raise FulldepthError(f"The results in {folder} cannot be read: {error}") from error
        version = meta.get("schema_version") if isinstance(meta, dict) else None
        if version != SCHEMA_VERSION:
            raise FulldepthError(
                f"{folder / DOCUMENT} has schema version {version!r}, this fulldepth reads {SCHEMA_VERSION}."
            )
        missing = [column for column in COLUMNS if column not in table.columns]
        if missing:
            raise FulldepthError(f"{folder / TABLE} lacks the columns {', '.join(missing)}.")
        return cls(table, meta)


def tabulate(rows: list[Any], **extra: Any) -> pd.DataFrame:
    """Rows (tuples in the order of `COLUMNS`) as a table with nullable integer columns, plus constant columns."""
    table = pd.DataFrame(rows, columns=COLUMNS)
    for column in ("layer", "other", "count"):
        table[column] = table[column].astype("Int64")
    table["value"] = table["value"].astype("float64")
    for name, value in extra.items():
        table[name] = value
    return table


def finite(value: Any) -> Any:
    """`value` with NaN and infinities replaced by None, so that it is valid JSON."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
