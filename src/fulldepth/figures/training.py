"""Training: losses, penalties, displacement and time of runs; how the layers change over checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.comparison import overlays
from fulldepth.figures.curves import curve, number, select
from fulldepth.figures.draw import APART, add_level, line, scale_without, set_first_apart, shade_key
from fulldepth.figures.layers import PER_LAYER, PERCENT
from fulldepth.figures.lens import TOLERANCES, median_layer, tolerances
from fulldepth.figures.record import SERIES, TRAINING, TRAININGS, Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import (
    CATEGORICAL,
    SEQUENTIAL,
    ZERO,
    Figures,
    axis,
    by_depth,
    categorical,
    extremes,
    figure,
    label,
    layer_axis,
    layer_name,
    minus,
)

STEP_AXIS = axis("Training step", tickformat=",d", nticks=7, unifiedhovertitle={"text": "Step %{x:,}"})
MARKED = 60
"""Maximum number of points of a line with markers."""
TOLD = 4
"""Maximum number of lines that an alternative text describes."""
PROFILES = 7
"""Maximum number of steps whose displacement is drawn over layers."""
TERMS = {
    "jump": "Jump penalty",
    "coherence": "Coherence penalty",
    "orthogonality": "Orthogonality penalty",
    "aligned": "Aligned loss",
    "similarity": "Similarity penalty",
}
"""Site of the rows `penalty` -> name of the term."""


@dataclass(frozen=True)
class Track:
    """One number over steps, and how it is drawn. False if it has no finite value."""

    steps: list[int]
    values: list[float | None]
    name: str = ""
    color: str = CATEGORICAL[0]
    dash: str = "solid"
    unit: str = "1"

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values)


def track(
    table: pd.DataFrame,
    measure: str,
    site: str = "model",
    layer: int | None = None,
    statistic: str | None = None,
    column: str = "value",
    **drawn: Any,
) -> Track:
    """One row per step as a track, ascending; of one layer if the rows have layers, with a gap where it is missing.

    `drawn` holds name, colour and dash of the line.
    """
    rows = select(table, measure, statistic, site)
    if layer is not None:
        rows = rows[(rows["layer"] == layer).fillna(False).astype(bool)]
    rows = rows.drop_duplicates("step", keep="last").set_index("step").sort_index()
    unit = str(next(iter(rows["unit"].dropna()), "1"))
    if layer is not None:
        rows = rows.reindex(sorted(table["step"].unique()))
    return Track([int(step) for step in rows.index], [*map(number, rows[column])], unit=unit, **drawn)


def over_steps(
    tracks: Iterable[Track], form: str, *, yaxis: dict[str, Any], told: slice = slice(TOLD), **layout: Any
) -> go.Figure | None:
    """Lines over training steps; None if none has a finite value.

    Args:
        tracks: what is drawn; those without a finite value are left out.
        form: d3 number format of hover boxes.
        yaxis: settings of the value axis.
        told: the lines that the alternative text describes.
        layout: passed on to `figure`.
    """
    drawn = [track for track in tracks if track]
    if not drawn:
        return None
    traces = [step_line(line.steps, line, form) for line in drawn]
    alt = " ".join(_change(line, form.replace("~", "")) for line in drawn[told])
    return figure(traces, alt=alt, xaxis=STEP_AXIS, yaxis=yaxis, **layout)


def step_line(across: Sequence[float], drawn: Track, form: str, **extra: Any) -> go.Scatter:
    """The line of a track. `form` is a d3 number format."""
    return go.Scatter(
        x=list(across),
        y=drawn.values,
        name=drawn.name,
        mode="lines+markers" if len(across) <= MARKED else "lines",
        line={"color": drawn.color, "dash": drawn.dash, "width": 2},
        marker={"color": drawn.color, "size": 5},
        **{"hovertemplate": f"%{{y:{form}}}", **extra},
    )


def _change(drawn: Track, form: str) -> str:
    """One sentence: from the first step's value to the last one's."""
    points = [(step, value) for step, value in zip(drawn.steps, drawn.values, strict=True) if value is not None]
    texts = [f"{minus(value, form)} at step {step:,}" for step, value in dict.fromkeys((points[0], points[-1]))]
    return f"{drawn.name}: {', '.join(texts)}."


def thin(steps: list[int], limit: int) -> list[int]:
    """At most `limit` of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= limit:
        return steps
    return [steps[round(index * (len(steps) - 1) / (limit - 1))] for index in range(limit)]


