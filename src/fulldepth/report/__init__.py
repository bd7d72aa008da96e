"""Results -> one self-contained page that works offline and on paper; imports no torch."""

from __future__ import annotations

from pathlib import Path

from fulldepth.errors import FulldepthError
from fulldepth.report.page import assemble
from fulldepth.report.payload import payload
from fulldepth.results import PAGE, Results, atomic


def render(results: Results) -> str:
    """The page as one HTML document: style, script, plotly.js and data inside, no request to anywhere.

    Every string of the results travels as JSON and reaches the page as text, so that markup in a model's or a
    token's name stays what it is.
    """
    return assemble(payload(results))


def write(directory: str | Path) -> Path:
    """Read the result folder `directory` and write its `report.html`, whole or not at all.

    Returns:
        Path of the page.

    Raises:
        FulldepthError: if the folder holds no readable results, or cannot be written.
    """
    folder = Path(directory)
    html = render(Results.load(folder))
    try:
        with atomic(folder / PAGE) as part:
            part.write_text(html, encoding="utf-8")
    except OSError as error:
        raise FulldepthError(f"Cannot write {folder / PAGE}: {error.strerror or error}.") from error
    return folder / PAGE


__all__ = ["render", "write"]
