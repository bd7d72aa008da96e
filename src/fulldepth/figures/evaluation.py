"""Evaluation: scores of tasks and quality of generated text by exit layer, with standard errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.comparison import overlays
from fulldepth.figures.curves import Curve, curve, select
from fulldepth.figures.draw import Line, add_level, logarithmic, over_layers
from fulldepth.figures.record import EVALUATION, EVALUATIONS, Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import CATEGORICAL, ZERO, Figures, axis, categorical, label, translucent

SCORE, QUALITY = "task_score", "generation_quality"
ERROR = "_stderr"
"""Suffix of a metric's standard error."""
PERCENT = {"tickformat": ".0%", **ZERO}


@dataclass(frozen=True)
class Task:
    """A task of one model: its score by exit layer."""

    name: str
    metric: str
    higher_is_better: bool
    count: int | None
    chance: float | None
    scores: Curve
    errors: Mapping[int, float | None]
    """Layer -> standard error of its score."""
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
    def is_share(self) -> bool:
        """Whether all scores are shares, shown in per cent."""
        return self.higher_is_better and all(0 <= value <= 1 + 1e-9 for value in self.values.values())


def tasks_of(table: pd.DataFrame, described: Mapping[str, Any] | None, layers: int) -> list[Task]:
    """The tasks in the rows of one model, in the order of the document and then of the rows."""
    every = select(table, SCORE)
    stated = {str(name): entry or {} for name, entry in (described or {}).items()}
    tasks = []
    for name in dict.fromkeys([*stated, *map(str, every["site"].dropna().unique())]):
        entry, rows = stated.get(name, {}), every[every["site"] == name]
        metrics = [str(one) for one in rows["statistic"].unique() if not str(one).endswith(ERROR)]
        metric = str(entry.get("metric"))
        if metric not in metrics:
            metric = next(iter(metrics), "")
        errors = curve(rows, SCORE, metric + ERROR, name)
        task = Task(
            name,
            metric,
            entry.get("higher_is_better") is not False,
            entry.get("count"),
            entry.get("chance"),
            scores=curve(rows, SCORE, metric, name),
            errors=dict(zip(errors.layers, errors.values, strict=True)),
            layers=layers,
            above_chance=entry.get("advised"),
            shallowest=entry.get("earliest"),
        )
        tasks += [task] if task.scores else []
    return tasks


def tasks(source: Source) -> list[Task]:
    """The tasks of one evaluation."""
    return tasks_of(source.table, source.meta.get("tasks"), source.layers)


def _scores(source: Source) -> Figures:
    """The score of each task by exit layer, with bars of one standard error; a table shows those of one layer."""
    every = [task for task in tasks(source) if len(task.values) > 1]
    return readings((task.name, _by_layer(source, task, len(every) > 1)) for task in every)


def _by_layer(source: Source, task: Task, several: bool) -> go.Figure | None:
    form, metric, name = ".1%" if task.is_share else ".4~g", label(task.metric, 40), label(task.name, 60)
    drawn = over_layers(
        source.table,
        task.layers,
        [Line(SCORE, metric, task.metric, task.name, form=form, spread=task.metric + ERROR)],
        title="Score by exit layer" if several else f"Score on {name} by exit layer",
        subtitle="Bars: one standard error; shaded: the whole model’s" + "; dotted: chance" * (task.chance is not None),
        first=min([1, *task.values]),
        yaxis=axis(metric, **(PERCENT if task.is_share else {})),
        variant=name if several else "",
        beside=several,
        level=task.chance,
        height=290,
        showlegend=False,
    )
    whole, error = task.values.get(task.layers), task.errors.get(task.layers)
    if drawn and whole is not None and error is not None:
        shade = translucent(CATEGORICAL[0])
        drawn.add_hrect(whole - error, whole + error, fillcolor=shade, line_width=0, layer="below")
    return drawn


def _compared(source: Source) -> Figures:
    """The score of each task by exit layer, one line for each model."""
    described = [entry.get("tasks") for entry in source.meta.get("models") or []]
    models = zip(source.runs, described, strict=False)
    every = {task.name: task for run, stated in models for task in tasks_of(run.table, stated, run.layers)}
    quantities = [
        Quantity(
            SCORE,
            task.metric,
            "Score",
            label(task.metric, 40),
            name,
            ".1%" if task.is_share else ".4~g",
            PERCENT if task.is_share else {},
            key=name,
            variant=label(name, 60),
            spread=task.metric + ERROR,
        )
        for name, task in every.items()
    ]
    drawn = overlays(source, quantities)
    for figure, task in zip(drawn.values(), every.values(), strict=True):
        if task.chance is not None:
            add_level(figure, task.chance, "dot")
    return drawn


QUALITIES = {
    "accuracy": ("Accuracy", ".1%", PERCENT),
    "perplexity": ("Perplexity", ".4~g", ZERO),
    "coherence": ("Coherence", ".3f", {}),
    "diversity": ("Diversity", ".3f", ZERO),
}
"""Statistic of generated text -> title, d3 number format, settings of the axis."""


def _quality(source: Source) -> Figures:
    """Each number of the generated text by exit layer, one line for each judge or task; a table shows one layer's."""
    rows = select(source.table, QUALITY)
    if rows["layer"].nunique() < 2:
        return {}
    rows = rows.assign(site=rows["site"].fillna(""))

    def drawn(statistic: str) -> go.Figure | None:
        title, form, settings = QUALITIES[statistic]
        sites = [site for site in rows["site"].unique() if curve(rows, QUALITY, statistic, site)]
        return over_layers(
            rows,
            source.layers,
            [
                Line(
                    QUALITY,
                    label(site or title, 40),
                    statistic,
                    site,
                    form=form,
                    spread=statistic + ERROR,
                    **categorical(index),
                )
                for index, site in enumerate(sites)
            ],
            yaxis=lambda values: logarithmic(values, title) if statistic == "perplexity" else axis(title, **settings),
            variant=title,
            beside=True,
            height=290,
            showlegend=bool(sites) and sites != [""],
        )

    return readings((statistic, drawn(statistic)) for statistic in QUALITIES)


SCORES = Method(
    "Scores by exit layer",
    (SCORE,),
    """The task as lm-evaluation-harness scores it, with the model stopped after layer l: its own final norm and head
    read the state of that layer. The standard error is that of the mean over the task’s examples. All layers answer
    the same examples, so two layers differ by less than their bars suggest.""",
)
TEXT = Method(
    "Quality of generated text",
    (QUALITY,),
    """Text that is generated with the model stopped after layer l. Perplexity is that of the text under the judge,
    lower is better, but text that repeats itself has a low one too. Coherence is the cosine of sentence embeddings of
    prefix and continuation. Diversity is 1 where no n-gram of 2 to 4 tokens repeats.""",
    r'"diversity" = \frac{"unique 2-grams"}{"all 2-grams"} · \frac{"unique 3-grams"}{"all 3-grams"} · '
    r'\frac{"unique 4-grams"}{"all 4-grams"}',
    "Jiang et al., <cite>Tracing Representation Progression</cite>, App. C.2.",
)
FIGURES = (
    Figure("task_scores", "scores", _scores, (EVALUATION,), methods=(SCORES,)),
    Figure("task_scores", "scores", _compared, (EVALUATIONS,), methods=(SCORES,)),
    Figure(
        "generation_quality",
        "text",
        _quality,
        (EVALUATION,),
        "Quality of generated text by exit layer",
        "The model stops after this layer; a line for each judge or task",
        methods=(TEXT,),
    ),
)
