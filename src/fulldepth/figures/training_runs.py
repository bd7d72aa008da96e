"""Comparison of training runs: curves at equal steps and over time, and differences from the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.comparison import overlays
from fulldepth.figures.displacement import PER_LAYER, PERCENT
from fulldepth.figures.draw import add_level
from fulldepth.figures.record import TRAININGS, Figure, Run, Source, readings
from fulldepth.figures.steps import Track, over_steps, step_line, track
from fulldepth.figures.style import Figures, axis, figure, minus
from fulldepth.figures.training_run import LATER, penalty_figure, terms

JUMPS = ("Last layer", "Last two layers", "Last three layers")


def _displacement(source: Source, column: str) -> Figures:
    """The profiles at the common step, `meta["step"]` (default: the last one), or their differences."""
    step = source.meta.get("step", source.table["step"].max())
    at_step = Source(source.table[source.table["step"] == step], source.meta)
    drawings = overlays(at_step, PER_LAYER, column)
    for key, drawn in drawings.items():
        lasts = {str(trace.name): trace.y[-1] for trace in drawn.data}
        subtitle = f"{drawn.layout.meta['subtitle']}, at step {step:,}".replace("a model", "a run")
        alt = _extent("Last layer", lasts, "+.3f" if column == "difference" else ".3f")
        settings = {**drawn.layout.meta, "subtitle": subtitle, "alt": alt}
        drawings[key] = drawn.update_layout(meta=settings, title_subtitle_text=subtitle)
    return drawings


def _extent(subject: str, values: Mapping[str, float | None], form: str) -> str:
    """One sentence on the lowest and the highest run."""
    ranked = sorted((value, name) for name, value in values.items() if value is not None)
    if not ranked:
        return f"{subject}: no finite value."
    (low, lowest), (high, highest) = ranked[0], ranked[-1]
    if minus(low, form) == minus(high, form):
        return f"{subject}: {minus(low, form)} in {lowest if len(ranked) == 1 else 'every run'}."
    return f"{subject}: from {minus(low, form)} in {lowest} to {minus(high, form)} in {highest}."


def _tracks(runs: Sequence[Run], measure: str, **rows: Any) -> list[Track]:
    """One track per run."""
    return [track(run.table, measure, **rows, name=run.name, **run.style) for run in runs]


def _at_last_common_step(form: str) -> Callable[[Sequence[Track]], str]:
    """Alternative text: values of the runs at their last common step."""

    def words(tracks: Sequence[Track]) -> str:
        common = set.intersection(*(set(run.steps) for run in tracks))
        if not common:
            return ""
        step = max(common)
        return _extent(f"At step {step:,}", {run.name: run.at[step] for run in tracks}, form)

    return words


def _losses(source: Source) -> Figures:
    """Figures of the validation loss, over all steps and the later ones, and of the training loss."""
    validation, training = (_tracks(source.runs, measure) for measure in ("validation_loss", "train_loss"))
    subtitle = "Mean training loss since the previous evaluation, without penalties"
    return readings(
        [
            ("validation", _loss(validation, "Validation")),
            ("later", _loss([run.later() for run in validation], LATER)),
            ("training", _loss(training, "Training", subtitle)),
        ]
    )


def _loss(
    tracks: Sequence[Track],
    variant: str,
    subtitle: str = "Cross-entropy per token of the validation data, one line a run",
) -> go.Figure | None:
    return over_steps(
        tracks,
        ".4f",
        subtitle=subtitle,
        alt=_at_last_common_step(".3f"),
        yaxis=axis("Loss (nats)"),
        variant=variant,
        showlegend=True,
    )


def _difference(source: Source) -> go.Figure | None:
    drawn = over_steps(
        _tracks(source.compared, "validation_loss", column="difference"),
        "+.4f",
        title=f"Validation loss: difference from {source.baseline}",
        alt=_at_last_common_step("+.3f"),
        yaxis=axis("Δ Loss (nats)"),
        showlegend=True,
    )
    return drawn and add_level(drawn, 0)


def _over_time(source: Source) -> go.Figure | None:
    """Validation loss over training time, in the largest unit that suits all runs."""
    clocks, losses = (_tracks(source.runs, measure) for measure in ("elapsed", "validation_loss"))
    times = [value for clock in clocks for value in clock.values if value is not None]
    if not times:
        return None
    unit, length = next(((u, n) for u, n in (("hours", 3600), ("minutes", 60)) if max(times) >= 2 * n), ("seconds", 1))
    hover = f"%{{fullData.name}}, step %{{customdata:,}}<br>%{{x:.2f}} {unit}<br><b>%{{y:.4f}}</b><extra></extra>"
    traces = []
    for clock, loss in zip(clocks, losses, strict=True):
        points = [(time / length, step) for step in loss.steps if (time := clock.at.get(step)) is not None]
        values = [loss.at[step] for _, step in points]
        if any(value is not None for value in values):
            drawn = step_line([time for time, _ in points], values, loss.name, loss.color, ".4f", loss.dash)
            traces.append(drawn.update(customdata=[step for _, step in points], hovertemplate=hover))
    if not traces:
        return None
    return figure(
        traces,
        alt=f"The longest run trains for {max(max(trace.x) for trace in traces):.3g} {unit}.",
        xaxis=axis(f"Training time ({unit})", rangemode="tozero", nticks=7),
        yaxis=axis("Loss (nats)"),
        showlegend=True,
        hovermode="closest",
    )


def _jump_rates(source: Source) -> Figures:
    drawn = {str(back): _jump_rate(source.runs, back) for back in range(len(JUMPS))}
    return {key: result for key, result in drawn.items() if result is not None}


def _jump_rate(runs: Sequence[Run], back: int) -> go.Figure | None:
    return over_steps(
        [track for run in runs for track in _tracks([run], "jump_rate", site="residual", layer=run.layers - back)],
        ".2f",
        alt=_at_last_common_step(".1f"),
        yaxis=PERCENT,
        variant=JUMPS[back],
        showlegend=True,
    )


def _penalties(source: Source) -> Figures:
    """One figure per term, with the runs that log it."""
    logged_terms = list(dict.fromkeys(term for run in source.runs for term in terms(run.table)))
    drawn = {}
    for term in logged_terms:
        logged = [run for run in _tracks(source.runs, "penalty", site=term) if run]
        alt = _at_last_common_step(".4g")
        if logged:
            drawn[term] = penalty_figure(logged, term, alt, beside=len(logged_terms) > 1, showlegend=True)
    return drawn


FIGURES = (
    Figure("loss", "loss", _losses, (TRAININGS,), "Loss over training"),
    Figure(
        "difference_loss",
        "loss",
        _difference,
        (TRAININGS,),
        subtitle="At equal steps; below zero is better than the baseline",
    ),
    Figure("penalty", "loss", _penalties, (TRAININGS,)),
    Figure("displacement", "displacement", lambda source: _displacement(source, "value"), (TRAININGS,)),
    Figure("difference_displacement", "displacement", lambda source: _displacement(source, "difference"), (TRAININGS,)),
    Figure(
        "steps_jump_rate",
        "displacement",
        _jump_rates,
        (TRAININGS,),
        title="Jump rate over training",
        subtitle="Accumulated growth of the displacement over the last layers, in per cent",
    ),
    Figure(
        "time_loss",
        "cost",
        _over_time,
        (TRAININGS,),
        title="Validation loss over training time",
        subtitle="Evaluating and saving left out; a slower step moves the curve to the right",
    ),
)
