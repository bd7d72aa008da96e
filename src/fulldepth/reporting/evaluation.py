"""Evaluation on a page: scores of tasks and quality of generated text by exit layer, with standard errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.reporting import measured
from fulldepth.reporting.charts import Figure, Line, alone, overlay, readings
from fulldepth.reporting.draw import add_level
from fulldepth.reporting.exits import export_of
from fulldepth.reporting.phrases import NOTHING, percent, short
from fulldepth.reporting.source import EVALUATION, PageSource, PlottedCurve, curve, select
from fulldepth.reporting.style import CATEGORICAL, Figures, label, translucent
from fulldepth.reporting.tables import Table, by_subject, settings_table

SCORE, QUALITY = "task_score", "generation_quality"
ERROR = "_stderr"
"""Suffix of a metric's standard error."""
QUALITIES = {
    "accuracy": ("Accuracy", ".1%", "percent"),
    "perplexity": ("Perplexity", ".4~g", "log"),
    "coherence": ("Coherence", ".3f", ""),
    "diversity": ("Diversity", ".3f", "zero"),
}
"""Statistic of generated text -> title, d3 number format, scale of the axis."""
MOST_NAMED = 3
"""Maximum number of tasks in the opening paragraph."""


@dataclass(frozen=True)
class TaskScores:
    """A task of one model: its score by exit layer."""

    name: str
    metric: str
    entry: Mapping[str, Any]
    """The entry in the document."""
    scores: PlottedCurve
    errors: PlottedCurve
    """Standard errors of the scores."""
    layers: int

    @property
    def chance(self) -> float | None:
        """The score of a guess."""
        return self.entry.get("chance")

    @property
    def shallowest(self) -> int | None:
        """First layer from which on all are shown to keep the whole model's score; None if that is not known."""
        return self.entry.get("earliest")

    @property
    def is_share(self) -> bool:
        """Whether all scores are shares, shown in per cent."""
        higher = self.entry.get("higher_is_better") is not False
        return higher and all(0 <= value <= 1 + 1e-9 for value in self.scores.points.values())

    @property
    def line(self) -> Line:
        """The scores with their standard errors."""
        form, metric = ".1%" if self.is_share else ".4~g", label(self.metric, 40)
        return Line(SCORE, self.metric, self.name, metric, form=form, errors=self.metric + ERROR)

    def written(self, layer: int | None) -> str:
        """The score after a layer, with its standard error."""
        value, error = (points.get(layer or 0) for points in (self.scores.points, self.errors.points))
        if value is None:
            return NOTHING
        if self.is_share:
            return percent(value) + ("" if error is None else f" ± {100 * error:.1f}")
        return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")

    @property
    def guess(self) -> str:
        """The score of a guess as text."""
        return NOTHING if self.chance is None else percent(self.chance) if self.is_share else f"{self.chance:.4g}"

    @property
    def advised(self) -> bool:
        """Whether a layer is advised: several are scored, and the whole model is better than a guess."""
        return bool(len(self.scores.points) > 1 and self.entry.get("advised") and self.shallowest is not None)


def tasks_of(table: pd.DataFrame, described: Mapping[str, Any] | None, layers: int) -> list[TaskScores]:
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
        scores, errors = (curve(rows, SCORE, metric + suffix, name) for suffix in ("", ERROR))
        tasks += [TaskScores(name, metric, entry, scores, errors, layers)] if scores else []
    return tasks


def tasks(source: PageSource) -> list[TaskScores]:
    """The tasks of one evaluation."""
    return tasks_of(source.table, source.meta.get("tasks"), source.layers)


def scores(record: Figure, source: PageSource) -> Figures:
    """The score of each task by exit layer: of one model, or a line for each of several."""
    if source.kind != EVALUATION:
        described = [entry.get("tasks") for entry in source.meta.get("models") or []]
        models = zip(source.runs, described, strict=False)
        every = {task.name: task for run, stated in models for task in tasks_of(run.table, stated, run.layers)}
        return readings((task.name, _scored(record, task, source, True)) for task in every.values())
    several = [task for task in tasks(source) if len(task.scores.points) > 1]  # a table shows those of one layer
    return readings((task.name, _scored(record, task, source, len(several) > 1)) for task in several)


def _scored(record: Figure, task: TaskScores, source: PageSource, several: bool) -> go.Figure | None:
    name, one = label(task.name, 60), source.kind == EVALUATION
    settings = replace(
        record,
        axis=label(task.metric, 40),
        scale="percent" if task.is_share else "",
        level=task.chance,
        first=min([1, *task.scores.at]),
        height=290,
        quantity="Score",
    )
    if not one:
        drawn = overlay(settings, replace(task.line, variant=name, name=""), source, True)
        return drawn if drawn is None or task.chance is None else add_level(drawn, task.chance, "dot")
    drawn = alone(
        settings,
        source,
        [task.line],
        title="Score by exit layer" if several else f"Score on {name} by exit layer",
        subtitle="Bars: one standard error; shaded: the whole model’s" + "; dotted: chance" * (task.chance is not None),
        variant=name * several,
        beside=several,
        showlegend=False,
    )
    whole, error = (points.get(task.layers) for points in (task.scores.points, task.errors.points))
    if drawn and whole is not None and error is not None:
        shade = translucent(CATEGORICAL[0])
        drawn.add_hrect(whole - error, whole + error, fillcolor=shade, line_width=0, layer="below")
    return drawn


