"""Evaluation on a page: scores of tasks and quality of generated text by exit layer, with standard errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.core.errors import enumerated
from fulldepth.core.number_format import plus_minus
from fulldepth.reporting.charts import Figure, Line, alone, overlay, readings
from fulldepth.reporting.draw import add_level
from fulldepth.reporting.exits import export_of
from fulldepth.reporting.kinds import EVALUATION
from fulldepth.reporting.phrases import short, skipped_in_words
from fulldepth.reporting.source import PageSource, PlottedCurve, curve_of, select
from fulldepth.reporting.style import CATEGORICAL, Figures, label, minus, translucent
from fulldepth.reporting.tables import Meta, Table, across, cell, of_record

SCORE = "task_score"
QUALITY = "generation_quality"
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
    entry: Meta
    """The entry in the document."""
    scores: PlottedCurve
    errors: PlottedCurve
    """Standard errors of the scores."""
    layers: int

    @property
    def is_share(self) -> bool:
        """True if all scores are shares in [0, 1], which are shown in per cent."""
        higher = self.entry.get("higher_is_better") is not False
        return higher and all(0 <= value <= 1 + 1e-9 for value in self.scores.points.values())

    @property
    def chance(self) -> str:
        """The score of guessing, as text."""
        return cell(self.entry.get("chance"), "percent" if self.is_share else "{:.4g}")

    @property
    def enough(self) -> int | None:
        """Earliest layer from which every later one is shown to keep the whole model's score.

        None if no layer is advised: only one layer is scored, the whole model is not better than guessing, or the
        earliest layer is unknown.
        """
        advised = len(self.scores.points) > 1 and self.entry.get("advised")
        return self.entry.get("earliest") if advised else None

    def written(self, layer: int | None) -> str:
        """The score after a layer, with its standard error."""
        value, error = (points.get(layer or 0) for points in (self.scores.points, self.errors.points))
        text = cell(value, "percent" if self.is_share else "{:.4g}")
        if None in (value, error):
            return text
        return f"{text} {plus_minus(100 * error, 1) if self.is_share else plus_minus(error)}"  # type: ignore[operator]


def tasks_of(table: pd.DataFrame, described: Meta | None, layers: int) -> list[TaskScores]:
    """The tasks of one model: first in the order of the document, then those only in the table."""
    every = select(table, SCORE)
    stated = {str(name): entry or {} for name, entry in (described or {}).items()}
    scored = []
    for name in dict.fromkeys([*stated, *map(str, every["site"].dropna().unique())]):
        entry = stated.get(name, {})
        rows = every[every["site"] == name]
        metrics = [str(statistic) for statistic in rows["statistic"].unique() if not str(statistic).endswith(ERROR)]
        metric = next((candidate for candidate in (entry.get("metric"), *metrics) if candidate in metrics), "")
        scores, errors = (curve_of(rows, SCORE, metric + suffix, name) for suffix in ("", ERROR))
        scored += [TaskScores(name, metric, entry, scores, errors, layers)] if scores else []
    return scored


def tasks(source: PageSource) -> list[TaskScores]:
    """The tasks of one evaluation."""
    return tasks_of(source.table, source.meta.get("tasks"), source.layers)


def of_models(source: PageSource) -> list[tuple[Meta, list[TaskScores]]]:
    """(entry, tasks) for each of several models."""
    pairs = zip(source.meta.get("models") or [], source.runs, strict=False)
    return [(entry, tasks_of(run.table, entry.get("tasks"), run.layers)) for entry, run in pairs]


def scores(record: Figure, source: PageSource) -> Figures:
    """Score by exit layer, one figure per task; for several models, one line each."""
    if source.kind == EVALUATION:
        every = [task for task in tasks(source) if len(task.scores.points) > 1]  # a table shows those of one layer
    else:
        of_all = [task for _, tasks_of_model in of_models(source) for task in tasks_of_model]
        every = list({task.name: task for task in of_all if len(task.scores.points) > 1}.values())
    return readings((task.name, _scored(record, task, source, len(every) > 1)) for task in every)


def _scored(record: Figure, task: TaskScores, source: PageSource, several: bool) -> go.Figure | None:
    name = label(task.name, 60)
    metric = label(task.metric, 40)
    guess = task.entry.get("chance")
    form = ".1%" if task.is_share else ".4~g"
    single = source.kind == EVALUATION
    line = Line(SCORE, task.metric, task.name, metric if single else "", name, form=form, errors=task.metric + ERROR)
    scale = "percent" if task.is_share else ""
    first = min([1, *task.scores.at])
    record = replace(record, axis=metric, scale=scale, first=first)
    title = "Score by exit layer" if several else f"Score on {name} by exit layer"
    reading = "Bars: one standard error; shaded: the whole model’s" + "; dotted: chance" * (guess is not None)
    about = {"title": title, "subtitle": reading, "variant": name * several, "beside": several, "showlegend": False}
    drawn = alone(record, source, [line], **about) if single else overlay(record, line, source, True)
    if drawn and guess is not None:
        add_level(drawn, guess, "dot")
    whole, error = (points.get(task.layers) for points in (task.scores.points, task.errors.points))
    if drawn and single and whole is not None and error is not None:
        shade = translucent(CATEGORICAL[0])
        drawn.add_hrect(whole - error, whole + error, fillcolor=shade, line_width=0, layer="below")
    return drawn


def quality(record: Figure, source: PageSource) -> Figures:
    """Quality of generated text by exit layer, one figure per statistic with a line for each judge or task.

    Empty if a single layer was read; a table shows that one.
    """
    rows = select(source.table, QUALITY)
    if rows["layer"].nunique() < 2:
        return {}
    rows = rows.assign(site=rows["site"].fillna(""))

    figures = {}
    source = replace(source, table=rows)
    for statistic, (title, form, scale) in QUALITIES.items():
        sites = [site for site in rows["site"].unique() if curve_of(rows, QUALITY, statistic, site)]
        lines = [
            Line(QUALITY, statistic, site, label(site or title, 40), color=index, form=form, errors=statistic + ERROR)
            for index, site in enumerate(sites)
        ]
        if lines:
            record_of_statistic = replace(record, axis=title, scale=scale)
            figures[statistic] = alone(record_of_statistic, source, lines, variant=title, showlegend=sites != [""])
    return readings(figures.items())


def task_tables(source: PageSource) -> dict[str, list[Table]]:
    """Id of a section -> its tables: one row for each task, and one row for each judge of the whole model's text."""
    named = []
    for task in tasks(source):
        lower = " (lower is better)" * (task.entry.get("higher_is_better") is False)
        cells = {
            "metric": short(task.metric, 40) + lower,
            "whole": task.written(task.layers),
            "chance": task.chance,
            "above": {True: "yes", False: "no"}.get(task.entry.get("advised")),  # type: ignore[arg-type]
            "count": task.entry.get("count"),
            "as_good": f"layer {task.enough} of {task.layers}" if task.enough else None,
            "score_there": task.written(task.enough) if task.enough else None,
        }
        named.append((short(task.name, 60), cells))
    rows = select(source.table, QUALITY)
    rows = rows[(rows["layer"] == source.layers).fillna(False).astype(bool)].assign(site=rows["site"].fillna(""))
    values = rows.pivot_table("value", "site", "statistic", "last", sort=False)
    quality = [(short(site, 60), dict(numbers)) for site, numbers in values.iterrows()]
    return {"tasks": [of_record("tasks", named)], "text": [of_record("text", quality)]}


