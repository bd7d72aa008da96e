"""Elements of figures: lines and bars over layers, bands, heat maps, colour keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, counted, curve, number
from fulldepth.figures.record import Source
from fulldepth.figures.style import (
    CATEGORICAL,
    DIFFERENCE_SCALE,
    GRID,
    MUTED,
    SIGNED_SCALE,
    UNIT_SCALE,
    ZERO,
    axis,
    extremes,
    figure,
    layer_axis,
    layer_name,
    minus,
    translucent,
)

COLOR_BAR = {
    "thickness": 10, "len": 1, "outlinewidth": 0, "xpad": 8, "ticklen": 3, "nticks": 6,
    "tickfont": {"size": 11, "color": MUTED},
}  # fmt: skip
TOLD = 2
"""Lines that an alternative text describes."""
APART = 2.0
"""Ratio to the largest value of the other layers from which the first layer is beyond the scale."""
BARE = {"ticks": "", "showgrid": False, "showline": False}
"""Settings of an axis of a heat map."""


@dataclass(frozen=True)
class Line:
    """One statistic of a measure over layers, and how it is drawn."""

    measure: str
    name: str
    statistic: str = "mean"
    site: str | None = "residual"
    color: str = CATEGORICAL[0]
    dash: str = "solid"
    form: str = ".4f"
    """d3 number format of hover boxes."""
    spread: str = ""
    """Statistic whose values are drawn as error bars."""
    state: str = ""
    """State of the model whose rows are drawn, if rows have states."""
    bar: bool = False
    """Whether to draw bars instead of a line."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the trace."""

    def curve(self, table: pd.DataFrame, other: int | None = None) -> Curve:
        """The values in a table of one model at one step; `other` is the second layer if the rows are pairs."""
        if self.state and "state" in table.columns:
            table = table[(table["state"] == self.state).fillna(False).astype(bool)]
        return curve(table, self.measure, self.statistic, self.site, other)

    def drawn(self, values: Curve, errors: Curve) -> go.Scatter | go.Bar:
        """The trace of these values, with their error bars."""
        if self.bar:
            trace = bars(values, self.name, self.color, self.form)
        else:
            trace = line(values, self.name, self.color, self.dash, self.form)
        with_errors(trace, values, errors, self.form)
        return trace.update(**self.trace)


Drawn = Sequence[tuple[Line, Curve]]
"""The lines of a figure that have values."""


def each_line(form: str = "") -> Callable[[Drawn], str]:
    """Alternative text: at which layers each line is lowest and highest. `form` is a Python number format."""
    return lambda drawn: " ".join(
        extremes(line.name, values.layers, values.values, form or line.form.replace("~", "")) for line, values in drawn
    )


def with_errors(trace: go.Scatter | go.Bar, values: Curve, errors: Curve, form: str, times: float = 1.0) -> bool:
    """Add bars of `times` the standard errors to a trace, and the errors to its hover box; False without errors.

    `form` is the d3 number format of the values.
    """
    widths = dict(zip(errors.layers, errors.values, strict=True))
    own = [widths.get(layer) or 0.0 for layer in values.layers]
    if not any(own):
        return False
    trace.error_y = {"array": [times * width for width in own], "thickness": 1.2, "width": 3}
    trace.customdata = [[*row, width] for row, width in zip(values.custom, own, strict=True)]
    trace.hovertemplate += f" ± %{{customdata[2]:{form}}}"
    return True


def over_layers(
    table: pd.DataFrame,
    layers: int,
    lines: Iterable[Line],
    *,
    yaxis: dict[str, Any] | Callable[[list[float | None]], dict[str, Any]],
    alt: Callable[[Drawn], str] | None = None,
    first: int = 1,
    other: int | None = None,
    behind: Sequence[go.Scatter] = (),
    after: Sequence[go.Scatter] = (),
    level: float | None = None,
    **layout: Any,
) -> go.Figure | None:
    """Lines and bars over the layers of one model; None if there is nothing to draw.

    Args:
        table: rows of one model at one step.
        layers: L.
        lines: what is drawn; those without a finite value are left out.
        yaxis: settings of the value axis, or a function of all drawn values that returns them.
        alt: see `figure`; called with the lines that are drawn. None = where the first `TOLD` of them are lowest and
            highest.
        first: the first layer of the axis.
        other: the second layer if the rows are pairs.
        behind: traces behind the lines; drawn even if there are no lines.
        after: traces after the lines; drawn only with lines or traces in `behind`.
        level: value at which a horizontal line is drawn.
        layout: passed on to `figure`.
    """
    drawn = [(line, values) for line in lines if (values := line.curve(table, other))]
    traces = [*behind]
    for line, values in drawn:
        traces.append(line.drawn(values, curve(table, line.measure, line.spread, line.site)))
    if not traces:
        return None
    if callable(yaxis):
        yaxis = yaxis([value for trace in traces for value in trace.y])
    told = alt(drawn) if alt else each_line()(drawn[:TOLD])
    result = figure([*traces, *after], alt=told, xaxis=layer_axis(layers, first=first), yaxis=yaxis, **layout)
    return result if level is None else add_level(result, level, "dot")


