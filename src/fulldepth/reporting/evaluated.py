"""Pages of `fulldepth evaluate`: opening paragraph, tables of tasks, several models side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fulldepth.figures.curves import number, select
from fulldepth.figures.evaluation import QUALITIES, QUALITY, Task, tasks_of
from fulldepth.figures.evaluation import tasks as every_task
from fulldepth.figures.record import Source
from fulldepth.reporting import measured
from fulldepth.reporting.findings import Shown, in_order
from fulldepth.reporting.measured import Meta, Pairs
from fulldepth.reporting.phrases import NOTHING, dotted, listed, model_line, short
from fulldepth.reporting.tables import Table, by_subject, settings_table

MOST_NAMED = 3
"""Maximum number of tasks in the opening paragraph."""
OF_TASKS = ("score ", "earliest_exit ")
"""Beginnings of the names of findings on single tasks."""
CHOICES = 12
"""Maximum number of layers in the table of all scores."""

Story = dict[str, Any]


def byline(source: Source) -> str:
    """The model and the number of tasks in one line."""
    count = len(every_task(source))
    return dotted(
        model_line(source.meta.get("model") or {}), f"{count} task{'' if count == 1 else 's'}" if count else ""
    )


def about(source: Source) -> Pairs:
    """Pairs on the model, the machine and the run."""
    subjects = measured.about(source.meta)
    return [*subjects[:2], ("Machine", listed(source.meta.get("machine") or {})), *subjects[2:]]


def findings(entry: Meta, source: Source) -> list[Shown]:
    """The findings; those on single tasks have no cards, since the table of tasks has their numbers."""
    return [
        replace(shown, card=None) if name.startswith(OF_TASKS) else shown
        for name, shown in zip(in_order(entry.get("headline") or {}), measured.findings(entry, source), strict=True)
    ]


def tables(source: Source) -> dict[str, list[Table]]:
    """Id of a section -> its tables."""
    tasks = every_task(source)
    return {
        "tasks": [_tasks(tasks), _every_layer(tasks)],
        "text": [_quality(source)],
        "settings": [settings_table("All settings", source.meta.get("settings"))],
    }


def _quality(source: Source) -> Table:
    """Numbers of the text that the whole model generates: one row for each judge or task."""
    rows = select(source.table, QUALITY)
    rows = rows[(rows["layer"] == source.layers).fillna(False).astype(bool)]
    values = {
        (str(site), str(statistic)): number(value)
        for site, statistic, value in zip(rows["site"].fillna(""), rows["statistic"], rows["value"], strict=True)
    }

    def column(statistic: str) -> Callable[[str], str]:
        return lambda site: NOTHING if (value := values.get((site, statistic))) is None else f"{value:.4g}"

    columns = {title: column(statistic) for statistic, (title, *_) in QUALITIES.items()}
    sites = list(dict.fromkeys(site for site, _ in values))
    return by_subject("Text of the whole model", "Judge", [(short(site, 60), site) for site in sites], columns)


def score(task: Task, layer: int | None) -> str:
    """A score with its standard error."""
    value = None if layer is None else task.values.get(layer)
    if value is None or layer is None:
        return NOTHING
    error = task.errors.get(layer)
    if task.is_share:
        return f"{100 * value:.1f} %" + ("" if error is None else f" ± {100 * error:.1f}")
    return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def _tasks(tasks: Sequence[Task]) -> Table:
    """One row for each task: the whole model's score, chance, and the shallowest layer that is as good."""
    columns: dict[str, Callable[[Task], str]] = {
        "Metric": lambda task: short(task.metric, 40) + ("" if task.higher_is_better else " (lower is better)"),
        "Whole model": lambda task: score(task, task.layers),
        "Chance": lambda task: NOTHING if task.chance is None else _amount(task, task.chance),
        "Above chance": lambda task: {True: "yes", False: "no", None: NOTHING}[task.above_chance],
        "Examples": lambda task: NOTHING if task.count is None else f"{task.count:,}",
        "As good from": lambda task: _as_good(task),
        "Score there": lambda task: score(task, task.shallowest),
    }
    note = (
        "As good from: the first layer from which on all are shown to lose at most one point (of other scores, one "
        "per cent): the 95 % interval of the difference on the same examples ends below. Above chance: better than a "
        "guess by two standard errors of that difference; where it is not, nothing is advised."
    )
    return by_subject("Every task", "Task", [(short(task.name, 60), task) for task in tasks], columns, note)


def _as_good(task: Task) -> str:
    layer = task.shallowest
    if layer is None or len(task.values) < 2 or not task.above_chance:
        return NOTHING
    return f"layer {layer} of {task.layers}"


def _amount(task: Task, value: float) -> str:
    return f"{100 * value:.1f} %" if task.is_share else f"{value:.4g}"


