"""Common style of all figures: colours, axes, titles, escaped text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go
import yaml

from fulldepth.core.number_format import rounded

Figures = dict[str, go.Figure]
"""Name -> figure. `name:variant` is a variant of the figure `name`."""

DASHES = ("solid", "dash", "dot", "dashdot")


def read_yaml(name: str) -> Any:
    """The content of a YAML file of this package."""
    return yaml.safe_load(files("fulldepth.reporting").joinpath(name).read_text("utf-8"))


_PALETTE = [[colours.split() for colours in pair] for pair in read_yaml("palette.yaml").values()]
CATEGORICAL, SEQUENTIAL, OPPOSITE, ABOVE, BELOW, _TONES = (light for light, _ in _PALETTE)
INK, MUTED, GRID, AXIS, PAPER = _TONES


def translucent(colour: str, alpha: float = 0.16) -> str:
    """`#rrggbb` as `rgba(...)`, for bands behind lines."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


DARK: dict[str, str] = {light: dark for pair in _PALETTE for light, dark in zip(*pair, strict=True)}
"""Every colour of a figure -> its counterpart on a dark page."""
DARK |= {translucent(colour): translucent(DARK[colour], 0.22) for colour in CATEGORICAL}

UNIT_SCALE = [[i / 10, colour] for i, colour in enumerate(SEQUENTIAL)]
"""Colour scale for [0, 1]."""
SIGNED_SCALE = [[i / 20, colour] for i, colour in enumerate((*OPPOSITE[:0:-1], *SEQUENTIAL))]
"""Colour scale for [-1, 1], neutral at zero."""
DIFFERENCE_SCALE = [[i / 20, colour] for i, colour in enumerate((*BELOW[:0:-1], *ABOVE))]
"""Colour scale for differences, neutral at zero."""

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
"""Characters of a power of ten."""
MOST_DESCRIBED = 4
"""Maximum number of curves that an alternative text describes in a sentence each."""
MOST_NAMED = 12
"""Maximum number of further curves that it lists by name."""
TEMPLATE = go.layout.Template(read_yaml("template.yaml"))
"""Layout and defaults of all figures."""


def is_invisible(character: str) -> bool:
    """Return True for control and format characters, which draw nothing or change how others are drawn."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def label(text: object, limit: int = 48) -> str:
    """`text` made safe for plotly: shortened, without control or direction characters, markup shown literally.

    Plotly interprets a subset of HTML in labels and `%{...}` in templates; both are escaped.
    """
    raw = str(text)
    short = raw if len(raw) <= limit else raw[: limit - 1] + "…"
    plain = "".join("\ufffd" if is_invisible(c) else c for c in short)
    return escape(plain, quote=False).replace("{", "&#123;")


def categorical(index: int) -> dict[str, Any]:
    """Line colour and dash of series number `index`; dashes tell series apart once the colours are used up."""
    turn, colour = divmod(index, len(CATEGORICAL))
    return {"color": CATEGORICAL[colour], "dash": DASHES[turn % len(DASHES)]}


def by_depth(layer: int, layers: int) -> str:
    """Colour of a layer's line, stronger for deeper layers. It is one of `SEQUENTIAL`, so `DARK` has a counterpart."""
    share = layer / max(layers, 1)
    return SEQUENTIAL[2 + round(share * (len(SEQUENTIAL) - 3))]


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """Settings of an axis with a title."""
    return {"title": {"text": title}, **settings}


def layer_axis(layers: int, first: int = 1, relative: bool = False) -> dict[str, Any]:
    """The x axis of a figure over depth: whole layers `first..layers`, or per cent of depth."""
    if relative:
        return {"title": {"text": "Relative depth"}, "range": [-0.02, 1.02], "tickformat": ".0%"}
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if layers / s <= 12.5)
    ticks = [tick for tick in range(0, layers + 1, step) if tick >= first]
    ticks = [
        *(tick for tick in ticks if layers - tick >= 3 * step / 4),
        layers,
    ]  # leave out labels that would touch the last one
    return {
        "title": {"text": layer_title("Layer", first)},
        "unifiedhovertitle": {"text": "Layer %{x}"},
        "range": [first - 0.5, layers + 0.5],
        "tickvals": ticks,
    }


def layer_title(title: str, first: int) -> str:
    """Title of an axis over layers from `first`; an axis that has layer 0 explains it."""
    return title if first else f"{title} (0: embeddings)"


