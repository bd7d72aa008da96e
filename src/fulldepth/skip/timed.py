"""Shared by both kinds of benchmark: a model that is timed, and comparisons with the first model of the same program.

`bench` times calls of a model (`CallTimes`), `bench_under_load` servers with several clients (`LoadTimes`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pandas as pd
import torch

from fulldepth.core.thresholds import BUSY
from fulldepth.core.uncertainty import Ratio
from fulldepth.execution.latency import machine
from fulldepth.results import Finding, finite, provenance, stacked, tabulate
from fulldepth.settings.bench import BenchSettings

TableRow = tuple[Any, ...]
"""A row of the table, in the order of `results.table.COLUMNS`."""


@dataclass(frozen=True)
class ComparedModel(ABC):
    """A model of a benchmark."""

    label: str
    name: str
    """Path of a folder or file, Hub name, or the name of a loaded model."""
    program: str
    """The program that runs the model: `transformers`, `vLLM` or `llama.cpp`."""
    notes: dict[str, Any]
    """Notes of an export: `format`, `plan`, ...; empty for other models."""
    original: bool
    """True for the model that the exports are compared with."""

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that it was exported with; empty if there is none."""
        return self.notes.get("plan") or {}

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Describe the model: its name, class, depth, and what else is known."""


class Cell(NamedTuple):
    """One point of the grid of times."""

    batch: int
    """Sequences at once; under load, clients at once."""
    context: int
    """Tokens of a prompt."""


@dataclass
class Timings(ABC):
    """Measurements of all models."""

    programs: dict[str, str]
    """Label -> the program that runs the model; the original first. The first model of a program is the one that the
    program's other models are compared with."""
    sizes: dict[str, dict[str, int]]
    """Label -> measure -> bytes, the same in every cell."""
    times: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict)
    """(label, cell, ...) -> what each round measured."""
    other_load: dict[Cell, float] = field(default_factory=dict)
    """Share of the processor that other programs used during the rounds, by cell."""

    refused: ClassVar[str] = "compared"
    """What a busy machine does not allow, as a participle."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(next(iter(self.times.values())))

    def baseline(self, label: str) -> str:
        """The model that a model is compared with; itself, if it is the first of its program."""
        return next(other for other, program in self.programs.items() if program == self.programs[label])

    def cells(self, label: str) -> list[Cell]:
        """Where a model was timed."""
        timed = {key[:2] for key in self.times}
        return [cell for cell in self.other_load if (label, cell) in timed]

    def busy(self, *cells: Cell) -> Finding | None:
        """The finding in place of comparisons, if other programs used more than `BUSY` of the processor."""
        other = max(self.other_load[cell] for cell in cells or self.other_load)
        if other <= BUSY:
            return None
        used = f"other programs used {100 * other:.0f} % of the processor"
        return Finding(None, "1", f"Not {self.refused}: {used}. Run again on a quiet machine.")

    @abstractmethod
    def measured_rows(self, label: str, cell: Cell) -> Iterator[TableRow]:
        """Rows of what was measured of a model in a cell."""

    @abstractmethod
    def ratios(self, label: str, *cells: Cell) -> Iterator[tuple[str, str, Ratio]]:
        """(measure, site, ratio over the baseline's) of a model in cells."""

    def ratio_rows(self, label: str, *cells: Cell) -> Iterator[TableRow]:
        """Rows of a model's ratios: the median over the rounds and its interval; none on a busy machine."""
        if label == self.baseline(label) or self.busy(*cells) is not None:
            return
        for measure, site, ratio in self.ratios(label, *cells):
            for statistic, value in zip(("median", "low", "high"), ratio, strict=True):
                if math.isfinite(value):
                    yield measure, site, None, None, statistic, value, self.rounds, "1"

    def whole_rows(self, label: str) -> Iterator[TableRow]:
        """Rows of a model that belong to no cell."""
        for measure, size in self.sizes.get(label, {}).items():
            yield measure, "model", None, None, "value", size, None, "bytes"

    def table(self) -> pd.DataFrame:
        """Return all rows, with the columns `model`, `batch` and `context`."""
        tables = []
        for label in self.programs:
            tables.append(tabulate([*self.whole_rows(label)], model=label, batch=None, context=None))
            for cell in self.cells(label):
                rows = [*self.measured_rows(label, cell)]
                if label == next(iter(self.programs)):
                    rows.append(("other_load", "model", None, None, "value", self.other_load[cell], None, "1"))
                rows += self.ratio_rows(label, cell)
                tables.append(tabulate(rows, model=label, batch=cell.batch, context=cell.context))
        return stacked(tables, model="str", batch="Int64", context="Int64")


def with_fitting_contexts(settings: BenchSettings, positions: int | None) -> BenchSettings:
    """Shorten the default contexts to a model's positions (None = unlimited); contexts that were given stay."""
    if positions is None or "contexts" in settings.model_fields_set:
        return settings
    longest = max(1, positions - settings.max_new_tokens)
    contexts = list(dict.fromkeys(min(context, longest) for context in settings.contexts))
    return settings.model_copy(update={"contexts": contexts})


def bench_document(
    models: Sequence[tuple[ComparedModel, dict[str, Any]]],
    settings: BenchSettings,
    device: torch.device,
    data: dict[str, Any] | None,
    warnings: Iterable[str],
    headline: Iterable[tuple[str, Finding]],
) -> dict[str, Any]:
    """The entries of `results.json`.

    Args:
        models: every model with its description, the original first.
        settings: of the benchmark.
        device: where the models ran.
        data: origin of the data; None without data.
        warnings: further warnings.
        headline: findings by name.
    """
    entries = [
        {
            "label": model.label,
            "program": model.program,
            "baseline": model.original,
            "model": about,
            "format": model.notes.get("format"),
            **{name: model.plan.get(name) for name in ("granularity", "blocks", "losses", "healed_loss")},
        }
        for model, about in models
    ]
    folded = [
        f"{model.label} (format folded) computes its removed blocks, so no time is saved."
        for model, _ in models
        if model.notes.get("format") == "folded"
    ]
    document = {
        **provenance("bench", settings.model_dump(), seed=settings.seed, machine=machine(device)),
        "baseline": entries[0]["label"],
        "model": entries[0]["model"],
        "models": entries,
        "data": data,
        "warnings": [*folded, *warnings, *(data or {}).get("warnings", [])],
        "headline": dict(headline),
    }
    return dict(finite(document))
