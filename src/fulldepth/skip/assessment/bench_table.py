"""Measurements of a benchmark as tidy rows with predictions, and as findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, stdev
from typing import Any, NamedTuple

import pandas as pd

from fulldepth.execution.flops import Costs, Shape, Variant
from fulldepth.execution.harness import Score
from fulldepth.execution.latency import PHASES
from fulldepth.results import Finding, tabulate
from fulldepth.skip.assessment.heldout_loss import HeldoutLosses
from fulldepth.skip.assessment.tables import joined, spread, with_differences

MOST_NOISE = 0.02
"""Standard error of a share of time saved above which times are reported as noisy."""
GRID = ("batch", "context")


class Cell(NamedTuple):
    """One point of the grid."""

    batch: int
    context: int


class SkippedBlocks(NamedTuple):
    """Blocks of the original that a model does not compute."""

    granularity: str
    layers: frozenset[int]


@dataclass
class Measured:
    """Measurements of all models. Keys of times are labels of models or values of `toggles`."""

    labels: list[str]
    """The original first."""
    skipped_blocks: Mapping[str, SkippedBlocks | None]
    toggles: Mapping[SkippedBlocks, str]
    """Blocks skipped in the original -> key of the times."""
    costs: Mapping[str, Costs]
    """Granularity -> operations of the original."""
    last_only: bool
    """Whether the original's head runs at the last position of a prompt only."""
    new_tokens: int
    parameter_bytes: dict[str, int]
    times: dict[tuple[str, Cell, str], list[float]] = field(default_factory=dict)
    """(key, cell, phase) -> seconds of each round."""
    peak: dict[tuple[str, Cell], int] = field(default_factory=dict)
    kv: dict[tuple[str, Cell], float] = field(default_factory=dict)
    scores: dict[str, list[Score]] = field(default_factory=dict)
    """Label -> scores on tasks."""
    losses: HeldoutLosses | None = None
    """Held-out losses of all models; None without data."""

    @property
    def cells(self) -> list[Cell]:
        """Cells in the order of measurement."""
        return list(dict.fromkeys(cell for _, cell in self.kv))

    def saved(self, key: str, cell: Cell, phase: str) -> list[float]:
        """Share of the original's time saved in each round."""
        own, base = self.times[key, cell, phase], self.times[self.labels[0], cell, phase]
        return [1 - seconds / before for seconds, before in zip(own, base, strict=True)]

    def predicted(self, label: str, cell: Cell, phase: str) -> dict[str, float]:
        """Method -> predicted share of time saved; empty if it is not known which blocks a model lacks."""
        skipped_blocks = self.skipped_blocks[label]
        if skipped_blocks is None:
            return {}
        costs = self.costs[skipped_blocks.granularity]
        flops, original = (
            step_flops(costs, layers, cell, phase, self) for layers in (skipped_blocks.layers, Variant())
        )
        shares = {"flops": 1 - flops / original}
        if not skipped_blocks.layers:
            shares["toggled"] = 0.0
        elif skipped_blocks in self.toggles:
            shares["toggled"] = median(self.saved(self.toggles[skipped_blocks], cell, phase))
        return shares

    @property
    def attention(self) -> str | None:
        """Key of the times of the original with every attention skipped."""
        return self.toggles.get(SkippedBlocks("attention", Variant(self.costs["attention"].able)))


def step_flops(costs: Costs, layers: Variant, cell: Cell, phase: str, measured: Measured) -> float:
    """Operations of a prompt, or of one decoded token (mean over the steps), with some layers' parts skipped."""
    if phase == "prefill":
        rows = cell.batch * (1 if measured.last_only else cell.context)
        return costs.whole(layers, Shape(cell.batch, cell.context, rows))
    # Shape counts one key per token; a decoded token reads all earlier ones, on average this many:
    keys = cell.context + (measured.new_tokens + 1) / 2
    return costs.whole(layers, Shape(cell.batch, 1, cell.batch)) + cell.batch * (keys - 1) * costs.keys_read(layers)


def table_of(measured: Measured) -> pd.DataFrame:
    """Rows with the columns `model`, `batch`, `context` and `difference` (to the original, in the row's unit)."""
    tables = []
    for label in measured.labels:
        size = [("parameter_bytes", "model", None, None, "value", measured.parameter_bytes[label], None, "bytes")]
        scores = list(_score_rows(measured.scores.get(label, [])))
        losses = list(_loss_rows(measured, label))
        tables.append(tabulate([*size, *losses, *scores], model=label, batch=None, context=None))
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
            if measured.attention is not None:
                yield from spread("attention_share", phase, measured.saved(measured.attention, cell, phase), "1")
        else:
            yield from _saved_rows(measured, label, cell, phase)


