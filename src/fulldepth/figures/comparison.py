"""Curves over depth, one line per model, and differences from the baseline."""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go

from fulldepth.figures.draw import add_level, line, set_first_apart
from fulldepth.figures.record import Quantity, Source, readings
from fulldepth.figures.style import Figures, axis, extremes, figure, layer_axis

ERROR = "difference_error"


def overlays(source: Source, quantities: Iterable[Quantity], column: str = "value") -> Figures:
    """Figures of quantities, one line per model; differences from the baseline if `column` is `difference`."""
    return readings((quantity.key, _overlay(quantity, source, column)) for quantity in quantities)


def _overlay(quantity: Quantity, source: Source, column: str) -> go.Figure | None:
    relative = source.meta.get("depth") == "relative"
    difference = column == "difference"
    traces, words = [], []
    form = f"+{quantity.form}" if difference else quantity.form
    for run in source.compared if difference else source.runs:
        if values := quantity.curve(run.table, run.layers, column):
            trace = line(values, run.name, form=form, depth=run.layers if relative else None, **run.style)
            if difference and ERROR in run.table.columns:
                errors = [error or 0.0 for error in quantity.curve(run.table, run.layers, ERROR).values]
                if any(errors):
                    trace.error_y = {"array": [2 * error for error in errors], "thickness": 1, "width": 3}
            traces.append(trace)
            words.append(extremes(run.name, values.layers, values.values))
    if not traces:
        return None
    depth = max(run.layers for run in source.runs)
    settings = quantity.settings
    if difference:
        settings = {key: settings[key] for key in ("tickformat", "ticksuffix") if key in settings}
    first = 0 if any(0 in quantity.curve(run.table, run.layers).layers for run in source.runs) else 1
    drawn = figure(
        traces,
        title=f"{quantity.title}: difference from {source.baseline}" if difference else f"{quantity.title} per layer",
        subtitle=_subtitle(traces) if difference else "One line a model",
        alt=" ".join(words),
        xaxis=layer_axis(depth, first=first, relative=relative),
        yaxis=axis(f"Δ {quantity.axis}" if difference else quantity.axis, **settings),
        variant=quantity.variant,
        showlegend=True,
        hovermode="closest" if relative else "x unified",
    )
    if not relative:
        drawn = set_first_apart(drawn, [run.name for run in source.runs])
    return add_level(drawn, 0) if difference else drawn


def _subtitle(traces: list[go.Scatter]) -> str:
    bars = "; bars: two standard errors of the difference" if any(trace.error_y.array for trace in traces) else ""
    return f"Value minus the baseline’s at the same depth{bars}"
