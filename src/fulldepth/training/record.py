"""The record of a run: result rows of every evaluation, saved to the result folder during the run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fulldepth.losses import TERMS
from fulldepth.metrics.jump_rate import describe_jump
from fulldepth.results import DOCUMENT, Finding, Results, finite, tabulate
from fulldepth.training.card import card_of
from fulldepth.training.evaluation import Evaluation
from fulldepth.training.resume import RECORD, read_rows, step_of

OF_MODEL = {"ce": ("train_loss", "model"), "auxiliary": ("auxiliary_loss", "model")}
"""Part of the model's own loss -> measure and site; other parts are penalties."""


@dataclass
class Record:
    """Result rows of a run by step, and the metadata of its results."""

    folder: Path
    meta: dict[str, Any]
    table: pd.DataFrame = field(default_factory=lambda: tabulate([], step=0))
    complete: bool = False
    """Whether the run has finished."""

    @classmethod
    def reopen(cls, folder: Path, meta: dict[str, Any], checkpoint: Path) -> Record:
        """The record of an interrupted run as of a checkpoint.

        Raises:
            FulldepthError: if its rows cannot be read.
        """
        rows = read_rows(checkpoint)
        if rows is None and (folder / DOCUMENT).exists():  # checkpoints of earlier versions hold no rows
            rows = Results.load(folder).table
        return cls(folder, meta) if rows is None else cls(folder, meta, _until(rows, step_of(checkpoint)))

    def keep_in(self, checkpoint: Path) -> None:
        """Write the rows and a model card into a checkpoint that is being saved."""
        self.table.to_parquet(checkpoint / RECORD, index=False)
        card_of(self.meta, headline(self.table), step_of(checkpoint)).write(checkpoint)

    def add(
        self, step: int, evaluation: Evaluation, means: dict[str, tuple[float, int]], facts: dict[str, Any]
    ) -> None:
        """Add the rows of one evaluation and save the result folder.

        Args:
            step: optimiser steps taken.
            evaluation: on the held-out windows.
            means: part of the loss -> (sum, count) over the micro-batches since the last evaluation.
            facts: measure -> (value, statistic, unit), or None if unknown.
        """
        rows: list[Any] = [
            ("validation_loss", "model", None, None, "mean", evaluation.loss, evaluation.targets, evaluation.unit)
        ]
        if evaluation.auxiliary is not None:
            value, targets = evaluation.auxiliary, evaluation.targets
            rows.append(("validation_auxiliary_loss", "model", None, None, "mean", value, targets, "1"))
        if evaluation.accuracy is not None:
            value, targets = evaluation.accuracy, evaluation.targets
            rows.append(("validation_accuracy", "model", None, None, "mean", value, targets, "1"))
        for layer, value in enumerate(evaluation.lens_accuracy):
            rows.append(("lens_accuracy", "residual", layer, None, "mean", value, evaluation.targets, "1"))
        for name, (total, count) in means.items():
            measure, site = OF_MODEL.get(name, ("penalty", name))
            unit = evaluation.unit if name in ("ce", "aligned") else TERMS[name].unit if name in TERMS else "1"
            rows.append((measure, site, None, None, "mean", total / count, count, unit))
        rows += evaluation.rows
        for layer, value in enumerate(evaluation.displacement, start=1):
            rows.append(("displacement", "residual", layer, None, "mean", value, evaluation.tokens, "1"))
        depth = len(evaluation.displacement)
        for back, value in enumerate(evaluation.jump_rates):
            rows.append(("jump_rate", "residual", depth - back, None, "value", value, evaluation.tokens, "%"))
        for measure, fact in facts.items():
            if fact is not None:
                value, statistic, unit = fact
                rows.append((measure, "model", None, None, statistic, value, None, unit))
        new = tabulate(rows, step=step)
        self.table = new if self.table.empty else pd.concat([self.table, new], ignore_index=True)
        self.save()

    def last(self, measure: str) -> float | None:
        """The latest value of a measure of the whole model."""
        rows = self.table[(self.table.measure == measure) & (self.table.site == "model")]
        return None if rows.empty else float(rows.value.iloc[-1])

    def results(self) -> Results:
        """The results so far."""
        return Results(self.table, finite({**self.meta, "complete": self.complete, "headline": headline(self.table)}))

    def save(self) -> None:
        """Write the result folder."""
        self.results().save(self.folder, page=False)


