"""Tasks on the page of a healing: the healed model's scores beside those of the original and of the control."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from fulldepth.core.errors import enumerated
from fulldepth.core.number_format import plus_minus
from fulldepth.core.uncertainty import score_reach
from fulldepth.reporting.evaluation import SCORE
from fulldepth.reporting.phrases import short
from fulldepth.reporting.source import number, select
from fulldepth.reporting.style import minus
from fulldepth.reporting.tables import Meta, Table, of_record

ERROR = "difference_stderr"
"""Statistic of the error of a healed model's difference from the original."""
ORIGINAL = "original"
CONTROL = "control"
CHANGE = "task"
COST = "task_cost"
"""In the headline of a healing, each followed by the name of a task: the difference from the original, or from the
control."""
COMPARED_WITH = {CHANGE: "the original", COST: "the original trained on the same tokens"}
MOST_NAMED = 6
"""Maximum number of tasks that a sentence names."""


class TaskChange(NamedTuple):
    """The score of a healed model in a task minus that of the original or of the control."""

    task: str
    value: float
    error: float | None
    """Standard error, paired by example; None if it is not known."""
    examples: int

    @property
    def measurable(self) -> bool:
        """True if the difference is beyond its error."""
        return self.error is not None and abs(self.value) > score_reach(self.error, self.examples)

    @property
    def text(self) -> str:
        """The difference, with its standard error if known."""
        return f"{minus(self.value, '+.3f')} {plus_minus(self.error, 3)}".rstrip()


def changes(table: pd.DataFrame, headline: Meta, kind: str) -> Iterator[TaskChange]:
    """Yield the differences of one kind, in the order of the headline."""
    for name, entry in headline.items():
        stated_kind, _, task = str(name).partition(" ")
        value = number(entry.get("value"))
        rows = select(table, SCORE, site=task)
        if stated_kind == kind and value is not None and len(rows):
            examples = int(rows["count"].max())
            yield TaskChange(task, value, number(entry.get("standard_error")), examples)


def task_sentences(table: pd.DataFrame, headline: Meta) -> list[str]:
    """One sentence for each model that the healed one is compared with: what differs measurably, and what does not."""
    sentences = []
    for kind, other in COMPARED_WITH.items():
        of_kind = [*changes(table, headline, kind)]
        if not of_kind:
            continue
        clauses = [f"{short(change.task, 60)} {change.text}" for change in of_kind if change.measurable][:MOST_NAMED]
        unclear = [change.task for change in of_kind if change.error is not None and not change.measurable]
        unknown = [change.task for change in of_kind if change.error is None]
        if unclear:
            clauses.append(f"no measurable difference in {_named(unclear)}")
        if unknown:
            clauses.append(f"no standard error is known in {_named(unknown)}")
        sentences.append(f"Tasks against {other}: {'; '.join(clauses)}.")
    return sentences


def _named(tasks: Sequence[str]) -> str:
    """The names of tasks, or how many they are."""
    return enumerated([short(task, 60) for task in tasks]) if len(tasks) <= MOST_NAMED else f"{len(tasks)} tasks"


def task_change_tables(table: pd.DataFrame, headline: Meta) -> list[Table]:
    """The scores of all models in every task, and the healed model's differences; no table without tasks."""
    costs = {change.task: change for change in changes(table, headline, COST)}
    subjects = []
    for change in changes(table, headline, CHANGE):
        rows = select(table, SCORE, site=change.task)
        rows = rows[rows["statistic"] != ERROR]
        scores = {str(model): value for model, value in zip(rows["model"], rows["value"], strict=True)}
        healed = [value for model, value in scores.items() if model not in (ORIGINAL, CONTROL)]
        cost = costs.get(change.task)
        cells = {
            "original": scores.get(ORIGINAL),
            "healed": healed[-1] if healed else None,
            "control": scores.get(CONTROL),
            "change": change.text,
            "cost": cost.text if cost else None,
            "examples": change.examples,
        }
        subjects.append((short(change.task, 60), cells))
    return [of_record("task_changes", subjects)] if subjects else []
