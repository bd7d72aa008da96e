"""Evaluation: scores of tasks and quality of generated text by exit layer, with standard errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, curve, select
from fulldepth.figures.draw import add_level, logarithmic
from fulldepth.figures.record import EVALUATION, EVALUATIONS, Figure, Method, Source, readings
from fulldepth.figures.style import (
    CATEGORICAL,
    MUTED,
    ZERO,
    Figures,
    axis,
    categorical,
    extremes,
    figure,
    label,
    layer_axis,
    layer_name,
    translucent,
)

SCORE, QUALITY = "task_score", "generation_quality"
ERROR = "_stderr"
"""Suffix of a metric's standard error."""
HIGHEST_SHARE = 1.0 + 1e-9


@dataclass(frozen=True)
class Task:
    """A task of one model: its score by exit layer."""

    name: str
    metric: str
    higher_is_better: bool
    count: int | None
    chance: float | None
    scores: Curve
    errors: Mapping[int, float]
    """Layer -> standard error of its score; layers without one are missing."""
    layers: int
    above_chance: bool | None = None
    """Whether the whole model is measurably better than a guess, paired; None if that is not known."""
    shallowest: int | None = None
    """First layer from which on all are shown to keep the whole model's score; None if that is not known."""

    @property
    def values(self) -> dict[int, float]:
        """Layer -> score."""
        pairs = zip(self.scores.layers, self.scores.values, strict=True)
        return {layer: value for layer, value in pairs if value is not None}

    @property
    def full(self) -> float | None:
        """Score of the whole model."""
        return self.values.get(self.layers)

    @property
    def error(self) -> float | None:
        """Standard error of the whole model's score."""
        return self.errors.get(self.layers)

    @property
    def is_share(self) -> bool:
        """Whether all scores are shares, shown in per cent."""
        return self.higher_is_better and all(0 <= value <= HIGHEST_SHARE for value in self.values.values())


def tasks_of(table: pd.DataFrame, described: Mapping[str, Any] | None, layers: int) -> list[Task]:
    """The tasks in the rows of one model, in the order of the document and then of the rows."""
    rows = select(table, SCORE)
    named = [str(name) for name in rows["site"].dropna().unique()]
    stated = {str(name): entry or {} for name, entry in (described or {}).items()}
    tasks = [
        _task(rows[rows["site"] == name], name, stated.get(name, {}), layers)
        for name in [*(name for name in stated if name in named), *(name for name in named if name not in stated)]
    ]
    return [task for task in tasks if task.scores]


def _task(rows: pd.DataFrame, name: str, entry: Mapping[str, Any], layers: int) -> Task:
    metrics = [str(one) for one in rows["statistic"].unique() if not str(one).endswith(ERROR)]
    metric = str(entry.get("metric") or "")
    if metric not in metrics:
        metric = metrics[0] if metrics else ""
    errors = curve(rows, SCORE, metric + ERROR, name)
    known = zip(errors.layers, errors.values, strict=True)
    higher = entry.get("higher_is_better")
    count, chance = entry.get("count"), entry.get("chance")
    return Task(
        name=name,
        metric=metric,
        higher_is_better=True if higher is None else bool(higher),
        count=count if isinstance(count, int) else None,
        chance=float(chance) if isinstance(chance, int | float) else None,
        scores=curve(rows, SCORE, metric, name),
        errors={layer: value for layer, value in known if value is not None},
        layers=layers,
        above_chance=entry.get("advised") if isinstance(entry.get("advised"), bool) else None,
        shallowest=entry.get("earliest") if isinstance(entry.get("earliest"), int) else None,
    )


def tasks(source: Source) -> list[Task]:
    """The tasks of one evaluation."""
    return tasks_of(source.table, source.meta.get("tasks"), source.layers)


def _scores(source: Source) -> Figures:
    every = tasks(source)
    if every and all(set(task.values) == {source.layers} for task in every):
        return readings([("", _full_scores(every))])
    return readings((task.name, _by_layer(task, len(every) > 1)) for task in every)


