"""What the functions share: progress, and settings as keywords."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

from fulldepth import bars
from fulldepth.progress import Watcher
from fulldepth.settings import merge


@contextmanager
def watching(progress: bool | None, watcher: Watcher | None) -> Iterator[Watcher]:
    """The caller's watcher, or else one that shows progress as `bars.watching` does."""
    if watcher is not None:
        yield watcher
        return
    with bars.watching(progress) as shown:
        yield shown


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings given as keywords; a dot in a name opens a mapping, as in `key.inner=value` on the command line."""

    def opened(name: str, value: Any) -> dict[str, Any]:
        first, _, rest = name.partition(".")
        return {first: opened(rest, value) if rest else value}

    return reduce(merge, (opened(name, value) for name, value in settings.items()), {})
