"""How far each layer turns the residual stream, and how much that grows over the last layers."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import band, bars, line
from fulldepth.figures.rows import NO_FIRST, curve
from fulldepth.figures.style import CATEGORICAL, MUTED, Figures, extremes, figure, layer_axis
from fulldepth.thresholds import LARGE_JUMP


def figures(table: pd.DataFrame, layers: int) -> Figures:
    """`displacement` and `jump_rate`."""
    made = {"displacement": _displacement(table, layers), "jump_rate": _jump_rate(table, layers)}
    return {name: drawn for name, drawn in made.items() if drawn is not None}


def _displacement(table: pd.DataFrame, layers: int) -> go.Figure | None:
    mean = curve(table, "displacement", "mean")
    normed = curve(table, "displacement", "mean", "final_normed")
    without = curve(table, "displacement", "mean" + NO_FIRST)
    low, high = curve(table, "displacement", "p05"), curve(table, "displacement", "p95")
    traces = []
    if low and high:
        traces += band(low, high, "p05–p95", CATEGORICAL[0])
    if mean:
        traces.append(line(mean, "Mean", CATEGORICAL[0]))
    if without:
        traces.append(line(without, "Mean without first token", CATEGORICAL[1], "dash"))
    if normed:
        last = line(normed, "Last layer after the final norm", CATEGORICAL[3])
        traces.append(last.update(mode="markers", marker={"symbol": "diamond-open", "size": 10, "line": {"width": 2}}))
    if not traces:
        return None
    return figure(
        traces,
        title="Displacement per layer",
        subtitle="0 = the layer keeps the direction, ½ = orthogonal, 1 = opposite",
        alt=extremes("Mean displacement", mean.layers, mean.values),
        xaxis=layer_axis(layers),
        yaxis={"title": {"text": "Displacement Ψ"}, "rangemode": "tozero"},
    )


def _jump_rate(table: pd.DataFrame, layers: int) -> go.Figure | None:
    rate = curve(table, "jump_rate", "value")
    if not rate:
        return None
    drawn = figure(
        [bars(rate, "ζ", CATEGORICAL[0], ".2f")],
        title="Jump rate from each layer on",
        subtitle="Accumulated growth of the mean displacement up to the last layer; "
        f"large from {LARGE_JUMP:g} % (dotted)",
        alt=extremes("Jump rate in per cent", rate.layers, rate.values, ".1f"),
        xaxis=layer_axis(layers),
        yaxis={"title": {"text": "ζ (%)"}, "rangemode": "tozero", "ticksuffix": " %"},
    )
    drawn.add_hline(LARGE_JUMP, line={"color": MUTED, "dash": "dot", "width": 1})
    return drawn
