"""`Watcher`: callbacks for messages and progress of long-running functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass
class Watcher:
    """Callbacks that a caller may pass to a long-running function; the defaults do nothing."""

    say: Callable[[str], None] = lambda line: None
    """Called with one line of plain text."""
    begin: Callable[[str, int], None] = lambda title, total: None
    """Called when a task of `total` parts starts."""
    advance: Callable[[int], None] = lambda done: None
    """Called with the number of parts completed since the last call."""


def without_repeats(watcher: Watcher) -> Watcher:
    """A watcher that passes on each distinct line once, for work that repeats, such as measuring every checkpoint."""
    passed_on: set[str] = set()

    def say(line: str) -> None:
        if line not in passed_on:
            passed_on.add(line)
            watcher.say(line)

    return replace(watcher, say=say)
