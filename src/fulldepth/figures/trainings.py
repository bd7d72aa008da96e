"""Several training runs on one set of axes, at equal steps and over equal time, and what each differs by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures import comparison
from fulldepth.figures.comparison import Run
from fulldepth.figures.rows import select
from fulldepth.figures.steps import STEP_AXIS, step_line
from fulldepth.figures.style import MUTED, Figures, figure, minus
from fulldepth.figures.training import LATER, Track, penalty_figure, terms, track

JUMPS = ("Last layer", "Last two layers", "Last three layers")


def figures(table: pd.DataFrame, meta: Mapping[str, Any]) -> Figures:
    """A line a run: `loss`, `difference_loss`, `time_loss`, `penalty`, displacement at the common step, jump rates.

    Args:
        table: rows with `step`, `model` and `difference`.
        meta: the document; `meta["step"]` is the step at which displacement is compared (default: the last one).
    """
    models = comparison.runs(table, meta)
    made: Figures = {
        name: drawn
        for name, drawn in (
            ("loss", _loss(models, "validation_loss", "Validation")),
            ("loss:later", _loss(models, "validation_loss", LATER, Track.later)),
            ("loss:training", _loss(models, "train_loss", "Training")),
            ("difference_loss", _difference(models)),
            ("time_loss", _over_time(models)),
            *((f"steps_jump_rate:{back}", _jump_rate(models, back)) for back in range(len(JUMPS))),
        )
        if drawn is not None
    }
    made |= _penalties(models)
    return made | _displacement(models, table, meta)


def _displacement(models: list[Run], table: pd.DataFrame, meta: Mapping[str, Any]) -> Figures:
    """The profiles at the common step, and the differences from the baseline's."""
    step = meta.get("step", table["step"].max())
    at_step = select(table[table["step"] == step], "displacement")
    made = comparison.figures(at_step, meta)
    for name, drawn in made.items():
        lasts = {str(trace.name): trace.y[-1] for trace in drawn.data}
        form = "+.3f" if name.startswith("difference_") else ".3f"
        subtitle = f"{drawn.layout.meta['subtitle']}, at step {step:,}".replace("a model", "a run")
        about = {**drawn.layout.meta, "subtitle": subtitle, "alt": _extent("Last layer", lasts, form)}
        made[name] = drawn.update_layout(meta=about, title_subtitle_text=subtitle)
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


def _loss(
    models: list[Run], measure: str, variant: str, part: Callable[[Track], Track] = lambda whole: whole
) -> go.Figure | None:
    tracks = [part(track(run.table, measure)) for run in models]
    if not any(tracks):
        return None
    training = measure == "train_loss"
    return figure(
        _lines(models, tracks, ".4f"),
        title="Loss over training",
        subtitle="Mean training loss since the previous evaluation, without penalties"
        if training
        else "Cross-entropy per token of the validation data, one line a run",
        alt=_words(models, tracks, ".3f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "Loss (nats)"}},
        variant=variant,
        showlegend=True,
    )


def _difference(models: list[Run]) -> go.Figure | None:
    others = [run for run in models if not run.baseline and "difference" in run.table.columns]
    tracks = [track(run.table, "validation_loss", column="difference") for run in others]
    if not any(tracks):
        return None
    baseline = next((run.name for run in models if run.baseline), "the baseline")
    drawn = figure(
        _lines(others, tracks, "+.4f"),
        title=f"Validation loss: difference from {baseline}",
        subtitle="At equal steps; below zero is better than the baseline",
        alt=_words(others, tracks, "+.3f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "Δ Loss (nats)"}},
        showlegend=True,
    )
    drawn.add_hline(0, line={"color": MUTED, "width": 1})
    return drawn


def _over_time(models: list[Run]) -> go.Figure | None:
    """Validation loss against the time that training took, in the largest unit that suits all runs."""
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
        title="Validation loss over training time",
        subtitle="Evaluating and saving left out; a slower step moves the curve to the right",
        alt=f"The longest run trains for {longest:.3g} {unit}.",
        xaxis={"title": {"text": f"Training time ({unit})"}, "rangemode": "tozero", "nticks": 7},
        yaxis={"title": {"text": "Loss (nats)"}},
        showlegend=True,
        hovermode="closest",
    )


def _jump_rate(models: list[Run], back: int) -> go.Figure | None:
    tracks = [track(run.table, "jump_rate", "residual", run.layers - back) for run in models]
    if not any(tracks):
        return None
    return figure(
        _lines(models, tracks, ".2f"),
        title="Jump rate over training",
        subtitle="Accumulated growth of the displacement over the last layers, in per cent",
        alt=_words(models, tracks, ".1f"),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": "ζ (%)"}, "rangemode": "tozero", "ticksuffix": " %"},
        variant=JUMPS[back],
        showlegend=True,
    )


def _penalties(models: list[Run]) -> Figures:
    """One figure a term, with the runs that log it."""
    known = list(dict.fromkeys(term for run in models for term in terms(run.table)))
    made: Figures = {}
    for term in known:
        tracks = [track(run.table, "penalty", term) for run in models]
        logged = [(run, one) for run, one in zip(models, tracks, strict=True) if one]
        if logged:
            own, kept = [run for run, _ in logged], [one for _, one in logged]
            made[f"penalty:{term}"] = penalty_figure(
                _lines(own, kept, ".4~g"), term, kept[0].unit, _words(own, kept, ".4g"), beside=len(known) > 1
            ).update_layout(showlegend=True)
    return made
