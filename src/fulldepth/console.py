"""Output of the command line: progress bar, plain tables, results, errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fulldepth import launch
from fulldepth.errors import one_line
from fulldepth.progress import Watcher

PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def is_main() -> bool:
    """Whether this process prints (under torchrun, only the first does)."""
    return launch.rank() == 0


@contextmanager
def watching() -> Iterator[Watcher]:
    """A progress bar with elapsed and remaining time, as a `Watcher`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True, quiet=not is_main())) as progress:
        tasks: list[Any] = []

        def begin(title: str, total: int) -> None:
            tasks.append(progress.add_task(title, total=total))

        def advance(done: int) -> None:
            progress.advance(tasks[-1], done)

        def retitle(title: str) -> None:
            progress.update(tasks[-1], description=title)

        def say(line: str) -> None:
            progress.console.print(line, **PLAIN)

        yield Watcher(say, begin, advance, retitle)


def table(rows: Iterable[Sequence[str]]) -> None:
    """Print rows as plain columns."""
    grid = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        grid.add_row(*map(Text, row))
    Console().print(grid)


def finish(results: Any, page: Path | None = None) -> None:
    """Print the headline as a short table, the warnings, and the path of the page if there is one."""
    rows = []
    for name, entry in results.headline.items():
        if ":" in name:  # single models of a comparison: only on the page
            continue
        value = "-" if entry["value"] is None else f"{entry['value']:.4g}"
        if entry.get("standard_error") is not None:
            value += f" ± {entry['standard_error']:.2g}"
        unit = entry.get("unit", "1")
        rows.append(
            (
                one_line(name, 60),
                value if unit == "1" else f"{value} {one_line(unit, 20)}",
                one_line(entry.get("sentence") or "", 600),
            )
        )
    table(rows)
    console = Console()
    if sampled := (results.meta.get("sampling") or {}).get("sentence"):
        console.print(one_line(sampled, 900), **PLAIN)
    for line in results.meta.get("warnings") or []:
        console.print(f"Note: {line}", **PLAIN)
    if page is not None:
        console.print(f"Page: {page}", **PLAIN)


def line(text: str) -> None:
    """Print one plain line to stdout."""
    Console().print(text, **PLAIN)


def error(message: str) -> None:
    """Print one red message to stderr."""
    Console(stderr=True).print(f"Error: {message}", style="red", **PLAIN)