def set_first_apart(drawn: go.Figure, names: Collection[str]) -> go.Figure:
    """Let the value axis cover all layers but the first one drawn, if that one would flatten the others.

    The first layer's value is written at the top. Nothing changes if it is at most `APART` times the largest of the
    others.

    Args:
        drawn: a figure over layers.
        names: the lines that the axis is made for.
    """
    lines = [trace for trace in drawn.data if trace.name in names]
    points = [(at, y) for trace in lines for at, y in zip(trace.x, trace.y, strict=True) if y is not None]
    layer = min((at for at, _ in points), default=0)
    first = [value for at, value in points if at == layer]
    rest = [value for at, value in points if at != layer]
    if not rest or max(map(abs, first)) <= APART * max(map(abs, rest)):
        return drawn
    drawn.add_annotation(
        text=f"\u2191 {layer_name(int(layer))}: {first[0]:.3g}", x=layer, y=1, yref="paper", xanchor="left",
        yanchor="top", xshift=14, showarrow=False, font={"size": 11, "color": MUTED},
    )  # fmt: skip
    return drawn.update_layout(yaxis_range=scale_without(rest))


def scale_without(rest: Sequence[float]) -> tuple[float, float]:
    """Ends of a value axis for these values: from zero where none is negative, with room above for a note."""
    low, high = min([0.0, *rest]), max([0.0, *rest])
    room = (high - low) or 1.0
    return (low - 0.05 * room if low < 0 else 0.0), high + 0.2 * room


def of_layers(*lines: Line, **settings: Any) -> Callable[[Source], go.Figure | None]:
    """A function that draws the lines of one model, see `over_layers`."""
    return lambda source: over_layers(source.table, source.layers, lines, **settings)


def add_level(drawn: go.Figure, level: float, dash: str = "solid") -> go.Figure:
    """Add a thin horizontal line at a value."""
    return drawn.add_hline(level, line={"color": MUTED, "width": 1, **({} if dash == "solid" else {"dash": dash})})


def logarithmic(values: list[float | None], title: str) -> dict[str, object]:
    """A log axis if every value is positive; otherwise a linear one, so that no value is hidden."""
    finite = [value for value in values if value is not None]
    if min(finite, default=0) <= 0:
        return axis(title, **ZERO)
    marks = (1, 2, 5) if max(finite) / min(finite) < 1e3 else (1,)
    ticks = [mark * 10.0**power for power in range(-12, 13) for mark in marks]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])


