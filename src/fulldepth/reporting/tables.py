"""Tables of the page: `Table`, those that a record of `page.yaml` describes, models side by side, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fulldepth.reporting.phrases import NOTHING, percent, short
from fulldepth.reporting.source import number
from fulldepth.reporting.style import read_yaml

PROSE = ("about", "source")
"""Settings that are descriptions and have no effect."""
Meta = Mapping[str, Any]
"""A document, or an entry of one."""


@cache
def page_texts() -> dict[str, Any]:
    """The content of `page.yaml`."""
    content: dict[str, Any] = read_yaml("page.yaml")
    return content


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
    """True if the table is collapsed under its title."""
    text: bool = False
    """True if the cells are text, not numbers."""


def cell(value: Any, form: str = "") -> str:
    """The text of a cell: a number in `form` (for `str.format`, or `percent`), a text as it is, "–" if unknown."""
    if isinstance(value, str):
        return value or NOTHING
    real = number(value)
    return NOTHING if real is None else percent(real) if form == "percent" else form.format(real).replace("-", "−")


def of_record(name: str, subjects: Sequence[tuple[str, Meta]], title: str = "") -> Table:
    """The table of a record of `page.yaml`: one row per (name, entry); columns that are empty for all are left out.

    Args:
        name: name of the record, which has `title`, `corner`, `note` (a text, or one text for each column that needs
            it), and for each column the key of an entry and a format.
        subjects: name and entry of each row.
        title: replaces the record's title if not empty.
    """
    record = page_texts()["tables"][name]
    cells = {
        column: [cell(entry.get(key[0]), *key[1:]) for _, entry in subjects]
        for column, key in record["columns"].items()
    }
    filled = {column: values for column, values in cells.items() if set(values) - {NOTHING}}
    rows = [[row, *values] for (row, _), *values in zip(subjects, *filled.values(), strict=True)] if filled else []
    note = record["note"]
    if isinstance(note, Mapping):
        note = " ".join(text for column, text in note.items() if column in filled)
    return Table(title or record["title"], list(filled), rows, record["corner"], note)


def across(title: str, models: Sequence[tuple[Meta, Mapping[str, str]]], corner: str = "", **about: Any) -> Table:
    """A table with one column per model; each model is its entry and its cells by name. Empty rows are left out."""
    names = dict.fromkeys(name for _, cells in models for name in cells)
    rows = [[name, *(cells.get(name) or NOTHING for _, cells in models)] for name in names]
    filled = [row for row in rows if set(row[1:]) != {NOTHING}]
    return Table(title, [labelled(entry) for entry, _ in models], filled, corner, **about)


def labelled(entry: Meta) -> str:
    """Label of one of several models; the baseline is marked."""
    label = short(entry.get("label", "?"), 60)
    return f"{label} (baseline)" if entry.get("baseline") and label != "baseline" else label


def settings_table(title: str, settings: Any) -> Table:
    """A folded table of the settings that have a value."""
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
