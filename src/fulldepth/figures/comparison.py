"""Curves over depth, one line per model, and differences from the baseline."""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, curve
from fulldepth.figures.draw import add_level, line, set_first_apart, with_errors
from fulldepth.figures.record import Quantity, Source, readings
from fulldepth.figures.style import Figures, axis, extremes, figure, layer_axis

ERROR = "difference_error"


def overlays(source: Source, quantities: Iterable[Quantity], column: str = "value") -> Figures:
    """Figures of quantities, one line per model; differences from the baseline if `column` is `difference`."""
    return readings((quantity.key, _overlay(quantity, source, column)) for quantity in quantities)


def _overlay(quantity: Quantity, source: Source, column: str) -> go.Figure | None:
    relative = source.meta.get("depth") == "relative"
    difference = column == "difference"
    traces, told, bars = [], [], False
    form = f"+{quantity.form}" if difference else quantity.form
    for run in source.compared if difference else source.runs:
        if values := quantity.curve(run.table, run.layers, column):
            trace = line(values, run.name, form=form, depth=run.layers if relative else None, **run.style)
            errors = Curve([], [], [])
            if difference and ERROR in run.table.columns:
                errors = quantity.curve(run.table, run.layers, ERROR)
            elif quantity.spread and not difference:
                errors = curve(run.table, quantity.measure, quantity.spread, quantity.site)
            bars |= with_errors(trace, values, errors, quantity.form, 2 if difference else 1)
            traces.append(trace)
            told.append(extremes(run.name, values.layers, values.values))
    if not traces:
        return None
    settings = quantity.settings
    if difference:
        settings = {key: settings[key] for key in ("tickformat", "ticksuffix") if key in settings}
    first = 0 if any(0 in quantity.curve(run.table, run.layers).layers for run in source.runs) else 1
    drawn = figure(
        traces,
        title=f"{quantity.title}: difference from {source.baseline}" if difference else f"{quantity.title} per layer",
        subtitle=("Value minus the baseline’s at the same depth" if difference else "One line a model")
        + bars * ("; bars: two standard errors of the difference" if difference else "; bars: one standard error"),
        alt=" ".join(told),
        xaxis=layer_axis(max(run.layers for run in source.runs), first=first, relative=relative),
        yaxis=axis(f"Δ {quantity.axis}" if difference else quantity.axis, **settings),
        variant=quantity.variant,
        showlegend=True,
        hovermode="closest" if relative else "x unified",
    )
    if not relative:
        drawn = set_first_apart(drawn, [run.name for run in source.runs])
    return add_level(drawn, 0) if difference else drawn