def _by_layer(task: Task, several: bool) -> go.Figure:
    """The score of one task by exit layer, with bars of one standard error."""
    color = CATEGORICAL[0]
    form = ".1%" if task.is_share else ".4~g"
    trace = _line(task, label(task.metric, 40), {"color": color, "dash": "solid"}, form)
    words = extremes(label(task.name), task.scores.layers, task.scores.values, ".1%" if task.is_share else ".3g")
    shallowest = task.shallowest
    if task.above_chance and shallowest is not None and shallowest < task.layers:
        words += f" Shown to keep the whole model’s score from {layer_name(shallowest).lower()} on."
    chance = "" if task.chance is None else "; dotted: chance"
    drawn = figure(
        [trace],
        title="Score by exit layer" if several else f"Score on {label(task.name, 60)} by exit layer",
        subtitle=f"Bars: one standard error; shaded: the whole model’s{chance}",
        alt=words,
        xaxis=layer_axis(task.layers, first=min([1, *task.values])),
        yaxis=axis(label(task.metric, 40), **({"tickformat": ".0%", **ZERO} if task.is_share else {})),
        variant=f"{label(task.name, 60)}" if several else "",
        beside=several,
        height=290,
        showlegend=False,
    )
    if task.full is not None and task.error is not None:
        drawn.add_hrect(
            task.full - task.error, task.full + task.error, fillcolor=translucent(color), line_width=0, layer="below"
        )
    return drawn if task.chance is None else add_level(drawn, task.chance, "dot")


def _line(task: Task, name: str, style: Mapping[str, Any], form: str) -> go.Scatter:
    """Scores of a task with bars of one standard error."""
    layers = sorted(task.values)
    errors = [task.errors.get(layer, 0.0) for layer in layers]
    told = [f" ± {error:.2g}" if error else "" for error in errors]
    return go.Scatter(
        x=layers,
        y=[task.values[layer] for layer in layers],
        customdata=told,
        name=name,
        mode="lines+markers",
        line={**style, "width": 2},
        marker={"color": style["color"], "size": 5},
        hovertemplate=f"%{{y:{form}}}%{{customdata}}",
        **({"error_y": _bars(errors, style["color"])} if any(errors) else {}),
    )


def _bars(errors: Sequence[float], color: str) -> dict[str, Any]:
    return {"array": list(errors), "color": color, "thickness": 1.2, "width": 3}


def _full_scores(every: Sequence[Task]) -> go.Figure | None:
    """Bars: the whole model's scores on all tasks whose score is a share."""
    shares = [task for task in every if task.is_share and task.full is not None]
    if not shares:
        return None
    errors = [task.error or 0.0 for task in shares]
    names = [label(task.name, 40) for task in shares]
    bars = go.Bar(
        x=names,
        y=[task.full for task in shares],
        name="Score",
        customdata=[[label(task.metric, 40), f" ± {task.error:.1%}" if task.error else ""] for task in shares],
        marker={"color": CATEGORICAL[0], "line": {"width": 0}},
        hovertemplate="%{customdata[0]} %{y:.1%}%{customdata[1]}",
        **({"error_y": _bars(errors, MUTED)} if any(errors) else {}),
    )
    chances = [(name, task.chance) for name, task in zip(names, shares, strict=True) if task.chance is not None]
    marks = go.Scatter(
        x=[name for name, _ in chances],
        y=[chance for _, chance in chances],
        name="Chance",
        mode="markers",
        marker={"symbol": "line-ew", "size": 26, "color": MUTED, "line": {"width": 2, "color": MUTED}},
        hovertemplate="chance %{y:.1%}",
    )
    return figure(
        [bars, *([marks] if chances else [])],
        title="Scores of the whole model",
        subtitle="Bars: one standard error",
        alt=" ".join(f"{name}: {task.full:.1%}." for name, task in zip(names, shares, strict=True)),
        xaxis=axis("Task", type="category"),
        yaxis=axis("Score", tickformat=".0%", **ZERO),
    )


def _compared(source: Source) -> Figures:
    """The score of each task by exit layer, one line for each model."""
    described = {label(str(entry.get("label")), 40): entry for entry in source.meta.get("models") or []}
    of_runs = [(run, tasks_of(run.table, described.get(run.name, {}).get("tasks"), run.layers)) for run in source.runs]
    names = list(dict.fromkeys(task.name for _, its_tasks in of_runs for task in its_tasks))
    return readings((name, _overlay(source, of_runs, name)) for name in names)


