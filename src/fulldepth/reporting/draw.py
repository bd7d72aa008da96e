"""Elements of figures: lines, bars and bands over layers, steps or removed blocks; heat maps; scatters."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fulldepth.reporting.source import NO_CURVE, PlottedCurve, number
from fulldepth.reporting.style import (
    CATEGORICAL,
    DIFFERENCE_SCALE,
    MUTED,
    SIGNED_SCALE,
    UNIT_SCALE,
    axis,
    figure,
    layer_axis,
    layer_title,
    translucent,
)

APART = 2.0
"""If the first layer exceeds the largest value of the other layers by this factor, it is left off the scale."""
BARE = {"ticks": "", "showgrid": False, "showline": False}
"""Settings of an axis of a heat map."""
SCALES: dict[str, dict[str, Any]] = {
    "": {},
    "zero": {"rangemode": "tozero"},
    "percent": {"rangemode": "tozero", "tickformat": ".0%"},
    "rate": {"rangemode": "tozero", "ticksuffix": " %"},
    "share": {"range": [0, 1.04], "tickformat": ".0%"},
    "unit": {"range": [0, 1.04]},
}
"""Name of a scale -> settings of the value axis; there are also `signed`, `log` and `positive`."""


def value_axis(title: str, scale: str, values: Iterable[float | None] = (), **settings: Any) -> dict[str, Any]:
    """A value axis; `signed` is [0, 1] unless a value is negative, and `log` is linear unless all are positive.

    `positive` is logarithmic, and values that are not positive are gaps. The ticks of a logarithmic axis are 1, 2 and 5
    times powers of ten, or equally spaced if fewer than two of these lie between the values.
    """
    finite = [value for value in values if value is not None]
    if scale == "positive":
        finite = [value for value in finite if value > 0]
        scale = "log"
    if scale == "signed":
        return axis(title, range=[-1.04 if min(finite, default=0) < 0 else 0, 1.04])
    if scale != "log":
        return axis(title, **SCALES[scale], **settings)
    low, high = min(finite, default=0), max(finite, default=0)
    if low <= 0:
        return axis(title, **SCALES["zero"])
    marks = (1, 2, 5) if high / low < 1e3 else (1,)
    ticks = [mark * 10.0**power for power in range(-12, 13) for mark in marks]
    if low < high and sum(low <= tick <= high for tick in ticks) < 2:
        power = 10.0 ** math.floor(math.log10(high - low))
        step = power * next(share for share in (1, 0.5, 0.2) if high - low >= 4 * share * power or share == 0.2)
        ticks = [step * count for count in range(math.floor(low / step), math.ceil(high / step) + 1)]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{tick:.10g}" for tick in ticks])


@dataclass(frozen=True)
class Drawn:
    """A curve and how it is drawn. False if it has no finite value."""

    curve: PlottedCurve
    name: str
    color: str = CATEGORICAL[0]
    dash: str = "solid"
    form: str = ".4f"
    """d3 number format of hover boxes."""
    plot: str = "line"
    """`line`, `bars`, or `marks` (open diamonds)."""
    errors: PlottedCurve = NO_CURVE
    """Half lengths of error bars."""
    low: PlottedCurve = NO_CURVE
    """Lower end of the band around the curve."""
    high: PlottedCurve = NO_CURVE
    """Upper end of the band."""
    band: str = ""
    """Name of the band in the legend; empty = it has no entry."""
    hover: str = ""
    """Text at the start of the hover box."""
    across: Sequence[float] = ()
    """Positions on the x axis of the curve and the ends of its band; empty = their own."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further settings of the trace."""

    def __bool__(self) -> bool:
        return bool(self.curve)

    def traces(self) -> list[go.Scatter | go.Bar]:
        """The band, and the curve with its error bars."""
        curve = self.curve
        errors = self.errors.points
        observed = "" if set(curve.counts) <= {"1", "?"} else "  (n = %{customdata[1]})"
        custom: list[list[Any]] = [[f"Layer {at}", count] for at, count in zip(curve.at, curve.counts, strict=True)]
        settings: dict[str, Any] = {}
        if any(widths := [errors.get(at, 0.0) for at in curve.at]):
            settings["error_y"] = {"array": widths, "thickness": 1.2, "width": 3}
            custom = [[*row, width] for row, width in zip(custom, widths, strict=True)]
            observed += f" ± %{{customdata[2]:{self.form}}}"
        shared = {"x": list(self.across) or curve.at, "y": curve.values, "name": self.name, "customdata": custom}
        shared |= {"hovertemplate": f"{self.hover}%{{y:{self.form}}}{observed}", **settings, **self.extra}
        if self.plot == "bars":
            return [go.Bar(marker={"color": self.color, "line": {"width": 0}}, **shared)]
        marker: dict[str, Any] = {"color": self.color, "size": 5}
        if self.plot == "marks":
            marker |= {"symbol": "diamond-open", "size": 10, "line": {"width": 2}}
        line = {"color": self.color, "dash": self.dash}
        mode = "markers" if self.plot == "marks" else "lines+markers" if len(curve.at) <= 126 else "lines"
        curve_trace = go.Scatter(**{"mode": mode, "line": line, "marker": marker, **shared})
        if not (self.low and self.high):
            return [curve_trace]
        edge: dict[str, Any] = {"mode": "lines", "line": {"width": 0, "color": self.color}, "name": self.band}
        edge |= {"legendgroup": self.band} if self.band else {"name": f"{self.name}, 95 %"}
        hover = f"%{{y:{self.form}}} to %{{customdata[0]:{self.form}}}"
        fill = {"fill": "tonexty", "fillcolor": translucent(self.color), "showlegend": bool(self.band)}
        ends = [[self.high.points.get(at)] for at in self.low.at]
        above, below = (list(self.across) or end.at for end in (self.high, self.low))
        return [
            go.Scatter(x=above, y=self.high.values, showlegend=False, hoverinfo="skip", **edge),
            go.Scatter(x=below, y=self.low.values, customdata=ends, hovertemplate=hover, **fill, **edge),
            curve_trace,
        ]


