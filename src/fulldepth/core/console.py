"""Output of the command line: plain tables, results, errors, and the headline as JSON."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulldepth.core import launch
from fulldepth.core.errors import one_line, shortened
from fulldepth.core.number_format import plus_minus, rounded

MOST_OF_A_COMMAND = 2000
"""Characters of a suggested command that are printed."""
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def accept_any_text() -> None:
    """Let stdout print characters that its encoding lacks as escapes, as stderr does; by default it raises."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


_document: list[Any] = []
"""With `--json`: the value to print. Empty before it is known."""
_is_json = {"on": False}


@contextmanager
def json_on_stdout() -> Iterator[None]:
    """Print the headline that `finish` receives as one JSON document on stdout, and everything else on stderr."""
    stdout = sys.stdout
    _document.clear()
    _is_json["on"] = True
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _is_json["on"] = False
    if _document and launch.is_main():
        print(json.dumps(_document[-1], indent=1, allow_nan=False), file=stdout)


def table(rows: Iterable[Sequence[str]]) -> None:
    """Print rows as plain columns; with `--json` as an object, whose names are the first column."""
    rows = list(rows)
    if _is_json["on"]:
        _document.append({row[0]: row[1] if len(row) == 2 else list(row[1:]) for row in rows})
        return
    grid = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        grid.add_row(*map(Text, row))
    Console().print(grid)


def finish(results: Any, page: Path | None = None) -> None:
    """Print the headline as a short table, the warnings, and the path of the page if there is one.

    Args:
        results: the results; with `--json` their headline is printed as it is in `results.json`.
        page: path of the page.
    """
    if not launch.is_main():
        return
    if _is_json["on"]:
        _document.append(results.headline)
    else:
        table(_headline(results))
    if sampled := (results.meta.get("sampling") or {}).get("sentence"):
        line(one_line(sampled, 900))
    for warning in results.meta.get("warnings") or []:
        line(f"Note: {warning}")
    if (step := results.meta.get("next")) and not _is_json["on"]:
        command = "".join(c if c.isprintable() else "�" for c in step.get("command") or "")  # spaces count in names
        line(f"Next: {one_line(step.get('why') or '')} {shortened(command, MOST_OF_A_COMMAND)}")
    if page is not None:
        line(f"Page: {page}")


def finish_parts(parts: dict[str, Any]) -> None:
    """Print several results one after another; with `--json` as one object, with a headline for each name."""
    for results in parts.values():
        finish(results)
    answer({name: results.headline for name, results in parts.items()})


def _headline(results: Any) -> list[tuple[str, str, str]]:
    """Name, value with unit, and sentence of each number.

    Numbers of a whole comparison come before those of single models (`name:model`).
    """
    rows = []
    for name, entry in sorted(results.headline.items(), key=lambda item: ":" in item[0]):
        value = "-" if entry["value"] is None else rounded(entry["value"])
        if entry.get("interval") is not None:
            value += " ({} to {})".format(*map(rounded, entry["interval"]))
        else:
            value = f"{value} {plus_minus(entry.get('standard_error'))}".rstrip()
        unit = entry.get("unit", "1")
        rows.append(
            (
                one_line(name, 60),
                value if unit == "1" else f"{value} {one_line(unit, 20)}",
                one_line(entry.get("sentence") or "", 600),
            )
        )
    return rows


def line(text: str) -> None:
    """Print one plain line to stdout."""
    Console().print(text, **PLAIN)


def checkpoint(exported: Any, path: Path, rows: Sequence[Sequence[str]], title: str = "Checkpoint") -> None:
    """Print what an exported checkpoint is, its notes, and where it is.

    Args:
        exported: an export with `parameters`, `size` in words, `logit_error` and `notes`.
        path: its folder or file.
        rows: printed first.
        title: what the path is called.
    """
    error = exported.logit_error
    table(
        [
            *rows,
            ("parameters", f"{exported.parameters:,}"),
            ("size", exported.size),
            ("logit error", "unknown" if error is None else f"{error:.1e} (relative, loaded again in a fresh process)"),
        ]
    )
    for text in exported.notes:
        line(f"Note: {text}")
    line(f"{title}: {path}")


def note(text: str) -> None:
    """Print one plain line to stderr."""
    Console(stderr=True).print(text, **PLAIN)


def texts(chunk: str, *, end: str = "\n") -> None:
    """Write generated text to stdout as it is; with `--json` the document holds it."""
    if not _is_json["on"]:
        sys.stdout.write(chunk + end)
        sys.stdout.flush()


def answer(value: Any) -> None:
    """With `--json`: the value to print."""
    if _is_json["on"]:
        _document.append(value)


def loading() -> None:
    """Print a line before torch is imported, which may take seconds."""
    if launch.is_main() and "torch" not in sys.modules:
        note("Loading...")


def error(message: str) -> None:
    """Print one red message to stderr."""
    Console(stderr=True).print(f"Error: {message}", style="red", **PLAIN)
