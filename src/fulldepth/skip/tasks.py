"""`TaskComparison`: tasks of a healed model and its control beside the original's, with errors paired by example."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fulldepth.core.errors import FulldepthError
from fulldepth.core.number_format import plus_minus
from fulldepth.core.progress import Watcher
from fulldepth.core.uncertainty import score_reach
from fulldepth.evaluation import EvaluateSettings, OtherResultsError, evaluate, load_tasks
from fulldepth.hf import load_tokenizer
from fulldepth.results import DOCUMENT, Finding, Results, difference_errors, paired_rows
from fulldepth.settings.heal import ResolvedHealSettings

MEASURE = "task_score"
ORIGINAL = "original"
CONTROL = "control"
COMPARED_WITH = {ORIGINAL: "the original", CONTROL: "the original trained on the same tokens"}
"""Name of a model -> what a sentence calls it that compares another one with it."""
NO_ERROR = "it takes three different examples, and scores that are means of examples"
SAME = "the difference is the same for every example, which says nothing of others"


class TaskReading(NamedTuple):
    """The main score of a task for a model and the one that it is compared with."""

    task: str
    metric: str
    examples: int
    reference: float
    score: float
    error: float
    """Standard error of `score - reference`, paired by example; NaN if it is not known."""
    compared_with: str = COMPARED_WITH[ORIGINAL]

    @property
    def difference(self) -> float:
        """The model's score minus that of the other one."""
        return self.score - self.reference

    @property
    def reach(self) -> float:
        """The smallest difference that is measurable."""
        return score_reach(self.error, self.examples)

    @property
    def sentence(self) -> str:
        """The reading in words; a difference up to `reach` is not measurable."""
        scores = f"{self.task}: {self.score:.3f} {self.metric}, {self.compared_with} {self.reference:.3f}"
        if math.isnan(self.error):
            verdict = f"difference {self.difference:+.3f}, no standard error is known"
        elif abs(self.difference) <= self.reach:
            verdict = f"no measurable difference, at most {abs(self.difference) + self.reach:.3f}"
        else:
            verdict = f"difference {self.difference:+.3f} {plus_minus(self.error, 3)}"
        return f"{scores} ({verdict}; {self.examples:,} examples)."

    def finding(self) -> Finding:
        """The reading as an entry of a headline."""
        if math.isnan(self.error):
            return Finding(self.difference, "1", self.sentence, no_standard_error=NO_ERROR)
        if self.error == 0:
            return Finding(self.difference, "1", self.sentence, no_standard_error=SAME)
        return Finding(self.difference, "1", self.sentence, standard_error=self.error)


def evaluation_of(settings: ResolvedHealSettings) -> EvaluateSettings:
    """The settings of the evaluation that a healing asks for: the whole model alone."""
    return EvaluateSettings(
        tasks=settings.tasks,
        task_data=settings.task_data,
        limit=settings.task_limit,
        batch_size=settings.batch_size,
        exit_layers="full",
    )


def check_tasks(settings: ResolvedHealSettings) -> None:
    """Load the tasks, to refuse those that are unknown or whose files are missing before the work.

    Raises:
        FulldepthError: as `fulldepth.evaluate`.
    """
    load_tasks(evaluation_of(settings))


def _readable(folder: Path) -> bool:
    """Return True if the results in a folder can be loaded."""
    try:
        Results.load(folder)
    except FulldepthError:
        return False
    return True


@dataclass
class TaskComparison:
    """Tasks of the original, the healed model and the control; empty where none are asked for."""

    tokenizer: Any
    """Of both models, or where it is saved."""
    revision: str | None
    """Of the place where it is saved."""
    folder: Path
    """Keeps the answers of an interrupted call."""
    watcher: Watcher
    scores: dict[str, Results] = field(default_factory=dict)
    """`original`, `control`, and `trained` or `refitted` -> its evaluation."""

    def read(self, name: str, model: Any, settings: ResolvedHealSettings) -> None:
        """Score a model, in memory: removed branches add zeros there.

        Raises:
            FulldepthError: as `fulldepth.evaluate`.
        """
        if isinstance(self.tokenizer, str | Path):
            self.tokenizer = load_tokenizer(
                self.tokenizer, revision=self.revision, trust_remote_code=settings.trust_remote_code
            )
        self.watcher.say(f"Tasks of the {name} model.")
        stored = self.folder / f"tasks-{name}"
        if (stored / DOCUMENT).exists() and not _readable(stored):
            self.watcher.say(f"The scores of the {name} model in {self.folder} are damaged; they are read anew.")
            shutil.rmtree(stored)
        read = partial(
            evaluate,
            model,
            output=stored,
            settings=evaluation_of(settings),
            tokenizer=self.tokenizer,
            resume=True,
            watcher=self.watcher,
        )
        try:
            self.scores[name] = read()
        except OtherResultsError:  # of an interrupted healing with other tasks
            self.watcher.say(f"The scores of the {name} model in {self.folder} are of other tasks; they are read anew.")
            self.scores[name] = read(overwrite=True)

    def of(self, name: str, reference: str = ORIGINAL) -> list[TaskReading]:
        """The main score of every task for one model, compared with another one; empty if either was not read."""
        if not {name, reference} <= {*self.scores}:
            return []
        return list(task_readings(self.scores[reference], self.scores[name], COMPARED_WITH[reference]))

    @property
    def warnings(self) -> list[str]:
        """Warnings of the evaluations; one that holds for all models stands once, another one names its model."""
        of_model = {name: results.meta["warnings"] for name, results in self.scores.items()}
        shared = [
            text for text in next(iter(of_model.values()), []) if all(text in texts for texts in of_model.values())
        ]
        of_single_models = [
            f"Tasks of the {name} model: {text}"
            for name, texts in of_model.items()
            for text in texts
            if text not in shared
        ]
        return [f"Tasks: {text}" for text in shared] + of_single_models


def task_readings(
    reference: Results, scored: Results, compared_with: str = COMPARED_WITH[ORIGINAL]
) -> Iterator[TaskReading]:
    """The main score of every task that both evaluations have.

    Args:
        reference: results of `fulldepth.evaluate`.
        scored: those of another model of the same depth, on the same examples.
        compared_with: name of the first model in sentences.
    """
    errors = pd.Series(difference_errors(scored, reference, "layer"), scored.table.index)
    errors = errors.where(paired_rows(scored, reference))  # two states of one model are not independent
    for task, entry in scored.meta["tasks"].items():
        metric = entry["metric"]
        values = []
        for results in (reference, scored):
            rows = results.table
            rows = rows[(rows["measure"] == MEASURE) & (rows["site"] == task) & (rows["statistic"] == metric)]
            values.append(rows.loc[rows["layer"] == rows["layer"].max()].iloc[0])
        before, after = values
        scores = (float(before["value"]), float(after["value"]))
        yield TaskReading(task, metric, int(after["count"]), *scores, float(errors[after.name]), compared_with)