def _overlay(source: Source, of_runs: Iterable[tuple[Any, Sequence[Task]]], name: str) -> go.Figure | None:
    lines = [(run, task) for run, its_tasks in of_runs for task in its_tasks if task.name == name]
    shares = all(task.is_share for _, task in lines)
    relative = source.meta.get("depth") == "relative"
    traces = []
    for run, task in lines:
        trace = _line(task, run.name, run.style, ".1%" if shares else ".4~g")
        traces.append(trace.update(x=[layer / run.layers for layer in trace.x]) if relative else trace)
    deepest = max(run.layers for run, _ in lines)
    drawn = figure(
        traces,
        title="Score by exit layer",
        subtitle="One line a model; bars: one standard error; dotted: chance",
        alt=" ".join(extremes(run.name, task.scores.layers, task.scores.values, ".3g") for run, task in lines),
        xaxis=layer_axis(deepest, relative=relative),
        yaxis=axis(label(lines[0][1].metric, 40), **({"tickformat": ".0%", **ZERO} if shares else {})),
        variant=label(name, 60),
        beside=True,
        height=290,
        showlegend=True,
        hovermode="closest" if relative else "x unified",
    )
    chance = next((task.chance for _, task in lines if task.chance is not None), None)
    return drawn if chance is None else add_level(drawn, chance, "dot")


QUALITIES = {
    "accuracy": ("Accuracy", ".1%", {"tickformat": ".0%", **ZERO}),
    "perplexity": ("Perplexity", ".4~g", ZERO),
    "coherence": ("Coherence", ".3f", {}),
    "diversity": ("Diversity", ".3f", ZERO),
}
"""Statistic of generated text -> title, d3 number format, settings of the axis."""


def _quality(source: Source) -> Figures:
    rows = select(source.table, QUALITY)
    if rows["layer"].nunique() < 2:
        return {}  # a table shows the numbers of one layer
    return readings((name, _of_quality(source, name)) for name in QUALITIES)


def _of_quality(source: Source, statistic: str) -> go.Figure | None:
    """One number of the generated text by exit layer, one line for each judge or task."""
    title, form, settings = QUALITIES[statistic]
    rows = select(source.table, QUALITY, statistic)
    traces: list[Any] = []
    words: list[str] = []
    heights: list[float | None] = []
    for site in rows["site"].fillna("").unique():
        values = curve(rows.assign(site=rows["site"].fillna("")), QUALITY, statistic, site)
        if not values:
            continue
        style = categorical(len(traces))
        errors = curve(source.table, QUALITY, statistic + ERROR, site)
        known = dict(zip(errors.layers, errors.values, strict=True))
        bars = [known.get(layer) or 0.0 for layer in values.layers]
        name = label(str(site) or title, 40)
        traces.append(
            go.Scatter(
                x=values.layers,
                y=values.values,
                name=name,
                mode="lines+markers",
                line={**style, "width": 2},
                marker={"color": style["color"], "size": 5},
                hovertemplate=f"%{{y:{form}}}",
                **({"error_y": _bars(bars, style["color"])} if any(bars) else {}),
            )
        )
        heights += values.values
        words.append(extremes(f"{title}, {name}", values.layers, values.values, ".3g"))
    if not traces:
        return None
    return figure(
        traces,
        alt=" ".join(words),
        xaxis=layer_axis(source.layers),
        yaxis=logarithmic(heights, title) if statistic == "perplexity" else axis(title, **settings),
        variant=title,
        beside=True,
        height=290,
        showlegend=len(traces) > 1 or bool(traces[0].name != title),
    )


SCORES = Method(
    "Scores by exit layer",
    (SCORE,),
    (
        "The task as lm-evaluation-harness scores it, with the model stopped after layer l: its own final norm and "
        "head read the state of that layer. The standard error is that of the mean over the task’s examples. All "
        "layers answer the same examples, so two layers differ by less than their bars suggest."
    ),
)
TEXT = Method(
    "Quality of generated text",
    (QUALITY,),
    (
        "Text that is generated with the model stopped after layer l. Perplexity is that of the text under the judge, "
        "lower is better, but text that repeats itself has a low one too. Coherence is the cosine of sentence "
        "embeddings of prefix and continuation. Diversity is 1 where no n-gram of 2 to 4 tokens repeats."
    ),
    formula=r'"diversity" = \frac{"unique 2-grams"}{"all 2-grams"} · \frac{"unique 3-grams"}{"all 3-grams"} · '
    r'\frac{"unique 4-grams"}{"all 4-grams"}',
    source="Jiang et al., <cite>Tracing Representation Progression</cite>, App. C.2.",
)
FIGURES = (
    Figure("task_scores", "scores", _scores, kinds=(EVALUATION,), methods=(SCORES,)),
    Figure("task_scores", "scores", _compared, kinds=(EVALUATIONS,)),
    Figure(
        "generation_quality",
        "text",
        _quality,
        kinds=(EVALUATION,),
        title="Quality of generated text by exit layer",
        subtitle="The model stops after this layer; a line for each judge or task",
        methods=(TEXT,),
    ),
)
