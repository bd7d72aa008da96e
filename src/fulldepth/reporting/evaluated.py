"""Pages of `fulldepth evaluate`: opening paragraph, tables of tasks, several models side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from fulldepth.figures.curves import select
from fulldepth.figures.evaluation import QUALITIES, QUALITY, Task, tasks_of
from fulldepth.figures.evaluation import tasks as every_task
from fulldepth.figures.record import Source
from fulldepth.reporting import measured
from fulldepth.reporting.measured import Meta, Pairs
from fulldepth.reporting.phrases import NOTHING, dotted, listed, model_line, short
from fulldepth.reporting.tables import Table, by_subject, settings_table

MOST_NAMED = 3
"""Maximum number of tasks in the opening paragraph."""

Story = dict[str, Any]


def byline(source: Source) -> str:
    """The model and the number of tasks in one line."""
    count = len(every_task(source))
    return dotted(model_line(source.meta.get("model") or {}), f"{count} task{'s' * (count > 1)}" if count else "")


def about(source: Source) -> Pairs:
    """Pairs on the model, the machine and the run."""
    subjects = measured.about(source.meta)
    return [*subjects[:2], ("Machine", listed(source.meta.get("machine") or {})), *subjects[2:]]


def tables(source: Source) -> dict[str, list[Table]]:
    """Id of a section -> its tables."""
    return {
        "tasks": [_tasks(every_task(source))],
        "text": [_quality(source)],
        "settings": [settings_table("All settings", source.meta.get("settings"))],
    }


def _quality(source: Source) -> Table:
    """Numbers of the text that the whole model generates: one row for each judge or task."""
    rows = select(source.table, QUALITY)
    rows = rows[(rows["layer"] == source.layers).fillna(False).astype(bool)].assign(site=rows["site"].fillna(""))
    values = rows.pivot_table("value", "site", "statistic", "last", sort=False)
    columns = {title: name for name, (title, *_) in QUALITIES.items() if name in values}
    cells = values[list(columns.values())].map(lambda value: NOTHING if pd.isna(value) else f"{value:.4g}")
    named = [[short(site, 60), *own] for site, own in zip(cells.index, cells.to_numpy(), strict=True)]
    return Table("Text of the whole model", list(columns), named, "Judge")


def score(task: Task, layer: int | None) -> str:
    """A score with its standard error."""
    value = task.values.get(layer or 0)
    if value is None:
        return NOTHING
    error = task.errors.get(layer or 0)
    if task.is_share:
        return f"{100 * value:.1f} %" + ("" if error is None else f" ± {100 * error:.1f}")
    return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def _amount(task: Task) -> str:
    """The score of a guess."""
    if task.chance is None:
        return NOTHING
    return f"{100 * task.chance:.1f} %" if task.is_share else f"{task.chance:.4g}"


def _tasks(tasks: Sequence[Task]) -> Table:
    """One row for each task: the whole model's score, chance, and the shallowest layer that is as good."""
    columns: dict[str, Callable[[Task], str]] = {
        "Metric": lambda task: short(task.metric, 40) + ("" if task.higher_is_better else " (lower is better)"),
        "Whole model": lambda task: score(task, task.layers),
        "Chance": _amount,
        "Above chance": lambda task: {True: "yes", False: "no", None: NOTHING}[task.above_chance],
        "Examples": lambda task: NOTHING if task.count is None else f"{task.count:,}",
        "As good from": lambda task: (
            f"layer {task.shallowest} of {task.layers}" if task in informative(tasks) else NOTHING
        ),
        "Score there": lambda task: score(task, task.shallowest),
    }
    note = """As good from: the first layer from which on all are shown to lose at most one point (of other scores, one
    per cent): the 95 % interval of the difference on the same examples ends below. Above chance: better than a guess
    by two standard errors of that difference; where it is not, nothing is advised."""
    return by_subject("Every task", "Task", [(short(task.name, 60), task) for task in tasks], columns, note)


def informative(tasks: Sequence[Task]) -> list[Task]:
    """The tasks of which layers are advised: several are scored, and the whole model is better than a guess."""
    return [task for task in tasks if len(task.values) > 1 and task.above_chance and task.shallowest is not None]


def story(source: Source) -> Story | None:
    """The opening paragraph: the whole model's scores, and from which layer on they are as good."""
    tasks = [task for task in every_task(source) if source.layers in task.values]
    if not tasks:
        return None
    named = [
        f"{score(task, task.layers)} on {short(task.name, 40)}"
        + ("" if task.chance is None else f" (chance {_amount(task)})")
        for task in tasks[:MOST_NAMED]
    ]
    rest = len(tasks) - MOST_NAMED
    more = f"; {rest} more in the table below" if rest > 0 else ""
    sentences = [f"All {source.layers} layers score {_joined(named)}{more}."]
    guessed = [short(task.name, 40) for task in tasks if task.above_chance is False]
    if guessed:
        verb = "is" if len(guessed) == 1 else "are"
        nothing = ": nothing is advised" if len(guessed) == len(tasks) else ""
        sentences.append(f"{_joined(guessed[:MOST_NAMED])} {verb} not measurably above chance{nothing}.")
    told = informative(tasks)
    layer = max((task.shallowest or 0 for task in told), default=0)
    if layer == source.layers:
        needing = _joined([short(task.name, 40) for task in told if task.shallowest == layer][:MOST_NAMED])
        sentences.append(f"No earlier layer is shown to keep the whole model’s score on {needing}.")
    elif layer:
        on = short(told[0].name, 40) if len(told) == 1 else f"all {len(told)} tasks"
        chance = " that are above chance" if 1 < len(told) < len(tasks) else ""
        easiest = min(told, key=lambda task: task.shallowest or 0)
        sooner = f", on {short(easiest.name, 40)} from layer {easiest.shallowest} on" * (easiest.shallowest != layer)
        sentences.append(
            f"From layer {layer} on, stopping early is shown to lose at most one point on {on}{chance}{sooner}."
        )
    return {"sentences": sentences, "next": _next(source.meta, layer, source.layers)}


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def _next(meta: Meta, layer: int, layers: int) -> dict[str, str] | None:
    """The export of the first layers that are enough."""
    name = (meta.get("model") or {}).get("name")
    if not name or not 0 < layer < layers:
        return None
    command = f"fulldepth exit export {shlex.quote(short(name, 160))} --layers {layer} --output first-{layer}/"
    return {"why": f"export the first {layer} layers as a checkpoint:", "command": command}


def side_by_side(source: Source) -> Table | None:
    """One row for each task, one column for each model: the whole models' scores."""
    pairs = list(zip(source.meta.get("models") or [], source.runs, strict=False))
    scores = [
        {task.name: score(task, task.layers) for task in tasks_of(run.table, entry.get("tasks"), run.layers)}
        for entry, run in pairs
    ]
    names = list(dict.fromkeys(name for own in scores for name in own))
    rows = [[short(name, 60), *(own.get(name, NOTHING) for own in scores)] for name in names]
    note = "Scores of the whole models, each with its standard error."
    labels = [measured.labelled(entry) for entry, _ in pairs]
    return Table("Models side by side", labels, rows, "Task", note) if rows else None
