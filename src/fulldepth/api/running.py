"""What the functions share: progress, settings as keywords, and saving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

from fulldepth import bars, launch
from fulldepth.errors import FulldepthError
from fulldepth.files import locked
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, Results, holder
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


def check_free(folder: Path, overwrite: bool) -> None:
    """Check that results may be written into a folder.

    Raises:
        FulldepthError: if it belongs to another command, or holds results and `overwrite` is not set.
    """
    if content := holder(folder):
        raise FulldepthError(f"{folder} holds {content}, which needs its own results there. Choose another output.")
    if not overwrite and (folder / DOCUMENT).exists():
        raise FulldepthError(f"{folder} already holds results. Choose another output, or replace with overwrite=True.")


def save_new(results: Results, folder: Path, overwrite: bool) -> None:
    """Save results and their page, on the first process.

    Raises:
        FulldepthError: as `check_free`, or if the folder is held by another process or cannot be written.
    """
    if launch.is_main():
        with locked(folder):
            check_free(folder, overwrite)
            results.save(folder)
