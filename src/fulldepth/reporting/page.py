"""Assembles templates, style, scripts and data into files: the page of results, and the index of several pages."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from fulldepth.figures.record import VERBS, Source
from fulldepth.figures.style import DARK, INK, PAPER, SEQUENTIAL
from fulldepth.reporting.kinds import PAGES, kind_of
from fulldepth.reporting.sections import methods
from fulldepth.results import PAGE, Results

SCRIPTS = ("core.js", "strip.js", "profile.js", "plots.js", "lens.js", "page.js")
"""Scripts in order of dependency; they share one scope."""


class Chapter(NamedTuple):
    """A result folder on the index page."""

    folder: str
    """Path relative to the index."""
    title: str
    command: str
    """Command that produces such a result."""


def assemble(document: dict[str, Any]) -> str:
    """The whole page."""
    return Template(_part("page.html")).substitute(
        style=palette() + _part("style.css"),
        plotly=plotly(),
        data=embed(document),
        script="\n".join(_part(name) for name in SCRIPTS),
        methods=methods(VERBS.get(document["kind"], document["kind"]), document["measures"]),
    )


def render_index(folder: Path, chapters: Sequence[Chapter], title: str) -> str:
    """The page that links the pages of the result folders below `folder`, with what they say first.

    Raises:
        FulldepthError: if a folder holds no readable results.
    """
    sections = []
    for chapter in chapters:
        results = Results.load(folder / chapter.folder)
        source = Source(results.table, results.meta)
        story = PAGES[kind_of(source)].opening(source)
        told = [str(finding["sentence"]) for finding in results.headline.values() if finding.get("sentence")]
        first = f"<p><strong>{escape(' '.join(story['sentences']))}</strong></p>" if story else ""
        items = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in told)
        sections.append(
            f'<section><h2><a href="{escape(chapter.folder)}/{PAGE}">{escape(chapter.title)}</a></h2>\n{first}'
            f'<ul>\n{items}\n</ul>\n<p class="command"><code>{escape(chapter.command)}</code></p></section>'
        )
    return Template(_part("index.html")).substitute(
        style=palette() + _part("style.css"), title=escape(title), chapters="\n".join(sections)
    )


@cache
def plotly() -> str:
    """plotly.js with the cartesian trace types, gzip-compressed, as base64; the page unpacks it (`plots.js`).

    The bundle is the file `plotly-cartesian.min.js` of the npm package `plotly.js-cartesian-dist-min` (MIT licence,
    beside it), compressed. It is a third of the full bundle that the Python package of plotly carries.
    """
    bundle = files("fulldepth.reporting").joinpath("parts", "plotly", "plotly-cartesian.min.js.gz")
    return base64.b64encode(bundle.read_bytes()).decode("ascii")


def embed(document: Any) -> str:
    """JSON that is safe inside a script element: ASCII only, without characters that are special in HTML."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def palette() -> str:
    """The heat maps' colours as CSS variables `--ramp-0..10`, with readable text colours `--on-0..10`."""

    def variables(dark: dict[str, str], pale: int) -> str:
        texts = [INK] * pale + [PAPER] * (len(SEQUENTIAL) - pale)  # whichever has more contrast with its shade
        pairs = enumerate(zip(SEQUENTIAL, texts, strict=True))
        return "".join(
            f"--ramp-{at}:{dark.get(shade, shade)};--on-{at}:{dark.get(text, text)};" for at, (shade, text) in pairs
        )

    return (
        f":root{{{variables({}, 6)}}}@media screen and (prefers-color-scheme:dark){{:root{{{variables(DARK, 5)}}}}}\n"
    )


def _part(name: str) -> str:
    return files("fulldepth.reporting").joinpath("parts", name).read_text(encoding="utf-8")
