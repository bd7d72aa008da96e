"""Index page, which links the pages of several result folders and lists their findings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from fulldepth.figures.record import SINGLE, Source
from fulldepth.reporting.page import palette
from fulldepth.reporting.story import opening
from fulldepth.results import PAGE, Results

INDEX = "index.html"


class Chapter(NamedTuple):
    """A result folder on the page."""

    folder: str
    """Path relative to the index."""
    title: str
    command: str
    """Command that produces such a result."""


def render_index(folder: Path, chapters: Sequence[Chapter], title: str) -> str:
    """The page as one HTML document.

    Args:
        folder: holds the result folders.
        chapters: in the order of the page.
        title: of the page.

    Raises:
        FulldepthError: if a folder holds no readable results.
    """
    parts = files("fulldepth.reporting").joinpath("parts")
    return Template(parts.joinpath("index.html").read_text("utf-8")).substitute(
        style=palette() + parts.joinpath("style.css").read_text("utf-8"),
        title=escape(title),
        chapters="\n".join(_chapter(folder, chapter) for chapter in chapters),
    )


def _chapter(folder: Path, chapter: Chapter) -> str:
    results = Results.load(folder / chapter.folder)
    single = Source(results.table, results.meta).kind == SINGLE
    told = opening(results.table, results.meta) if single else None
    first = " ".join(told["sentences"]) if told else ""
    sentences = [str(finding["sentence"]) for finding in results.headline.values() if finding.get("sentence")]
    items = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return (
        f'<section><h2><a href="{escape(chapter.folder)}/{PAGE}">{escape(chapter.title)}</a></h2>\n'
        f"{f'<p><strong>{escape(first)}</strong></p>' if first else ''}"
        f'<ul>\n{items}\n</ul>\n<p class="command"><code>{escape(chapter.command)}</code></p></section>'
    )
