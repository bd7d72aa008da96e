"""Tables of the page: `Table`, tables with one row per model or run, tables of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fulldepth.reporting.phrases import NOTHING, short

Subject = TypeVar("Subject")
PROSE = ("about", "source")
"""Settings that are descriptions and have no effect."""


@dataclass(frozen=True)
class Table:
    """A table on the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Each row: its name, then one cell per column."""
    corner: str = ""
    """Header of the first column."""
    note: str = ""
    folded: bool = False
    """Whether the table is collapsed under its title."""
    text: bool = False
    """Whether the cells are text rather than numbers."""


def by_subject(
    title: str,
    corner: str,
    subjects: Sequence[tuple[str, Subject]],
    columns: Mapping[str, Callable[[Subject], str]],
    note: str = "",
) -> Table:
    """One row per (name, subject); columns that are empty for all of them are left out."""
    cells = {name: [cell(subject) for _, subject in subjects] for name, cell in columns.items()}
    filled = {name: column for name, column in cells.items() if set(column) != {NOTHING}}
    rows = [[name, *row] for (name, _), *row in zip(subjects, *filled.values(), strict=True)] if filled else []
    return Table(title, list(filled), rows, corner, note)


def settings_table(title: str, settings: Any) -> Table:
    """All settings with a value, in a folded table."""
    rows = [[short(key, 80), short(value)] for key, value in flatten(settings or {}).items() if key not in PROSE]
    return Table(title, [""], rows, folded=True, text=True)


def flatten(settings: Any, prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as in YAML; unset settings are left out."""
    if isinstance(settings, Mapping):
        flat: dict[str, str] = {}
        for key, value in settings.items():
            flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    if settings is None or settings == []:
        return {}
    if isinstance(settings, bool):
        return {prefix: str(settings).lower()}
    if isinstance(settings, list | tuple):
        return {prefix: ", ".join(map(str, settings))}
    return {prefix: f"{settings:.12g}" if isinstance(settings, float) else str(settings)}