def chart(drawn: Iterable[Drawn], *, level: float | None = None, **settings: Any) -> go.Figure | None:
    """A figure of lines and bars; None if no curve has a finite value.

    `level` adds a horizontal line; `settings` are passed on to `figure`.
    """
    traces = [trace for curve in drawn if curve for trace in curve.traces()]
    if not traces:
        return None
    result = figure(traces, **settings)
    return result if level is None else add_level(result, level, "dot")


def set_first_apart(drawn: go.Figure, names: Collection[str] | None = None) -> go.Figure:
    """Scale the value axis to all layers except the first one drawn, if that layer would flatten the others.

    The first layer's value is then written at the top. The figure stays as it is if the first value is at most `APART`
    times the largest of the others.

    Args:
        drawn: a figure over layers.
        names: names of the lines that determine the scale; None = all.
    """
    lines = [trace for trace in drawn.data if names is None or trace.name in names]
    points = [(at, y) for trace in lines for at, y in zip(trace.x, trace.y, strict=True) if y is not None]
    layer = min((at for at, _ in points), default=0)
    first = [value for at, value in points if at == layer]
    rest = [value for at, value in points if at != layer]
    ends = scale_without(first, rest)
    if ends is None:
        return drawn
    drawn.add_annotation(
        text=f"\u2191 Layer {int(layer)}: {first[0]:.3g}", x=layer, y=1, yref="paper", xanchor="left",
        yanchor="top", xshift=14, showarrow=False, font={"size": 11, "color": MUTED},
    )  # fmt: skip
    return drawn.update_layout(yaxis_range=ends)


def scale_without(first: Sequence[float], rest: Sequence[float]) -> tuple[float, float] | None:
    """Ends of a value axis that fits `rest` alone, from zero unless a value is negative, with room above for a note.

    None if the first values are at most `APART` times the largest of the rest, and so need no separate scale.
    """
    if not rest or max(map(abs, first)) <= APART * max(map(abs, rest)):
        return None
    low = min([0.0, *rest])
    high = max([0.0, *rest])
    room = (high - low) or 1.0
    return (low - 0.05 * room if low < 0 else 0.0), high + 0.2 * room


def add_level(drawn: go.Figure, level: float, dash: str = "solid") -> go.Figure:
    """Add a thin horizontal line at a value."""
    return drawn.add_hline(level, line={"color": MUTED, "width": 1, "dash": dash})