def _every_layer(tasks: Sequence[Task]) -> Table:
    """The scores of all tasks at up to `CHOICES` layers."""
    layers = sorted({layer for task in tasks for layer in task.values})
    if len(layers) < 2:
        return Table("Scores by layer", [], [])
    step = (len(layers) - 1) / (CHOICES - 1)
    shown = layers if len(layers) <= CHOICES else sorted({layers[round(at * step)] for at in range(CHOICES)})
    rows = [[short(task.name, 60), *(score(task, layer) for layer in shown)] for task in tasks]
    return Table("Scores by layer", [f"Layer {layer}" for layer in shown], rows, "Task", folded=True)


def story(source: Source) -> Story | None:
    """The opening paragraph: the whole model's scores, and from which layer on they are as good."""
    tasks = every_task(source)
    scored = [task for task in tasks if task.full is not None]
    if not scored:
        return None
    named = [_scored(task) for task in scored[:MOST_NAMED]]
    rest = len(scored) - MOST_NAMED
    more = f"; {rest} more task{' is' if rest == 1 else 's are'} below" if rest > 0 else ""
    sentences = [f"All {source.layers} layers score {_joined(named)}{more}.", *_at_chance(scored)]
    layer = shallowest(scored)
    sentences += _depth(scored, layer, source.layers)
    return {"sentences": sentences, "next": _next(source.meta, layer, source.layers)}


def _scored(task: Task) -> str:
    chance = "" if task.chance is None else f" (chance {_amount(task, task.chance)})"
    return f"{score(task, task.layers)} on {short(task.name, 40)}{chance}"


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def _at_chance(tasks: Sequence[Task]) -> list[str]:
    names = [short(task.name, 40) for task in tasks if task.above_chance is False]
    if not names:
        return []
    verb = "is" if len(names) == 1 else "are"
    every = len(names) == len(tasks)
    return [f"{_joined(names[:MOST_NAMED])} {verb} not measurably above chance{': nothing is advised' * every}."]


def informative(tasks: Sequence[Task]) -> list[Task]:
    """The tasks of which layers are advised: several are scored, and the whole model is better than a guess."""
    return [task for task in tasks if len(task.values) > 1 and task.above_chance]


def shallowest(tasks: Sequence[Task]) -> int | None:
    """The first layer that is as good as the whole model on all tasks on which layers can be told apart."""
    layers = [task.shallowest for task in informative(tasks)]
    known = [layer for layer in layers if layer is not None]
    return max(known, default=None)


def _depth(tasks: Sequence[Task], layer: int | None, layers: int) -> list[str]:
    """From which layer on the scores are shown to be the whole model's, up to a point."""
    compared = informative(tasks)
    if layer is None or not compared:
        return []
    on = short(compared[0].name, 40) if len(compared) == 1 else f"all {len(compared)} tasks"
    chance = " that are above chance" if len(compared) > 1 and len(compared) < len(tasks) else ""
    if layer == layers:
        needing = [task for task in compared if task.shallowest == layers]
        names = _joined([short(task.name, 40) for task in needing[:MOST_NAMED]])
        return [f"No earlier layer is shown to keep the whole model’s score on {names}."]
    easiest = min(compared, key=lambda task: task.shallowest or layers)
    sooner = ""
    if easiest.shallowest is not None and easiest.shallowest < layer:
        sooner = f", on {short(easiest.name, 40)} from layer {easiest.shallowest} on"
    within = "stopping early is shown to lose at most one point"
    return [f"From layer {layer} on, {within} on {on}{chance}{sooner}."]


def _next(meta: Meta, layer: int | None, layers: int) -> dict[str, str] | None:
    """The export of the first layers that are enough."""
    name = (meta.get("model") or {}).get("name")
    if not name or layer is None or layer >= layers:
        return None
    model = shlex.quote(short(name, 160))
    command = f"fulldepth exit {model} --export-layers {layer} --output first-{layer}/"
    return {"why": f"export the first {layer} layers as a checkpoint:", "command": command}


def _tasks_of_models(source: Source) -> list[tuple[str, list[Task]]]:
    """The label and the tasks of every model."""
    models = source.meta.get("models") or []
    pairs = zip(models, source.runs, strict=False)
    return [(measured.labelled(entry), tasks_of(run.table, entry.get("tasks"), run.layers)) for entry, run in pairs]


def side_by_side(source: Source) -> Table | None:
    """One row for each task, one column for each model: the whole models' scores."""
    every = _tasks_of_models(source)
    names = list(dict.fromkeys(task.name for _, tasks in every for task in tasks))
    if not names:
        return None
    rows = [
        [short(name, 60), *(_whole({task.name: task for task in tasks}, name) for _, tasks in every)] for name in names
    ]
    note = "Scores of the whole models, each with its standard error."
    return Table("Models side by side", [label for label, _ in every], rows, "Task", note)


def _whole(tasks: Mapping[str, Task], name: str) -> str:
    task = tasks.get(name)
    return NOTHING if task is None else score(task, task.layers)