def _until(table: pd.DataFrame, step: int) -> pd.DataFrame:
    """The rows up to a step."""
    return table[table.step <= step].reset_index(drop=True)


class Stopwatch:
    """Measures training time between `start` and `stop`, added to the time of earlier processes."""

    def __init__(self, elapsed: float = 0.0) -> None:
        self.elapsed, self._lap = elapsed, elapsed
        self._since: float | None = None

    def stop(self) -> None:
        """Stop before an evaluation or a checkpoint."""
        if self._since is not None:
            self.elapsed += time.perf_counter() - self._since
            self._since = None

    def start(self) -> None:
        """Start when training begins or continues."""
        if self._since is None:
            self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds of training since the last lap; call it while stopped."""
        lap, self._lap = self.elapsed - self._lap, self.elapsed
        return lap


def headline(table: pd.DataFrame) -> dict[str, Finding]:
    """The findings of a run by name, as of the last evaluation."""
    if table.empty:
        return {}
    step = int(table.step.max())
    findings: dict[str, Finding] = {}
    for name, measure, unit, sentence in (
        ("validation_loss", "validation_loss", _unit(table, "validation_loss"), _loss(table, step)),
        ("validation_accuracy", "validation_accuracy", "1", _accuracy(table, step)),
        ("validation_ap50", "average_precision", "1", _precision(table, step)),
        ("train_loss", "train_loss", _unit(table, "train_loss"), ""),
        ("zeta_L", "jump_rate", "%", _jump(table, step)),
        ("throughput", "throughput", _unit(table, "throughput"), _pace(table, step)),
        ("elapsed", "elapsed", "s", ""),
        ("peak_memory", "peak_memory", "MiB", ""),
    ):
        value = _value(table, measure, step)
        if value is not None:
            findings[name] = Finding(value, unit, sentence)
    return findings


def _value(table: pd.DataFrame, measure: str, step: int) -> float | None:
    """Value of a measure at a step: of the whole model, or of the deepest layer that has it."""
    rows = table[(table.measure == measure) & (table.step == step)].sort_values("layer")
    if measure == "average_precision":
        rows = rows[rows.statistic == "ap50"]
    return None if rows.empty or not math.isfinite(rows.value.iloc[-1]) else float(rows.value.iloc[-1])


def _loss(table: pd.DataFrame, step: int) -> str:
    loss, before = _value(table, "validation_loss", step), _value(table, "validation_loss", 0)
    if loss is None:
        return ""
    unit = _unit(table, "validation_loss").replace("1", "")
    sentence = " ".join(f"The validation loss is {loss:.3f} {unit} at step {step:,}".split())
    if before is not None and step:
        sentence += f", {before:.3f} before training"
    losses = table[table.measure == "validation_loss"].set_index("step")["value"].dropna()
    best = int(losses.index[int(losses.argmin())])
    return sentence + (f"; it was lowest at step {best:,} ({losses[best]:.3f})." if best != step else ".")


def _jump(table: pd.DataFrame, step: int) -> str:
    value = _value(table, "jump_rate", step)
    return "" if value is None else describe_jump(value)


def _accuracy(table: pd.DataFrame, step: int) -> str:
    value = _value(table, "validation_accuracy", step)
    return "" if value is None else f"{value:.1%} of the validation rows are classified correctly at step {step:,}."


def _precision(table: pd.DataFrame, step: int) -> str:
    value = _value(table, "average_precision", step)
    return (
        "" if value is None else f"The last layer's average precision at an IoU of 0.5 is {value:.1%} at step {step:,}."
    )


def _pace(table: pd.DataFrame, step: int) -> str:
    speed = _value(table, "throughput", step)
    return "" if speed is None else f"Training runs at {speed:,.0f} {_unit(table, 'throughput')}."


def _unit(table: pd.DataFrame, measure: str) -> str:
    units = table[table.measure == measure]["unit"]
    return "1" if units.empty else str(units.iloc[-1])