def line(
    curve: Curve, name: str, color: str, dash: str = "solid", form: str = ".4f", depth: int | None = None, **extra: Any
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
    """The area between two curves: two traces, the upper one first, the lower one filled up to it.

    Empty if one of the curves has no values.
    """
    if not (low and high):
        return []
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
    """Hover text: the value and, unless it is 1 or unknown everywhere, the number of observations."""
    observed = "" if set(curve.counts) <= {"1", "?"} else "  (n = %{customdata[1]})"
    return f"{where}%{{y:{form}}}{observed}"


def bars(curve: Curve, name: str, color: str, form: str = ".4f", **extra: Any) -> go.Bar:
    """One bar per layer."""
    return go.Bar(
        x=curve.layers,
        y=curve.values,
        customdata=curve.custom,
        name=name,
        marker={"color": color, "line": {"width": 0}},
        hovertemplate=_hover(curve, form),
        **extra,
    )


@dataclass(frozen=True)
class Grid:
    """Cells of a map: rows from the bottom up, columns from the left. False if no cell has a finite value."""

    rows: list[int]
    columns: list[int]
    values: list[list[float | None]]
    counts: list[list[str]]

    def __bool__(self) -> bool:
        return bool(self.finite)

    @property
    def finite(self) -> list[float]:
        """Every finite value."""
        return [value for row in self.values for value in row if value is not None]


def grid(table: pd.DataFrame, rows: Iterable[Any], columns: Iterable[Any], column: str = "value") -> Grid:
    """The cells of a table's rows; `rows` and `columns` place each of them, and of equal places the last counts."""
    cells = {
        (int(row), int(at)): (number(value), counted(count))
        for row, at, value, count in zip(rows, columns, table[column], table["count"], strict=True)
    }
    down, across = (sorted({place[part] for place in cells}) for part in (0, 1))
    values, counts = ([[cells.get((row, at), (None, "?"))[part] for at in across] for row in down] for part in (0, 1))
    return Grid(down, across, values, counts)  # type: ignore[arg-type]


def heat(
    cells: Grid,
    *,
    where: str,
    quantity: str,
    low: float,
    high: float,
    xaxis: dict[str, Any],
    yaxis: dict[str, Any],
    names: Sequence[str] | None = None,
    difference: bool = False,
    alt: str = "",
    **layout: Any,
) -> go.Figure:
    """A heat map with the common colours: sequential from zero, or neutral at zero if `low` is negative.

    Args:
        cells: the values.
        where: begin of the hover box, with `%{x}` and `%{y}`.
        quantity: name of the number, for the hover box.
        low: value of the first colour.
        high: value of the last colour.
        xaxis: settings of the x axis.
        yaxis: settings of the y axis.
        names: of the rows; None = their numbers.
        difference: whether to use the colour scale of differences.
        alt: see `figure`; empty = the smallest and the largest value.
        layout: passed on to `figure`.
    """
    gap = 1 if max(len(cells.columns), len(cells.rows)) <= 40 else 0
    counts = {count for row in cells.counts for count in row}
    shown = go.Heatmap(
        x=cells.columns,
        y=names or cells.rows,
        z=cells.values,
        customdata=cells.counts,
        zmin=low,
        zmax=high,
        colorscale=DIFFERENCE_SCALE if difference else SIGNED_SCALE if low < 0 else UNIT_SCALE,
        xgap=gap,
        ygap=gap,
        hoverongaps=False,
        colorbar=COLOR_BAR,
        hovertemplate=f"{where}<br>{quantity} <b>%{{z:.4f}}</b><br>"
        f"n = {counts.pop() if len(counts) == 1 else '%{customdata}'}<extra></extra>",
    )
    return figure(
        [shown],
        alt=alt or f"From {minus(min(cells.finite), '.2f')} to {minus(max(cells.finite), '.2f')}.",
        xaxis={**BARE, **xaxis},
        yaxis={**BARE, **yaxis},
        height=480,
        hovermode="closest",
        **layout,
    )


def map_axis(title: str, layers: int, first: int = 0) -> dict[str, Any]:
    """Settings of the axis of a map over layers."""
    named = layer_axis(layers, first=first)
    return axis(title, tickvals=named["tickvals"], ticktext=named["ticktext"], constrain="domain")


def shade_key(title: str, shades: Sequence[str], low: float, high: float) -> go.Scatter:
    """An invisible trace with a colour bar from `low` to `high`, for traces that differ in shade."""
    scale = [[i / (len(shades) - 1), shade] for i, shade in enumerate(shades)]
    bar = {"title": {"text": title, "font": {"size": 11, "color": MUTED}}, **COLOR_BAR}
    marker = {"color": [low], "cmin": low, "cmax": high, "colorscale": scale, "colorbar": bar, "showscale": True}
    return legend_entry(None, marker=marker, showlegend=False)


def legend_entry(name: str | None, mode: str = "markers", **settings: Any) -> go.Scatter:
    """An invisible trace with an entry in the legend."""
    return go.Scatter(x=[None], y=[None], name=name, mode=mode, hoverinfo="skip", **settings)


def marked_layers(layers: Iterable[int], name: str) -> tuple[list[dict[str, Any]], list[go.Scatter]]:
    """Grey columns behind a figure at each of `layers` (shapes), and their entry in the legend."""
    shapes = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": layer - 0.5, "x1": layer + 0.5, "y0": 0, "y1": 1,
            "fillcolor": GRID, "line": {"width": 0}, "layer": "below",
        }
        for layer in layers
    ]  # fmt: skip
    return shapes, [legend_entry(name, marker={"symbol": "square", "size": 11, "color": GRID})] if shapes else []


def error_bars(points: Iterable[tuple[float, float, float]], color: str) -> dict[str, Any]:
    """Settings `error_x` or `error_y` of points (value, low, high): a bar from low to high."""
    above, below = zip(*((high - value, value - low) for value, low, high in points), strict=True)
    settings = {"type": "data", "symmetric": False, "color": color, "thickness": 1.2, "width": 4}
    return {**settings, "array": above, "arrayminus": below}
