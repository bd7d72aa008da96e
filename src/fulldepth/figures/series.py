"""Training checkpoints: how the layers change over steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import shade_key
from fulldepth.figures.lens import median_layer, tolerances
from fulldepth.figures.record import SERIES, TRAINING, Figure, Quantity, Source, readings
from fulldepth.figures.rows import Curve, curve
from fulldepth.figures.steps import STEP_AXIS, change, step_line
from fulldepth.figures.style import SEQUENTIAL, Figures, by_depth, categorical, figure, layer_name


def _jump_rate(source: Source) -> go.Figure | None:
    tables, layers = source.steps, source.layers
    steps = list(tables)
    rates = {step: _by_layer(curve(rows, "jump_rate", "value")) for step, rows in tables.items()}
    traces = []
    for back in range(3):
        values = [rates[step].get(layers - back) for step in steps]
        if any(value is not None for value in values):
            name = "ζ of the last layer" if not back else f"ζ of the last {back + 1} layers"
            traces.append(step_line(steps, values, name, form=".2f", **categorical(back)))
    if not traces:
        return None
    return figure(
        traces,
        alt=change("Jump rate of the last layer in per cent", steps, list(traces[0].y), ".1f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "ζ (%)"}, "rangemode": "tozero", "ticksuffix": " %"},
    )


def _depth(source: Source) -> go.Figure | None:
    tables, layers = source.steps, source.layers
    steps = list(tables)
    lines: dict[str, list[float | None]] = {}
    for prefix, name in (("eps=", "Effective depth, ε = {}"), ("relative_eps=", "Effective depth, relative ε = {}")):
        depths = {step: tolerances(rows, prefix) for step, rows in tables.items()}
        known = sorted({eps for found in depths.values() for eps in found})
        eps = "0.05" if "0.05" in known else next(iter(known), None)
        if eps is not None:
            lines[name.format(eps)] = [depths[step].get(eps) for step in steps]
    settled = [median_layer(curve(rows, "saturation", "cumulative")) for rows in tables.values()]
    if any(value is not None for value in settled):
        lines = {"Median saturation layer": settled, **lines}
    if not lines:
        return None
    traces = [
        step_line(steps, values, name, form=".0f", **categorical(index))
        for index, (name, values) in enumerate(lines.items())
    ]
    name, values = next(iter(lines.items()))
    return figure(
        traces,
        subtitle=f"Out of {layers} layers",
        alt=change(name, steps, values, ".0f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "Layer"}, "range": [0, layers * 1.05]},
    )


def _by_layer(found: Curve) -> dict[int, float | None]:
    return dict(zip(found.layers, found.values, strict=True))


def followed(source: Source, quantities: Iterable[Quantity]) -> Figures:
    """Each quantity over steps, one line a layer."""
    return readings((quantity.key, _by_depth(quantity, source.steps, source.layers)) for quantity in quantities)


def _by_depth(quantity: Quantity, tables: dict[int, pd.DataFrame], layers: int) -> go.Figure | None:
    steps = list(tables)
    values = {step: _by_layer(quantity.curve(rows, layers)) for step, rows in tables.items()}
    depths = sorted({layer for found in values.values() for layer in found})
    traces = [
        step_line(
            steps,
            [values[step].get(layer) for step in steps],
            layer_name(layer),
            by_depth(layer, layers),
            quantity.form,
        )
        for layer in depths
    ]
    hover = f"%{{fullData.name}}, step %{{x:,}}<br><b>%{{y:{quantity.form}}}</b><extra></extra>"
    traces = [
        trace.update(showlegend=False, hovertemplate=hover)
        for trace in traces
        if any(value is not None for value in trace.y)
    ]
    if not traces:
        return None
    last = list(traces[-1].y)
    return figure(
        [*traces, shade_key("Layer", SEQUENTIAL[2:], depths[0], layers)],
        title=f"{quantity.title} of every layer over training",
        subtitle="One line a layer, stronger = deeper",
        alt=change(f"{quantity.title} of {layer_name(depths[-1]).lower()}", steps, last, ".3f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": quantity.axis}, **quantity.settings},
        variant=quantity.variant,
        hovermode="closest",
    )


JUMP_RATE = Figure(
    "steps_jump_rate",
    "training",
    _jump_rate,
    kinds=(SERIES,),
    title="Jump rate over training",
    subtitle="Accumulated growth of the displacement over the last layers, in per cent",
)
FIGURES = (
    JUMP_RATE,
    Figure("steps_depth", "training", _depth, kinds=(SERIES, TRAINING), title="Depth in use over training"),
)
OF_TRAINING = (replace(JUMP_RATE, section="displacement", kinds=(TRAINING,)),)
"""Stands after the displacement of a training run, rather than first."""