def _of_runs(source: Source, measure: str, **rows: Any) -> list[Track]:
    """One track per run."""
    return [track(run.table, measure, **rows, name=run.name, **run.style) for run in source.runs]


def _losses(source: Source) -> Figures:
    """Validation and training loss: of one run in one figure, of several runs in two."""
    drawings: dict[str, tuple[list[Track], dict[str, Any]]]
    if source.kind == TRAININGS:
        drawings = {
            "Validation": (_of_runs(source, "validation_loss"), {}),
            "Training": (
                _of_runs(source, "train_loss"),
                {"subtitle": "Mean training loss since the previous evaluation, without penalties"},
            ),
        }
    else:
        tracks = [
            track(source.table, "validation_loss", name="Validation"),
            track(source.table, "train_loss", name="Training", color=CATEGORICAL[1], dash="dash"),
        ]
        drawings = {"": (tracks, {})}
    return readings(
        (
            variant.lower(),
            over_steps(tracks, ".4f", yaxis=axis("Loss (nats)"), variant=variant, showlegend=True, **about),
        )
        for variant, (tracks, about) in drawings.items()
    )


def _difference(source: Source) -> go.Figure | None:
    drawn = over_steps(
        [line for line in _of_runs(source, "validation_loss", column="difference") if line.name != source.baseline],
        "+.4f",
        title=f"Validation loss: difference from {source.baseline}",
        yaxis=axis("Δ Loss (nats)"),
        showlegend=True,
    )
    return drawn and add_level(drawn, 0)


def _penalties(source: Source) -> Figures:
    """One small figure per term, because their scales are unrelated: of one run, or of all that log the term."""
    several = source.kind == TRAININGS
    sites = [str(site) for site in select(source.table, "penalty")["site"].dropna().unique()]
    drawn = {}
    for index, term in enumerate([*(term for term in TERMS if term in sites), *(t for t in sites if t not in TERMS)]):
        style = {"name": term_name(term), "color": categorical(index)["color"]}
        tracks = _of_runs(source, "penalty", site=term) if several else [track(source.table, "penalty", term, **style)]
        unit = "nats" if any(line.unit == "nats" for line in tracks) else "Penalty"
        drawn[term] = over_steps(
            tracks,
            ".4~g",
            yaxis=axis(unit, **ZERO, tickformat=".3~g"),
            variant=term_name(term),
            beside=True,
            height=300,
            showlegend=several,
        )
    return {term: one for term, one in drawn.items() if one} if several else readings(drawn.items())


def term_name(term: str) -> str:
    """Displayed name of a term of the objective."""
    return TERMS.get(term) or label(term, 40)


def _profiles(source: Source) -> go.Figure | None:
    """The displacement of every layer at a few steps, later steps in stronger colours."""
    profiles = {step: curve(rows, "displacement", "mean") for step, rows in source.steps.items()}
    shown = thin([step for step, profile in profiles.items() if profile], PROFILES)
    if not shown:
        return None
    last = profiles[shown[-1]]
    drawn = figure(
        [
            line(profiles[step], f"Step {step:,}", by_depth(index, len(shown)))
            for index, step in enumerate(shown, start=1)
        ],
        alt=extremes(f"Mean displacement at step {shown[-1]:,}", last.layers, last.values),
        xaxis=layer_axis(source.layers),
        yaxis=axis("Displacement Ψ", **ZERO),
        showlegend=True,
    )
    return set_first_apart(drawn, [f"Step {step:,}" for step in shown])


def _profiles_of_runs(source: Source, column: str) -> Figures:
    """The profiles at the common step, `meta["step"]` (default: the last one), or their differences."""
    step = source.meta.get("step", source.table["step"].max())
    drawings = overlays(Source(source.table[source.table["step"] == step], source.meta), PER_LAYER, column)
    for drawn in drawings.values():
        drawn.layout.meta["subtitle"] = f"{drawn.layout.meta['subtitle']}, at step {step:,}".replace("a model", "a run")
    return drawings


