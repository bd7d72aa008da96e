"""Measurements of a benchmark as tidy rows and as findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fulldepth.execution.harness import Score
from fulldepth.execution.latency import PHASES
from fulldepth.results import Finding, tabulate
from fulldepth.skip.assessment.heldout_loss import HeldoutLosses
from fulldepth.skip.assessment.tables import busy, compared, joined, ratio_rows, spread, with_differences
from fulldepth.uncertainty import Ratio, median_ratio

GRID = ("batch", "context")


class Cell(NamedTuple):
    """One point of the grid."""

    batch: int
    context: int


@dataclass
class Measured:
    """Measurements of all models."""

    labels: list[str]
    """The original first."""
    new_tokens: int
    parameter_bytes: dict[str, int]
    times: dict[tuple[str, Cell, str], list[float]] = field(default_factory=dict)
    """(label, cell, phase) -> seconds of each round."""
    other_load: dict[Cell, float] = field(default_factory=dict)
    """Share of the processor that other programs used during the rounds."""
    peak: dict[tuple[str, Cell], int] = field(default_factory=dict)
    kv: dict[tuple[str, Cell], float] = field(default_factory=dict)
    scores: dict[str, list[Score]] = field(default_factory=dict)
    """Label -> scores on tasks."""
    losses: HeldoutLosses | None = None
    """Held-out losses of all models; None without data."""

    @property
    def cells(self) -> list[Cell]:
        """Cells in the order of measurement."""
        return list(self.other_load)

    def busy(self, *cells: Cell) -> Finding | None:
        """The finding in place of times if the machine was busy in one of some cells."""
        return busy(max(self.other_load[cell] for cell in cells))

    def ratio(self, label: str, phase: str, *cells: Cell) -> Ratio:
        """Time over the original's; in several cells, a round's time is the geometric mean of theirs."""
        own, base = (
            np.exp(np.mean([np.log(self.times[name, cell, phase]) for cell in cells], axis=0))  # [rounds]
            for name in (label, self.labels[0])
        )
        return median_ratio(own, base)


def table_of(measured: Measured) -> pd.DataFrame:
    """Rows with the columns `model`, `batch`, `context` and `difference` (to the original, in the row's unit)."""
    tables = []
    for label in measured.labels:
        size = [("parameter_bytes", "model", None, None, "value", measured.parameter_bytes[label], None, "bytes")]
        rows = [
            *size,
            *_loss_rows(measured, label),
            *_score_rows(measured.scores.get(label, [])),
            *_ratio_rows(measured, label, *measured.cells),
        ]
        tables.append(tabulate(rows, model=label, batch=None, context=None))
        tables += [
            tabulate(list(_rows(measured, label, cell)), model=label, batch=cell.batch, context=cell.context)
            for cell in measured.cells
        ]
    table = with_differences(joined(tables, model="str", batch="Int64", context="Int64"), measured.labels[0], *GRID)
    table.loc[table["model"] == measured.labels[0], "difference"] = math.nan
    return table


def _rows(measured: Measured, label: str, cell: Cell) -> Iterator[tuple[Any, ...]]:
    """The rows of one model in one cell."""
    tokens = cell.batch * (cell.context + measured.new_tokens)
    yield "peak_memory", "model", None, None, "value", measured.peak[label, cell], None, "bytes"
    yield "kv_bytes_per_token", "model", None, None, "value", measured.kv[label, cell], tokens, "bytes"
    for phase in PHASES:
        yield from spread(f"{phase}_time", phase, measured.times[label, cell, phase], "s")
    if label == measured.labels[0]:
        yield "other_load", "model", None, None, "value", measured.other_load[cell], None, "1"
    yield from _ratio_rows(measured, label, cell)


def _ratio_rows(measured: Measured, label: str, *cells: Cell) -> Iterator[tuple[Any, ...]]:
    """Times of an export over the original's; none if the machine was busy."""
    if label == measured.labels[0] or measured.busy(*cells) is not None:
        return
    for phase in PHASES:
        yield from ratio_rows(phase, measured.ratio(label, phase, *cells), len(measured.times[label, cells[0], phase]))


def _loss_rows(measured: Measured, label: str) -> Iterator[tuple[Any, ...]]:
    """The mean loss over held-out tokens, and the standard error of its difference to the original's."""
    losses = measured.losses
    if losses is None:
        return
    yield "loss", "model", None, None, "mean", losses.mean(label), losses.count, "nats"
    added = losses.added(label)
    if label != measured.labels[0] and math.isfinite(added.error):
        yield "loss", "model", None, None, "difference_stderr", added.error, added.documents, "nats"


def _score_rows(scores: Sequence[Score]) -> Iterator[tuple[Any, ...]]:
    """Rows of `task_score` with the task as site and the metric as statistic, and of its standard error."""
    for score in scores:
        yield "task_score", score.task, None, None, score.metric, score.value, score.count, "1"
        if score.error is not None:
            yield "task_score", score.task, None, None, f"{score.metric}_stderr", score.error, score.count, "1"


def headline(measured: Measured, remarks: dict[str, str]) -> dict[str, Finding]:
    """Findings for each export: the added loss, and for each phase the ratio of times.

    Args:
        measured: the measurements.
        remarks: label -> what to say of its loss.
    """
    findings, cells = {}, measured.cells
    not_compared = measured.busy(*cells)
    if not_compared is not None:
        findings["times"] = not_compared
    where = f" over {len(cells)} combinations of batch and context" if len(cells) > 1 else ""
    for label in measured.labels[1:]:
        if measured.losses is not None:
            findings[f"loss_added {label}"] = _loss_added(measured.losses, measured.labels[0], label, remarks)
        for phase in PHASES if not_compared is None else ():
            ratio = measured.ratio(label, phase, *cells)
            text = compared(ratio, len(measured.times[label, cells[0], phase]))
            findings[f"{phase}_time_ratio {label}"] = Finding(
                ratio.value, "1", f"{label}, {phase} time{where}: {text}."
            )
    return findings


def _loss_added(losses: HeldoutLosses, original: str, label: str, remarks: dict[str, str]) -> Finding:
    """Loss of an export minus the original's, on the same tokens."""
    added = losses.added(label)
    sentence = f"{label}: held-out loss {losses.mean(label):.4f} nats, {added.text(original)}; {losses.count} tokens."
    if label in remarks:
        sentence += f" {remarks[label]}"
    if math.isfinite(added.error):
        return Finding(added.mean, "nats", sentence, standard_error=added.error)
    return Finding(added.mean, "nats", sentence, no_standard_error="too few documents")
