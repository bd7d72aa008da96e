"""The record of a run: rows at every evaluation, kept in the result folder while the run goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fulldepth.errors import FulldepthError
from fulldepth.results import Results, finite, tabulate
from fulldepth.train.evaluation import Evaluation
from fulldepth.train.headline import headline

UNITS = {"aligned": "nats"}
"""Units of the penalties that have one."""


@dataclass
class Record:
    """Rows of a run, by step; `meta` says what they belong to."""

    folder: Path
    meta: dict[str, Any]
    table: pd.DataFrame = field(default_factory=lambda: tabulate([], step=0))
    complete: bool = False
    """Whether the run has come to its end."""

    @classmethod
    def reopen(cls, folder: Path, meta: dict[str, Any], step: int) -> Record:
        """The record of an interrupted run, without what came after `step`."""
        try:
            table = Results.load(folder).table
        except FulldepthError:  # interrupted before its first evaluation
            return cls(folder, meta)
        return cls(folder, meta, table[table.step <= step].reset_index(drop=True))

    def add(
        self, step: int, evaluation: Evaluation, means: dict[str, tuple[float, int]], facts: dict[str, Any]
    ) -> None:
        """Rows of one evaluation, on disk when this returns.

        Args:
            step: optimiser steps taken.
            evaluation: on the held-out windows.
            means: part of the loss -> (sum, count) over the micro-batches since the last evaluation.
            facts: measure -> (value, statistic, unit), or None where it is not known.
        """
        rows: list[Any] = [
            ("validation_loss", "model", None, None, "mean", evaluation.loss, evaluation.targets, "nats")
        ]
        for name, (total, count) in means.items():
            measure, site = ("train_loss", "model") if name == "ce" else ("penalty", name)
            unit = "nats" if name == "ce" else UNITS.get(name, "1")
            rows.append((measure, site, None, None, "mean", total / count, count, unit))
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
        """What is known so far."""
        return Results(self.table, finite({**self.meta, "complete": self.complete, "headline": headline(self.table)}))

    def save(self) -> None:
        """Write the result folder."""
        self.results().save(self.folder)


class Stopwatch:
    """Training time: runs between `start` and `stop`, and goes on from what an earlier process measured."""

    def __init__(self, elapsed: float = 0.0) -> None:
        self.elapsed, self._lap = elapsed, elapsed
        self._since: float | None = None

    def stop(self) -> None:
        """Evaluation or saving begins."""
        if self._since is not None:
            self.elapsed += time.perf_counter() - self._since
            self._since = None

    def start(self) -> None:
        """Training goes on."""
        if self._since is None:
            self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds of training since the last lap; to be called while stopped."""
        lap, self._lap = self.elapsed - self._lap, self.elapsed
        return lap
