"""Renders results as one self-contained HTML page that works offline and in print; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fulldepth.errors import FulldepthError
from fulldepth.files import atomic, locked
from fulldepth.reporting.page import Chapter, assemble, render_index
from fulldepth.reporting.payload import payload
from fulldepth.reporting.together import rows_of, together
from fulldepth.results import DOCUMENT, PAGE, Results


def render(results: Results, where: str = "") -> str:
    """The page as one HTML document with style, script, plotly.js and data embedded; it makes no requests.

    Strings of the results are embedded as JSON and inserted as text, so that markup in names of models or tokens is
    shown literally.

    Args:
        results: the results to show.
        where: a sentence on where the rows are stored, if not in a file beside the page.
    """
    return assemble(payload(results, where))


def write(directory: str | Path) -> Path:
    """Read the result folder `directory` and write its `report.html` atomically.

    Returns:
        Path of the page.

    Raises:
        FulldepthError: if the folder holds no readable results, or cannot be written.
    """
    return Results.load(directory).save_page(directory)


def write_together(folders: Sequence[str | Path], output: str | Path | None = None, *, overwrite: bool = False) -> Path:
    """Read one result folder, or several of `fulldepth skip`, and write one `report.html` atomically.

    Args:
        folders: of the kinds `skip`, `curve`, `bench` and `quantise`, about the same model; or a single one of any
            kind.
        output: folder of the page, created if absent; None = the first of `folders`.
        overwrite: replace the page of a folder that holds other results.

    Returns:
        Path of the page.

    Raises:
        FulldepthError: if a folder holds no readable results, if they cannot share a page, or if `output` holds
            results that are not on the page, is held by another process, or cannot be written.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise FulldepthError("A page needs at least one result folder.")
    target = paths[0] if output is None else Path(output)
    own = any(target.resolve() == path.resolve() for path in paths)
    if not (own or overwrite) and (target / DOCUMENT).exists():
        raise FulldepthError(
            f"{target} holds results of its own, and {PAGE} there is their page. Choose another --output, or replace "
            "the page with --overwrite."
        )
    results = together(paths) if len(paths) > 1 else Results.load(paths[0])
    html = render(results, "" if own and len(paths) == 1 else rows_of(paths))
    with locked(target):
        return _save(html, target)


def write_index(folder: str | Path, chapters: Sequence[Chapter], *, title: str) -> Path:
    """Write `index.html`, which links the pages of the result folders below and lists their findings.

    Args:
        folder: holds the result folders.
        chapters: in the order of the page.
        title: of the page.

    Raises:
        FulldepthError: if a folder holds no readable results, or the page cannot be written.
    """
    return _save(render_index(Path(folder), chapters, title), Path(folder), "index.html")


def _save(html: str, folder: Path, name: str = PAGE) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / name) as part:
            part.write_text(html, encoding="utf-8")
    except OSError as error:
        raise FulldepthError(f"Cannot write {folder / name}: {error.strerror or error}.") from error
    return folder / name


__all__ = ["Chapter", "render", "write", "write_index", "write_together"]