def figure(
    traces: Iterable[Any],
    *,
    xaxis: dict[str, Any],
    yaxis: dict[str, Any],
    title: str = "",
    subtitle: str = "",
    variant: str = "",
    beside: bool = False,
    height: int = 350,
    **layout: Any,
) -> go.Figure:
    """A figure in the common style.

    Args:
        traces: the curves, bars or maps.
        xaxis: settings of the x axis.
        yaxis: settings of the y axis.
        title: title of the figure; empty = that of the figure's record.
        subtitle: one line on how to read it; empty = that of the figure's record.
        variant: name of the variant if the figure has several.
        beside: True if variants are shown side by side; otherwise a switch selects one.
        height: height in pixels.
        layout: further settings of the layout.
    """
    drawn = list(traces)
    about = {"title": title, "subtitle": subtitle, "variant": variant, "beside": beside}
    about["alt"] = " ".join(_in_words(drawn, xaxis, yaxis))
    legend = sum(trace.showlegend is not False for trace in drawn) > 1
    shared = {"template": TEMPLATE, "xaxis": xaxis, "yaxis": yaxis, "height": height, "showlegend": legend}
    return go.Figure(drawn, {**shared, "meta": about, **layout})


def _in_words(traces: Iterable[Any], xaxis: dict[str, Any], yaxis: dict[str, Any]) -> Iterator[str]:
    """Yield the sentences of a figure's alternative text.

    Each curve gets a sentence on where it is lowest and highest, up to `MOST_DESCRIBED` curves; one sentence covers the
    others. Curves without a value are left out.
    """
    form = ".1%" if str(yaxis.get("tickformat")).endswith("%") else ".3g"
    unit = yaxis.get("ticksuffix", "")
    across = xaxis["title"]["text"]
    place = xaxis.get("unifiedhovertitle", {}).get("text", f"{across} %{{x}}").lower().replace("%{x:,}", "%{x}")
    described = [trace for trace in traces if trace.hoverinfo != "skip" and getattr(trace, "fill", None) is None]
    described = [trace for trace in described if _values(trace)]
    for trace in described[:MOST_DESCRIBED]:
        if trace.type == "heatmap":
            values = _values(trace)
            yield f"From {minus(min(values), '.2f')} to {minus(max(values), '.2f')}."
            continue
        points = [(y, x) for x, y in zip(trace.x, trace.y, strict=True) if y is not None]
        ends = dict.fromkeys(end(points, key=lambda point: point[0]) for end in (min, max))
        texts = [f"{minus(y, form)}{unit} at {place.replace('%{x}', _on_axis(x, xaxis))}" for y, x in ends]
        yield f"{trace.name}: {' to '.join(texts)}."
    summed_up = described[MOST_DESCRIBED:]
    if summed_up:
        names = [trace.name for trace in summed_up]
        subject = ", ".join(names) if len(names) <= MOST_NAMED else f"{names[0]} to {names[-1]} ({len(names)} curves)"
        values = [y for trace in summed_up for y in _values(trace)]
        yield f"{subject}: between {minus(min(values), form)}{unit} and {minus(max(values), form)}{unit}."


def _values(trace: Any) -> list[Any]:
    """The values of a curve, or of the cells of a map."""
    rows = trace.z if trace.type == "heatmap" else [trace.y]
    return [value for row in rows for value in row if value is not None]


def _on_axis(x: float, xaxis: dict[str, Any]) -> str:
    """A position on an axis, formatted like its labels: `1,200,000` (steps), `3%` (of depth), `1.034`."""
    if str(xaxis.get("tickformat")).endswith("%"):
        return f"{x:.0%}"
    return f"{x:,.0f}" if float(x).is_integer() else f"{x:.4g}"


def minus(value: float, form: str) -> str:
    """The number in Python's format `form`, with a true minus sign, and without a sign if it prints as zero.

    A large number in a format such as `.3g` has thousands separators, a small one a power of ten: `1.5 × 10⁻⁹`.
    """
    text = rounded(value, form) if form.endswith("g") else f"{value:{form}}"
    mantissa, _, power = text.partition("e")
    if power:
        text = f"{mantissa} × 10{str(int(power)).translate(SUPERSCRIPT)}"
    return text.lstrip("+-") if not any(digit in mantissa for digit in "123456789") else text.replace("-", "−")