def grid(table: pd.DataFrame, rows: Iterable[Any], columns: Iterable[Any], column: str = "value") -> pd.DataFrame:
    """Cells of a map by row and column, NaN where there is none; empty if no value is finite.

    `rows` and `columns` give the cell of each row of the table; the last row wins if several name the same cell.
    """
    cells = pd.DataFrame(
        {"row": [*map(int, rows)], "column": [*map(int, columns)], "value": [*map(number, table[column])]}
    )
    cells = cells.astype({"value": "float64"}).drop_duplicates(["row", "column"], keep="last")
    return (
        cells.pivot(index="row", columns="column", values="value") if cells["value"].notna().any() else cells.iloc[:0]
    )


def heat(
    cells: pd.DataFrame,
    *,
    names: Sequence[str] | None = None,
    axes: tuple[str, str] = ("Layer", "Layer"),
    quantity: str = "weight",
    low: float | None = None,
    high: float = 1.0,
    difference: bool = False,
    **layout: Any,
) -> go.Figure:
    """A heat map with the common colours: sequential from zero, or neutral at zero if `low` is negative.

    Args:
        cells: the values, see `grid`; rows from the bottom up.
        names: names of the rows; None = the rows are layers.
        axes: titles of the x and the y axis.
        quantity: name of the number, for the hover box.
        low: value of the first colour; None = zero, or symmetric if values are negative, up to the largest value.
        high: value of the last colour.
        difference: use the colour scale of differences.
        layout: passed on to `figure`.
    """
    rows = [*map(int, cells.index)]
    columns = [*map(int, cells.columns)]
    if low is None:
        values = cells.to_numpy()
        high = float(np.nanmax(np.abs(values))) or 1.0
        low = -high if np.nanmin(values) < 0 else 0
    gap = 1 if max(cells.shape) <= 40 else 0
    heatmap = go.Heatmap(
        x=columns, y=names or rows, z=[[*map(number, row)] for row in cells.to_numpy()], zmin=low, zmax=high,
        colorscale=DIFFERENCE_SCALE if difference else SIGNED_SCALE if low < 0 else UNIT_SCALE,
        xgap=gap, ygap=gap,
        hovertemplate=f"{axes[1]} %{{y}}, {axes[0].lower()} %{{x}}<br>{quantity} <b>%{{z:.4f}}</b><extra></extra>",
    )  # fmt: skip
    across, down = (
        {**layer_axis(places[-1], 0), **axis(layer_title(title, places[0])), **BARE, "range": None}
        for title, places in zip(axes, (columns, rows), strict=True)
    )
    if names:
        down = axis(layer_title(axes[1], rows[0]), type="category", tickvals=names[:: max(1, len(names) // 16)], **BARE)
    elif rows == columns:
        across = across | {"constrain": "domain"}
        down = down | {"constrain": "domain", "scaleanchor": "x"}
    return figure([heatmap], xaxis=across, yaxis=down, height=480, hovermode="closest", **layout)


def shade_key(title: str, shades: Sequence[str], low: float, high: float) -> go.Scatter:
    """An invisible trace with a colour bar from `low` to `high`, for traces that differ in shade."""
    scale = [[i / (len(shades) - 1), shade] for i, shade in enumerate(shades)]
    marker = {"color": [low], "cmin": low, "cmax": high, "colorscale": scale, "showscale": True}
    return legend_entry(None, marker={**marker, "colorbar": {"title": {"text": title}}}, showlegend=False)


def legend_entry(name: str | None, mode: str = "markers", **settings: Any) -> go.Scatter:
    """An invisible trace with an entry in the legend."""
    return go.Scatter(x=[None], y=[None], name=name, mode=mode, hoverinfo="skip", **settings)


def points(
    name: str, x: Sequence[float], y: Sequence[float], color: str, hover: str = "", *, lines: bool = False, **extra: Any
) -> go.Scatter:
    """A scatter of marks, joined if `lines` is True; without `hover` it has no hover box."""
    marker = {"color": color, "size": 9, **extra.pop("marker", {})}
    hover_box = {"hovertemplate": f"{hover}<extra>%{{fullData.name}}</extra>"} if hover else {"hoverinfo": "skip"}
    mode = "lines+markers" if lines else "markers"
    return go.Scatter(x=x, y=y, name=name, mode=mode, line={"color": color}, marker=marker, **hover_box, **extra)