def _jump_rate(source: Source) -> go.Figure | None:
    """Of the last layers of one model, or of the last layer of each run."""
    if source.kind == TRAININGS:
        tracks = [
            track(run.table, "jump_rate", "residual", run.layers, "value", name=run.name, **run.style)
            for run in source.runs
        ]
    else:
        names = ("ζ of the last layer", "ζ of the last 2 layers", "ζ of the last 3 layers")
        tracks = [
            track(source.table, "jump_rate", "residual", source.layers - back, "value", name=name, **categorical(back))
            for back, name in enumerate(names)
        ]
    return over_steps(tracks, ".2f", yaxis=axis("ζ (%)", **PERCENT), showlegend=True)


def _over_time(source: Source) -> go.Figure | None:
    """Validation loss over training time, in the largest unit that suits all runs."""
    clocks, losses = (_of_runs(source, measure) for measure in ("elapsed", "validation_loss"))
    times = [value for clock in clocks for value in clock.values if value is not None]
    if not times:
        return None
    unit, length = next(((u, n) for u, n in (("hours", 3600), ("minutes", 60)) if max(times) >= 2 * n), ("seconds", 1))
    hover = f"%{{fullData.name}}, step %{{customdata:,}}<br>%{{x:.2f}} {unit}<br><b>%{{y:.4f}}</b><extra></extra>"
    traces = []
    for clock, loss in zip(clocks, losses, strict=True):
        reached = dict(zip(clock.steps, clock.values, strict=True))
        pairs = [
            (step, value) for step, value in zip(loss.steps, loss.values, strict=True) if reached.get(step) is not None
        ]
        timed = replace(loss, steps=[step for step, _ in pairs], values=[value for _, value in pairs])
        if timed:
            across = [(reached[step] or 0.0) / length for step in timed.steps]
            traces.append(step_line(across, timed, ".4f", customdata=timed.steps, hovertemplate=hover))
    if not traces:
        return None
    return figure(
        traces,
        alt=f"The longest run trains for {max(max(trace.x) for trace in traces):.3g} {unit}.",
        xaxis=axis(f"Training time ({unit})", nticks=7, **ZERO),
        yaxis=axis("Loss (nats)"),
        showlegend=True,
        hovermode="closest",
    )


def _depth(source: Source) -> go.Figure | None:
    """Median saturation layer and effective depth over steps."""
    steps = list(source.steps)
    lines = {
        "Median saturation layer": [
            median_layer(curve(rows, "saturation", "cumulative")) for rows in source.steps.values()
        ]
    }
    for prefix, symbol in TOLERANCES.items():
        depths = [tolerances(rows, prefix) for rows in source.steps.values()]
        used = sorted({eps for found in depths for eps in found})
        if used:
            eps = "0.05" if "0.05" in used else used[0]
            lines[f"Effective depth, {symbol} = {eps}"] = [found.get(eps) for found in depths]
    lines = {name: values for name, values in lines.items() if any(value is not None for value in values)}
    return over_steps(
        [Track(steps, values, name, **categorical(index)) for index, (name, values) in enumerate(lines.items())],
        ".0f",
        subtitle=f"Out of {source.layers} layers",
        yaxis=axis("Layer", range=[0, source.layers * 1.05]),
    )


def followed(source: Source, quantities: Iterable[Quantity]) -> Figures:
    """Figures of quantities over steps, one line per layer."""
    return readings((quantity.key, _by_depth(quantity, source)) for quantity in quantities)


def _by_depth(quantity: Quantity, source: Source) -> go.Figure | None:
    steps, layers = list(source.steps), source.layers
    curves = [quantity.curve(rows, layers) for rows in source.steps.values()]
    by_layer = [dict(zip(values.layers, values.values, strict=True)) for values in curves]
    depths = sorted({layer for values in by_layer for layer in values})
    tracks = [
        Track(steps, [values.get(layer) for values in by_layer], layer_name(layer), by_depth(layer, layers))
        for layer in depths
    ]
    drawn = over_steps(
        tracks,
        quantity.form,
        title=f"{quantity.title} of every layer over training",
        subtitle="One line a layer, stronger = deeper",
        yaxis=axis(quantity.axis, **quantity.settings),
        variant=quantity.variant,
        hovermode="closest",
        showlegend=False,
        told=slice(-1, None),
    )
    if drawn is None:
        return None
    hover = f"%{{fullData.name}}, step %{{x:,}}<br><b>%{{y:{quantity.form}}}</b><extra></extra>"
    drawn.update_traces(showlegend=False, hovertemplate=hover)
    first, *others = [[value for value in track.values if value is not None] for track in tracks if track]
    rest = [value for values in others for value in values]
    if first and rest and max(map(abs, first)) > APART * max(map(abs, rest)):  # it would flatten the others
        drawn.layout.meta["subtitle"] += f"; {tracks[0].name.lower()} is beyond the scale"
        drawn.update_layout(yaxis_range=scale_without(rest))
    return drawn.add_trace(shade_key("Layer", SEQUENTIAL[2:], depths[0], layers))


