"""Shows progress: a bar in a terminal, lines in a notebook and in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from fulldepth.core import launch
from fulldepth.core.console import PLAIN
from fulldepth.core.progress import Watcher

SECONDS = 15.0
"""Shortest time between two lines in a log file, and between a task's start and its first line."""
GROWTH = 0.1
"""Share of the elapsed time that passes between two lines, so that a run of a day writes about a hundred."""
WIDE = 100
"""Columns of a terminal that has room for a long bar."""
MOST_BARS = 4
"""Bars in a terminal at once; a series has one for every checkpoint."""
MEMORY = 3600.0
"""Seconds of progress that the remaining time is estimated from; single steps may take minutes."""


@contextmanager
def watching(progress: bool | None = True) -> Iterator[Watcher]:
    """A `Watcher` that shows messages and progress on stderr.

    Args:
        progress: True = a bar in a terminal, elsewhere lines; None = the same in a terminal or a notebook, elsewhere
            nothing; False = nothing. Under torchrun only the first process shows anything.
    """
    terminal = Console(file=sys.stderr)  # the current stderr, which silenced libraries do not see
    seen = terminal.is_terminal or terminal.is_jupyter
    if not launch.is_main() or progress is False or (progress is None and not seen):
        yield Watcher()
    elif terminal.is_terminal:
        with _bar(terminal) as watcher:
            yield watcher
    else:
        yield LogLines(lambda line: terminal.print(line, **PLAIN)).watcher()


@contextmanager
def _bar(console: Console) -> Iterator[Watcher]:
    """A bar for each task in a terminal; titles are cut before times are."""
    columns = (
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=30 if console.width >= WIDE else 10),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left", table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=console, expand=True, speed_estimate_period=MEMORY) as progress:
        tasks: list[Any] = []

        def begin(title: str, total: int) -> None:
            tasks.append(progress.add_task(title, total=total))
            progress.advance(tasks[-1], 0)  # the first step already gives a speed
            for earlier in tasks[:-MOST_BARS]:
                progress.update(earlier, visible=False)

        yield Watcher(
            lambda line: progress.console.print(line, **PLAIN),
            begin,
            lambda done: progress.advance(tasks[-1], done),
        )


class LogLines:
    """Progress as plain lines, at intervals that grow with the elapsed time; short tasks have none.

    Args:
        write: receives the lines.
        clock: seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.write = write
        self.clock = clock

    def watcher(self) -> Watcher:
        """The callbacks."""
        return Watcher(self.write, self.begin, self.advance)

    def begin(self, title: str, total: int) -> None:
        """Start a task."""
        self.title = title
        self.total = total
        self.done = 0
        self._start = self._written = self.clock()

    def advance(self, done: int) -> None:
        """Write a line if one is due, and at the end of a task long enough to have lines.

        The remaining time is estimated from the average step so far.
        """
        self.done += done
        now = self.clock()
        elapsed = now - self._start
        left = self.total - self.done
        ends = done > 0 and left <= 0 and elapsed >= SECONDS
        if ends or now - self._written >= max(SECONDS, GROWTH * elapsed):
            clock, rest = (timedelta(seconds=round(span)) for span in (elapsed, elapsed * left / (self.done or 1)))
            remaining = f", {rest} left" if self.done and left > 0 else ""
            self.write(f"{self.title}: {self.done:,} of {self.total:,}, {clock} elapsed{remaining}")
            self._written = now
