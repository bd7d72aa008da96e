"""Training checkpoints: how the layers change over steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, curve
from fulldepth.figures.displacement import PERCENT
from fulldepth.figures.draw import APART, scale_without, shade_key
from fulldepth.figures.lens import TOLERANCES, median_layer, tolerances
from fulldepth.figures.record import SERIES, TRAINING, Figure, Quantity, Source, readings
from fulldepth.figures.steps import Track, change, first_track, over_steps
from fulldepth.figures.style import SEQUENTIAL, Figures, axis, by_depth, categorical, layer_name


def _jump_rate(source: Source) -> go.Figure | None:
    rates = [_by_layer(curve(rows, "jump_rate", "value")) for rows in source.steps.values()]
    tracks = [
        Track(list(source.steps), [rate.get(source.layers - back) for rate in rates], name, **categorical(back))
        for back, name in enumerate(("ζ of the last layer", "ζ of the last 2 layers", "ζ of the last 3 layers"))
    ]
    return over_steps(tracks, ".2f", alt=first_track("Jump rate of the last layer in per cent", ".1f"), yaxis=PERCENT)


def _depth(source: Source) -> go.Figure | None:
    lines = {
        "Median saturation layer": [
            median_layer(curve(rows, "saturation", "cumulative")) for rows in source.steps.values()
        ]
    }
    for prefix, (symbol, _) in TOLERANCES.items():
        depths = [tolerances(rows, prefix) for rows in source.steps.values()]
        tolerances_used = sorted({eps for found in depths for eps in found})
        if tolerances_used:
            eps = "0.05" if "0.05" in tolerances_used else tolerances_used[0]
            lines[f"Effective depth, {symbol} = {eps}"] = [found.get(eps) for found in depths]
    lines = {name: values for name, values in lines.items() if any(value is not None for value in values)}
    return over_steps(
        [Track(list(source.steps), values, name, **categorical(i)) for i, (name, values) in enumerate(lines.items())],
        ".0f",
        subtitle=f"Out of {source.layers} layers",
        alt=first_track("{}", ".0f"),
        yaxis=axis("Layer", range=[0, source.layers * 1.05]),
    )


def _by_layer(values: Curve) -> dict[int, float | None]:
    return dict(zip(values.layers, values.values, strict=True))


def followed(source: Source, quantities: Iterable[Quantity]) -> Figures:
    """Figures of quantities over steps, one line per layer."""
    return readings((quantity.key, _by_depth(quantity, source)) for quantity in quantities)


def _by_depth(quantity: Quantity, source: Source) -> go.Figure | None:
    steps, layers = list(source.steps), source.layers
    curves = [_by_layer(quantity.curve(rows, layers)) for rows in source.steps.values()]
    depths = sorted({layer for values in curves for layer in values})
    tracks = [
        Track(steps, [values.get(layer) for values in curves], layer_name(layer), by_depth(layer, layers))
        for layer in depths
    ]
    drawn = over_steps(
        tracks,
        quantity.form,
        title=f"{quantity.title} of every layer over training",
        subtitle="One line a layer, stronger = deeper",
        alt=lambda tracks: change(
            f"{quantity.title} of {tracks[-1].name.lower()}", tracks[-1].steps, tracks[-1].values, ".3f"
        ),
        yaxis=axis(quantity.axis, **quantity.settings),
        variant=quantity.variant,
        hovermode="closest",
        showlegend=False,
    )
    if drawn is None:
        return None
    hover = f"%{{fullData.name}}, step %{{x:,}}<br><b>%{{y:{quantity.form}}}</b><extra></extra>"
    drawn.update_traces(showlegend=False, hovertemplate=hover)
    _leave_first_out(drawn, tracks)
    return drawn.add_trace(shade_key("Layer", SEQUENTIAL[2:], depths[0], layers))


def _leave_first_out(drawn: go.Figure, tracks: list[Track]) -> None:
    """Let the axis cover all lines but that of the first layer, if that one would flatten the others."""
    first, *others = [[value for value in track.values if value is not None] for track in tracks] or [[]]
    rest = [value for values in others for value in values]
    if not first or not rest or max(map(abs, first)) <= APART * max(map(abs, rest)):
        return
    subtitle = f"{drawn.layout.meta['subtitle']}; {tracks[0].name.lower()} is beyond the scale"
    drawn.update_layout(
        yaxis_range=scale_without(rest), meta={**drawn.layout.meta, "subtitle": subtitle}, title_subtitle_text=subtitle
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
"""Listed separately because it follows the displacement of a training run."""