def _saved_rows(measured: Measured, label: str, cell: Cell, phase: str) -> Iterator[tuple[Any, ...]]:
    """The share of time that an export saves in one phase, measured and predicted."""
    saved = measured.saved(label, cell, phase)
    skipped_blocks = measured.skipped_blocks[label]
    yield from spread("time_saved", phase, saved, "1")
    if skipped_blocks is not None and skipped_blocks.layers:
        share = median(saved) / len(skipped_blocks.layers)
        yield "time_saved_per_block", phase, None, None, "median", share, len(saved), "1"
    for how, share in measured.predicted(label, cell, phase).items():
        count = len(saved) if how == "toggled" else None
        yield "predicted_time_saved", phase, None, None, how, share, count, "1"
        if share > 0:
            yield "time_saved_ratio", phase, None, None, how, median(saved) / share, count, "1"


def _loss_rows(measured: Measured, label: str) -> Iterator[tuple[Any, ...]]:
    """The mean loss over held-out tokens, and the standard error of its difference to the original's."""
    losses = measured.losses
    if losses is None:
        return
    yield "loss", "model", None, None, "mean", losses.mean(label), losses.count, "nats"
    added = losses.added(label)
    if label != measured.labels[0] and math.isfinite(added.free_error):
        yield "loss", "model", None, None, "difference_stderr", added.free_error, added.documents, "nats"


def _score_rows(scores: Sequence[Score]) -> Iterator[tuple[Any, ...]]:
    """Rows of `task_score` with the task as site and the metric as statistic, and of its standard error."""
    for score in scores:
        yield "task_score", score.task, None, None, score.metric, score.value, score.count, "1"
        if score.error is not None:
            yield "task_score", score.task, None, None, f"{score.metric}_stderr", score.error, score.count, "1"


def headline(measured: Measured) -> dict[str, Finding]:
    """Findings for each export: the added loss, and for each phase the share of time saved with predictions."""
    findings = {}
    for label in measured.labels[1:]:
        if measured.losses is not None:
            findings[f"loss_added {label}"] = _loss_added(measured.losses, measured.labels[0], label)
        for phase in PHASES:
            shares = [median(measured.saved(label, cell, phase)) for cell in measured.cells]
            value = median(shares)
            guesses = [measured.predicted(label, cell, phase) for cell in measured.cells]
            sentence = f"{label}: {phase} takes {_percent(value)} time than {measured.labels[0]}"
            if len(shares) > 1:
                sentence += f" (over the grid {_percent(min(shares))} to {_percent(max(shares))})"
            ending = _expectation(measured.skipped_blocks[label], guesses)
            findings[f"{phase}_time_saved {label}"] = Finding(value, "1", f"{sentence}{ending}.")
    return findings


def _loss_added(losses: HeldoutLosses, original: str, label: str) -> Finding:
    """Loss of an export minus the original's, on the same tokens."""
    added = losses.added(label)
    error = f"standard error {added.free_error:.4f}" if math.isfinite(added.free_error) else "one document"
    sentence = (
        f"{label}: held-out loss {losses.mean(label):.4f} nats, {added.mean:+.4f} against {original} ({error}; "
        f"{losses.count} tokens of {added.documents} document{'' if added.documents == 1 else 's'})."
    )
    return Finding(added.mean, "nats", sentence)


def _expectation(skipped_blocks: SkippedBlocks | None, guesses: Sequence[Mapping[str, float]]) -> str:
    """The predictions, as the end of a sentence."""
    if skipped_blocks is not None and not skipped_blocks.layers:
        return "; it computes all that the original computes"
    predictions = [
        f"{_percent(median([guess[how] for guess in guesses]))} {method}"
        for how, method in (("toggled", "by skipping the same blocks in place"), ("flops", "by operations"))
        if all(how in guess for guess in guesses)
    ]
    return f"; predicted: {', '.join(predictions)}" if predictions else ""


def _percent(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}"


def noise(measured: Measured) -> list[str]:
    """A warning if times vary much: the standard error of a median, 1.25 s / sqrt(n), of the shares saved."""
    errors = [
        1.25 * stdev(shares) / len(shares) ** 0.5
        for label in measured.labels[1:]
        for cell in measured.cells
        for phase in PHASES
        if len(shares := measured.saved(label, cell, phase)) > 1
    ]
    if max(errors, default=0.0) < MOST_NOISE:
        return []
    return [
        f"The machine was busy: shares of time saved are uncertain by {max(errors):.3f} (standard error) in the worst "
        "case. Look at the ranges, or repeat with more rounds or a longer context."
    ]