def evaluation_story(source: PageSource) -> dict[str, Any] | None:
    """The opening paragraph: the whole model's scores, and the first layer from which stopping keeps them."""
    every = [task for task in tasks(source) if source.layers in task.scores.points]
    if not every:
        return None
    named = [
        f"{task.written(task.layers)} on {short(task.name, 40)}"
        + f" (chance {task.chance})" * (task.entry.get("chance") is not None)
        for task in every[:MOST_NAMED]
    ]
    more = f"; {len(every) - MOST_NAMED} more in the table below" if len(every) > MOST_NAMED else ""
    skipped = skipped_in_words(source.meta.get("skipped"))
    sentences = [f"Scored with {skipped}."] if skipped else []
    sentences.append(f"All {source.layers} layers score {enumerated(named)}{more}.")
    guessed = [short(task.name, 40) for task in every if task.entry.get("advised") is False]
    if guessed:
        nothing = ": nothing is advised" if len(guessed) == len(every) else ""
        verb = "is" if len(guessed) == 1 else "are"
        sentences.append(f"{enumerated(guessed[:MOST_NAMED])} {verb} not measurably above chance{nothing}.")
    first_layers = {short(task.name, 40): task.enough for task in every if task.enough is not None}
    layer = max(first_layers.values(), default=0)
    if layer == source.layers:
        needing = enumerated([name for name, enough in first_layers.items() if enough == layer][:MOST_NAMED])
        sentences.append(f"No earlier layer is shown to keep the whole model’s score on {needing}.")
    elif layer:
        on = enumerated([*first_layers]) if len(first_layers) <= MOST_NAMED else f"all {len(first_layers)} tasks"
        sentences.append(f"From layer {layer} on, stopping early is shown to lose at most one point on {on}.")
    return {"sentences": sentences, "next": export_of(source.meta, layer % source.layers)}


def whole_scores_table(source: PageSource) -> Table:
    """Scores of the whole models, and their differences from the baseline: one row per task."""
    columns: list[tuple[Meta, dict[str, str]]] = []
    compared = of_models(source)
    for (entry, scored), run in zip(compared, source.runs, strict=False):
        columns.append((entry, {short(task.name, 60): task.written(task.layers) for task in scored}))
        if run.baseline or "difference" not in run.table:
            continue
        changes = {short(task.name, 60): _change(task, run.table) for task in scored}
        title = "Difference" if len(compared) == 2 else f"{short(entry.get('label', '?'), 40)}: difference"
        columns.append(({"label": title}, changes))
    note = (
        "Scores of the whole models, each with its standard error. Differences from the baseline are in points for "
        "shares; their errors are those of pairs where both models answered the same examples."
    )
    return across("Models side by side", columns, "Task", note=note)


def _change(task: TaskScores, table: pd.DataFrame) -> str:
    """The difference of the whole model's score from the baseline's, with its standard error; empty if not compared."""
    rows = select(table, SCORE, task.metric, task.name)
    rows = rows[(rows["layer"] == task.layers).fillna(False).astype(bool)]
    changes = rows[["difference", "difference_error"]].dropna(subset="difference")
    if changes.empty:
        return ""
    difference, error = map(float, changes.iloc[-1])
    if task.is_share:
        text = f"{minus(100 * difference, '+.1f')} {plus_minus(100 * error, 1)}"
    else:
        text = f"{minus(difference, '+.4g')} {plus_minus(error)}"
    return text.rstrip()