def quality(record: Figure, source: PageSource) -> Figures:
    """Each number of the generated text by exit layer, one line for each judge or task; a table shows one layer's."""
    rows = select(source.table, QUALITY)
    if rows["layer"].nunique() < 2:
        return {}
    rows = rows.assign(site=rows["site"].fillna(""))

    def drawn(statistic: str) -> go.Figure | None:
        title, form, scale = QUALITIES[statistic]
        sites = [site for site in rows["site"].unique() if curve(rows, QUALITY, statistic, site)]
        lines = [
            Line(QUALITY, statistic, site, label(site or title, 40), color=index, form=form, errors=statistic + ERROR)
            for index, site in enumerate(sites)
        ]
        settings, now = replace(record, axis=title, scale=scale), replace(source, table=rows)
        return alone(settings, now, lines, variant=title, showlegend=sites != [""]) if lines else None

    return readings((statistic, drawn(statistic)) for statistic in QUALITIES)


def tables(source: PageSource) -> dict[str, list[Table]]:
    """Id of a section -> its tables."""
    return {
        "tasks": [_tasks(tasks(source))],
        "text": [_quality(source)],
        "settings": [settings_table("All settings", source.meta.get("settings"))],
    }


def _quality(source: PageSource) -> Table:
    """Numbers of the text that the whole model generates: one row for each judge or task."""
    rows = select(source.table, QUALITY)
    rows = rows[(rows["layer"] == source.layers).fillna(False).astype(bool)].assign(site=rows["site"].fillna(""))
    values = rows.pivot_table("value", "site", "statistic", "last", sort=False)
    columns = {title: name for name, (title, *_) in QUALITIES.items() if name in values}
    cells = values[list(columns.values())].map(lambda value: NOTHING if pd.isna(value) else f"{value:.4g}")
    named = [[short(site, 60), *own] for site, own in zip(cells.index, cells.to_numpy(), strict=True)]
    return Table("Text of the whole model", list(columns), named, "Judge")


def _tasks(every: Sequence[TaskScores]) -> Table:
    """One row for each task: the whole model's score, chance, and the shallowest layer that is as good."""

    def as_good(task: TaskScores) -> str:
        return f"layer {task.shallowest} of {task.layers}" if task.advised else NOTHING

    columns: dict[str, Callable[[TaskScores], str]] = {
        "Metric": lambda task: (
            short(task.metric, 40) + " (lower is better)" * (task.entry.get("higher_is_better") is False)
        ),
        "Whole model": lambda task: task.written(task.layers),
        "Chance": lambda task: task.guess,
        "Above chance": lambda task: {True: "yes", False: "no"}.get(task.entry.get("advised"), NOTHING),  # type: ignore[arg-type]
        "Examples": lambda task: NOTHING if task.entry.get("count") is None else f"{task.entry['count']:,}",
        "As good from": as_good,
        "Score there": lambda task: task.written(task.shallowest),
    }
    note = """As good from: the first layer from which on all are shown to lose at most one point (of other scores, one
    per cent): the 95 % interval of the difference on the same examples ends below. Above chance: better than a guess
    by two standard errors of that difference; where it is not, nothing is advised."""
    return by_subject("Every task", "Task", [(short(task.name, 60), task) for task in every], columns, note)


def story(source: PageSource) -> dict[str, Any] | None:
    """The opening paragraph: the whole model's scores, and from which layer on they are as good."""
    every = [task for task in tasks(source) if source.layers in task.scores.points]
    if not every:
        return None
    named = [
        f"{task.written(task.layers)} on {short(task.name, 40)}"
        + ("" if task.chance is None else f" (chance {task.guess})")
        for task in every[:MOST_NAMED]
    ]
    rest = len(every) - MOST_NAMED
    more = f"; {rest} more in the table below" if rest > 0 else ""
    sentences = [f"All {source.layers} layers score {_joined(named)}{more}."]
    guessed = [short(task.name, 40) for task in every if task.entry.get("advised") is False]
    if guessed:
        verb = "is" if len(guessed) == 1 else "are"
        nothing = ": nothing is advised" if len(guessed) == len(every) else ""
        sentences.append(f"{_joined(guessed[:MOST_NAMED])} {verb} not measurably above chance{nothing}.")
    told = [task for task in every if task.advised]
    layer = max((task.shallowest or 0 for task in told), default=0)
    if layer == source.layers:
        needing = _joined([short(task.name, 40) for task in told if task.shallowest == layer][:MOST_NAMED])
        sentences.append(f"No earlier layer is shown to keep the whole model’s score on {needing}.")
    elif layer:
        on = _joined([short(task.name, 40) for task in told]) if len(told) <= MOST_NAMED else f"all {len(told)} tasks"
        sentences.append(f"From layer {layer} on, stopping early is shown to lose at most one point on {on}.")
    return {"sentences": sentences, "next": export_of(source.meta, layer % source.layers)}


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def side_by_side(source: PageSource) -> Table | None:
    """One row for each task, one column for each model: the whole models' scores."""
    pairs = list(zip(source.meta.get("models") or [], source.runs, strict=False))
    scored = [
        {task.name: task.written(task.layers) for task in tasks_of(run.table, entry.get("tasks"), run.layers)}
        for entry, run in pairs
    ]
    rows = [
        [short(name, 60), *(own.get(name, NOTHING) for own in scored)]
        for name in dict.fromkeys(name for own in scored for name in own)
    ]
    note = "Scores of the whole models, each with its standard error."
    return Table("Models side by side", [measured.labelled(e) for e, _ in pairs], rows, "Task", note) if rows else None