JUMP_RATE = Figure(
    "steps_jump_rate",
    "training",
    _jump_rate,
    (SERIES,),
    "Jump rate over training",
    "Accumulated growth of the displacement over the last layers, in per cent",
)
OF_RUNS = (replace(JUMP_RATE, section="displacement", kinds=(TRAINING, TRAININGS)),)
"""Listed separately because it follows the displacement of a training run."""
FIGURES = (
    Figure(
        "loss",
        "loss",
        _losses,
        (TRAINING, TRAININGS),
        "Loss over training",
        "Cross-entropy per token without penalties; training: mean since the previous evaluation",
        methods=(
            Method(
                "Loss",
                ("validation_loss", "train_loss"),
                """Mean cross-entropy per token in nats, without penalties. The validation loss is of documents that
                are held out of training, with the model in evaluation mode; the training loss is the mean over the
                steps since the previous evaluation, so that it belongs to a slightly younger model. Step 0 is the
                model before its first step.""",
            ),
            Method(
                "Time and memory",
                ("throughput", "elapsed", "peak_memory"),
                """Training time leaves evaluating and saving out. Throughput counts the tokens of all processes since
                the previous evaluation. Peak memory is the most that was allocated on the accelerator so far, or,
                without one, that the process held since the run began, libraries included: its ratios are then closer
                to one than those of the training itself. Time and memory are compared only of runs during which other
                programs used at most 10 % of the machine’s CPU time.""",
            ),
        ),
    ),
    Figure(
        "difference_loss",
        "loss",
        _difference,
        (TRAININGS,),
        subtitle="At equal steps; below zero is better than the baseline",
    ),
    Figure(
        "penalty",
        "loss",
        _penalties,
        (TRAINING, TRAININGS),
        "Penalties over training",
        "Mean since the previous evaluation, before its weight",
        methods=(
            Method(
                "Penalties",
                ("penalty",),
                """What the objective adds to the cross-entropy, before its weight: the mean since the previous
                evaluation. Jump: displacement averaged over layers with the weights softmax(α l), l = 1..L.
                Coherence: squared distance of the attention sub-layers’ coherence from its target. Orthogonality:
                squared off-diagonal entries of the channels’ correlations. Aligned: cross-entropy of every layer’s
                own prediction, weighted by depth, in nats. Similarity: one minus the cosine to the last layer.""",
                source="""Shibata et al., <cite>Suppressing Final Layer Hidden State Jumps in Transformer
                Pretraining</cite>, Eq. 5–6; <cite>CR-Guided Transformers</cite>, Sec. 3.3; Jiang et al.,
                <cite>Tracing Representation Progression</cite>, Eq. 5 and App. B.3.""",
            ),
        ),
    ),
    Figure(
        "displacement",
        "displacement",
        _profiles,
        (TRAINING,),
        "Displacement per layer",
        "On the validation data, the later the stronger; 0 = the layer keeps the direction, ½ = orthogonal",
    ),
    Figure("displacement", "displacement", lambda source: _profiles_of_runs(source, "value"), (TRAININGS,)),
    Figure(
        "difference_displacement", "displacement", lambda source: _profiles_of_runs(source, "difference"), (TRAININGS,)
    ),
    Figure(
        "time_loss",
        "cost",
        _over_time,
        (TRAININGS,),
        "Validation loss over training time",
        "Evaluating and saving left out; a slower step moves the curve to the right",
    ),
    JUMP_RATE,
    Figure("steps_depth", "training", _depth, (SERIES, TRAINING), "Depth in use over training"),
)
