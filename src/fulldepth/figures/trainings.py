"""Several training runs on one set of axes, at equal steps and over equal time, and what each differs by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import plotly.graph_objects as go

from fulldepth.figures.comparison import overlays
from fulldepth.figures.displacement import PER_LAYER
from fulldepth.figures.record import TRAININGS, Figure, Run, Source
from fulldepth.figures.steps import STEP_AXIS, step_line
from fulldepth.figures.style import MUTED, Figures, figure, minus
from fulldepth.figures.training import LATER, Track, penalty_figure, terms, track

JUMPS = ("Last layer", "Last two layers", "Last three layers")


def _displacement(source: Source, column: str) -> Figures:
    """The profiles at the common step, `meta["step"]` (default: the last one), or what they differ by."""
    step = source.meta.get("step", source.table["step"].max())
    at_step = Source(source.table[source.table["step"] == step], source.meta)
    made = overlays(at_step, PER_LAYER, column)
    for key, drawn in made.items():
        lasts = {str(trace.name): trace.y[-1] for trace in drawn.data}
        subtitle = f"{drawn.layout.meta['subtitle']}, at step {step:,}".replace("a model", "a run")
        alt = _extent("Last layer", lasts, "+.3f" if column == "difference" else ".3f")
        about = {**drawn.layout.meta, "subtitle": subtitle, "alt": alt}
        made[key] = drawn.update_layout(meta=about, title_subtitle_text=subtitle)
    return made


def _extent(what: str, values: Mapping[str, float | None], form: str) -> str:
    """One sentence on which run is lowest and which is highest."""
    known = sorted((value, name) for name, value in values.items() if value is not None)
    if not known:
        return f"{what}: no finite value."
    (low, lowest), (high, highest) = known[0], known[-1]
    if minus(low, form) == minus(high, form):
        return f"{what}: {minus(low, form)} in {lowest if len(known) == 1 else 'every run'}."
    return f"{what}: from {minus(low, form)} in {lowest} to {minus(high, form)} in {highest}."


def _lines(models: list[Run], tracks: list[Track], form: str) -> list[go.Scatter]:
    return [
        step_line(one.steps, one.values, run.name, form=form, **run.style)
        for run, one in zip(models, tracks, strict=True)
        if one
    ]


def _words(models: list[Run], tracks: list[Track], form: str) -> str:
    """How the runs stand at the last step that all of them have."""
    drawn = [(run.name, dict(zip(one.steps, one.values, strict=True))) for run, one in zip(models, tracks, strict=True)]
    drawn = [(name, values) for name, values in drawn if any(value is not None for value in values.values())]
    common = set.intersection(*(set(values) for _, values in drawn)) if drawn else set()
    if not common:
        return ""
    step = max(common)
    return _extent(f"At step {step:,}", {name: values[step] for name, values in drawn}, form)


def _losses(source: Source) -> Figures:
    """On the validation data, of all steps and of the later ones, and on the training data."""
    made = {
        "": _loss(source.runs, "validation_loss", "Validation"),
        "later": _loss(source.runs, "validation_loss", LATER, Track.later),
        "training": _loss(source.runs, "train_loss", "Training"),
    }
    return {key: drawn for key, drawn in made.items() if drawn is not None}


def _loss(
    models: list[Run], measure: str, variant: str, part: Callable[[Track], Track] = lambda whole: whole
) -> go.Figure | None:
    tracks = [part(track(run.table, measure)) for run in models]
    if not any(tracks):
        return None
    training = measure == "train_loss"
    return figure(
        _lines(models, tracks, ".4f"),
        subtitle="Mean training loss since the previous evaluation, without penalties"
        if training
        else "Cross-entropy per token of the validation data, one line a run",
        alt=_words(models, tracks, ".3f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "Loss (nats)"}},
        variant=variant,
        showlegend=True,
    )


def _difference(source: Source) -> go.Figure | None:
    models = source.runs
    others = [run for run in models if not run.baseline and "difference" in run.table.columns]
    tracks = [track(run.table, "validation_loss", column="difference") for run in others]
    if not any(tracks):
        return None
    baseline = next((run.name for run in models if run.baseline), "the baseline")
    drawn = figure(
        _lines(others, tracks, "+.4f"),
        title=f"Validation loss: difference from {baseline}",
        alt=_words(others, tracks, "+.3f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "Δ Loss (nats)"}},
        showlegend=True,
    )
    drawn.add_hline(0, line={"color": MUTED, "width": 1})
    return drawn


def _over_time(source: Source) -> go.Figure | None:
    """Validation loss against the time that training took, in the largest unit that suits all runs."""
    models = source.runs
    clocks = [track(run.table, "elapsed") for run in models]
    known = [value for clock in clocks for value in clock.values if value is not None]
    if not known:
        return None
    unit, length = next(((u, n) for u, n in (("hours", 3600), ("minutes", 60)) if max(known) >= 2 * n), ("seconds", 1))
    traces, longest = [], 0.0
    for run, clock in zip(models, clocks, strict=True):
        at = dict(zip(clock.steps, clock.values, strict=True))
        loss = track(run.table, "validation_loss")
        points = [
            (when / length, step, value)
            for step, value in zip(loss.steps, loss.values, strict=True)
            if (when := at.get(step)) is not None
        ]
        if any(value is not None for *_, value in points):
            drawn = step_line([t for t, *_ in points], [v for *_, v in points], run.name, form=".4f", **run.style)
            hover = (
                f"%{{fullData.name}}, step %{{customdata:,}}<br>%{{x:.2f}} {unit}<br><b>%{{y:.4f}}</b><extra></extra>"
            )
            traces.append(drawn.update(customdata=[step for _, step, _ in points], hovertemplate=hover))
            longest = max(longest, *(t for t, *_ in points))
    if not traces:
        return None
    return figure(
        traces,
        alt=f"The longest run trains for {longest:.3g} {unit}.",
        xaxis={"title": {"text": f"Training time ({unit})"}, "rangemode": "tozero", "nticks": 7},
        yaxis={"title": {"text": "Loss (nats)"}},
        showlegend=True,
        hovermode="closest",
    )


def _jump_rates(source: Source) -> Figures:
    made = {str(back): _jump_rate(source.runs, back) for back in range(len(JUMPS))}
    return {key: drawn for key, drawn in made.items() if drawn is not None}


def _jump_rate(models: list[Run], back: int) -> go.Figure | None:
    tracks = [track(run.table, "jump_rate", "residual", run.layers - back) for run in models]
    if not any(tracks):
        return None
    return figure(
        _lines(models, tracks, ".2f"),
        alt=_words(models, tracks, ".1f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "ζ (%)"}, "rangemode": "tozero", "ticksuffix": " %"},
        variant=JUMPS[back],
        showlegend=True,
    )


def _penalties(source: Source) -> Figures:
    """One figure a term, with the runs that log it."""
    models = source.runs
    known = list(dict.fromkeys(term for run in models for term in terms(run.table)))
    made: Figures = {}
    for term in known:
        tracks = [track(run.table, "penalty", term) for run in models]
        logged = [(run, one) for run, one in zip(models, tracks, strict=True) if one]
        if logged:
            own, kept = [run for run, _ in logged], [one for _, one in logged]
            made[term] = penalty_figure(
                _lines(own, kept, ".4~g"), term, kept[0].unit, _words(own, kept, ".4g"), beside=len(known) > 1
            ).update_layout(showlegend=True)
    return made


FIGURES = (
    Figure(
        "loss",
        "loss",
        _losses,
        kinds=(TRAININGS,),
        title="Loss over training",
    ),
    Figure(
        "difference_loss",
        "loss",
        _difference,
        kinds=(TRAININGS,),
        subtitle="At equal steps; below zero is better than the baseline",
    ),
    Figure(
        "penalty",
        "loss",
        _penalties,
        kinds=(TRAININGS,),
    ),
    Figure(
        "displacement",
        "displacement",
        lambda source: _displacement(source, "value"),
        kinds=(TRAININGS,),
    ),
    Figure(
        "difference_displacement",
        "displacement",
        lambda source: _displacement(source, "difference"),
        kinds=(TRAININGS,),
    ),
    Figure(
        "steps_jump_rate",
        "displacement",
        _jump_rates,
        kinds=(TRAININGS,),
        title="Jump rate over training",
        subtitle="Accumulated growth of the displacement over the last layers, in per cent",
    ),
    Figure(
        "time_loss",
        "cost",
        _over_time,
        kinds=(TRAININGS,),
        title="Validation loss over training time",
        subtitle="Evaluating and saving left out; a slower step moves the curve to the right",
    ),
)
