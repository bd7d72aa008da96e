"""Assembles template, style, scripts and data into one file."""

from __future__ import annotations

import base64
import json
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from fulldepth.figures.record import VERBS
from fulldepth.figures.style import DARK, INK, PAPER, SEQUENTIAL
from fulldepth.reporting.sections import methods

SCRIPTS = (
    *("core.js", "strip.js", "texts.js", "profile.js", "plots.js"),
    *("lens.js", "samples.js", "page.js"),
)
"""Scripts in order of dependency; they share one scope."""


def assemble(document: dict[str, Any]) -> str:
    """The whole page."""
    script = "\n".join(_part(name) for name in SCRIPTS)
    return Template(_part("page.html")).substitute(
        style=palette() + _part("style.css"),
        plotly=plotly(),
        data=embed(document),
        script=script,
        methods=methods(VERBS.get(document["kind"], document["kind"])),
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

    def variables(ramp: list[str], dark_text: str, light_text: str) -> str:
        texts = [max((dark_text, light_text), key=lambda text: contrast(text, colour)) for colour in ramp]
        return "".join(
            f"--ramp-{i}:{colour};--on-{i}:{text};" for i, (colour, text) in enumerate(zip(ramp, texts, strict=True))
        )

    light = variables(list(SEQUENTIAL), INK, PAPER)
    dark = variables([DARK[colour] for colour in SEQUENTIAL], DARK[PAPER], DARK[INK])
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two `#rrggbb` colours, 1 to 21 (WCAG 2)."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _part(name: str) -> str:
    return files("fulldepth.reporting").joinpath("parts", name).read_text(encoding="utf-8")
