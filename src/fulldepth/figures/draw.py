"""The few marks that figures are made of: lines, bands, bars, heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.rows import Curve, Matrix
from fulldepth.figures.style import MUTED, SIGNED_SCALE, UNIT_SCALE, figure, layer_axis, translucent


def line(
    curve: Curve,
    name: str,
    color: str,
    dash: str = "solid",
    form: str = ".4f",
    depth: int | None = None,
    **extra: Any,
) -> go.Scatter:
    """A curve over layers. `depth` = L draws it over relative depth l/L instead. `form` is a d3 number format."""
    across = curve.layers if depth is None else [layer / depth for layer in curve.layers]
    where = "" if depth is None else "%{customdata[0]}: "
    return go.Scatter(
        x=across,
        y=curve.values,
        customdata=curve.custom,
        name=name,
        mode="lines+markers",
        line={"color": color, "dash": dash, "width": 2},
        marker={"color": color, "size": 5},
        hovertemplate=_hover(curve, form, where),
        connectgaps=False,
        **extra,
    )


def band(low: Curve, high: Curve, name: str, color: str, form: str = ".4f") -> list[go.Scatter]:
    """The area between two curves: two traces, the upper one first, the lower one filled up to it."""
    edge = {"mode": "lines", "line": {"width": 0, "color": color}, "legendgroup": name, "name": name}
    upper = dict(zip(high.layers, high.values, strict=True))
    ends = [[upper.get(layer)] for layer in low.layers]
    return [
        go.Scatter(x=high.layers, y=high.values, showlegend=False, hoverinfo="skip", **edge),
        go.Scatter(
            x=low.layers,
            y=low.values,
            customdata=ends,
            fill="tonexty",
            fillcolor=translucent(color),
            hovertemplate=f"%{{y:{form}}} to %{{customdata[0]:{form}}}",
            **edge,
        ),
    ]


def _hover(curve: Curve, form: str, where: str = "") -> str:
    """Value and, unless every value stands for itself, the number of observations behind it."""
    observed = "" if set(curve.counts) <= {"1", "?"} else "  (n = %{customdata[1]})"
    return f"{where}%{{y:{form}}}{observed}"


def bars(curve: Curve, name: str, color: str, form: str = ".4f", **extra: Any) -> go.Bar:
    """One bar a layer."""
    return go.Bar(
        x=curve.layers,
        y=curve.values,
        customdata=curve.custom,
        name=name,
        marker={"color": color, "line": {"width": 0}},
        hovertemplate=_hover(curve, form),
        **extra,
    )


def heat(cells: Matrix, *, quantity: str, signed: bool, alt: str, **about: Any) -> go.Figure:
    """A square map over pairs of layers with a fixed range, [-1, 1] when signed, else [0, 1].

    Args:
        cells: what is drawn; layer 0 at the lower left, so that depth grows upwards and to the right.
        quantity: name of the number, for the colour bar and the hover box.
        signed: whether the number may be negative.
        alt: see `figure`.
        about: passed on to `figure` (title, subtitle, variant, beside).
    """
    named = layer_axis(cells.layers[-1], first=0)
    ticks = {key: named[key] for key in ("tickvals", "ticktext")} | {"ticks": "", "showgrid": False, "showline": False}
    counts = {count for row in cells.counts for count in row}
    observed = counts.pop() if len(counts) == 1 else "%{customdata}"
    gap = 1 if len(cells.layers) <= 40 else 0
    trace = go.Heatmap(
        x=cells.layers,
        y=cells.layers,
        z=cells.values,
        customdata=cells.counts if counts else None,
        zmin=-1 if signed else 0,
        zmax=1,
        colorscale=SIGNED_SCALE if signed else UNIT_SCALE,
        xgap=gap,
        ygap=gap,
        hoverongaps=False,
        hovertemplate=f"Layers %{{y}} and %{{x}}<br>{quantity} <b>%{{z:.4f}}</b><br>n = {observed}<extra></extra>",
        colorbar={
            "thickness": 10,
            "len": 1,
            "outlinewidth": 0,
            "xpad": 8,
            "ticklen": 3,
            "nticks": 6,
            "tickfont": {"size": 11, "color": MUTED},
        },
    )
    return figure(
        [trace],
        alt=alt,
        xaxis={"title": {"text": "Layer"}, "constrain": "domain", **ticks},
        yaxis={"title": {"text": "Layer"}, "scaleanchor": "x", "constrain": "domain", **ticks},
        height=480,
        hovermode="closest",
        **about,
    )


def shade_key(title: str, shades: Sequence[str], low: float, high: float, stepped: bool = False) -> go.Scatter:
    """A colour bar for traces that are told apart by their shade; draws nothing else.

    Args:
        title: of the bar.
        shades: from the lowest to the highest.
        low: value of the lower end.
        high: value of the upper end.
        stepped: whether each shade fills an equal part of the bar, rather than blending into the next.
    """
    count = len(shades)
    if stepped:
        scale = [[(i + end) / count, shade] for i, shade in enumerate(shades) for end in (0, 1)]
    else:
        scale = [[i / (count - 1), shade] for i, shade in enumerate(shades)]
    bar = {
        "title": {"text": title, "font": {"size": 11, "color": MUTED}},
        "thickness": 10,
        "len": 1,
        "outlinewidth": 0,
        "xpad": 8,
        "ticklen": 3,
        "nticks": 6,
        "tickfont": {"size": 11, "color": MUTED},
    }
    marker = {"color": [low], "cmin": low, "cmax": high, "colorscale": scale, "colorbar": bar, "showscale": True}
    return go.Scatter(x=[None], y=[None], mode="markers", showlegend=False, hoverinfo="skip", marker=marker)
