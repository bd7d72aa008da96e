"""Models of benchmarks and quantisations: held-out loss, time and memory of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from fulldepth.figures.curves import number
from fulldepth.figures.skip_results import Part

PHASES = ("prefill", "decode")
SORTS = {"bench": "benchmark", "quantise": "quantisation"}
TOLERANCE = 1e-4
"""Relative difference above which losses of the original were measured on different data."""


class Cell(NamedTuple):
    """A cell of a benchmark's grid; None if the rows do not state a coordinate."""

    batch: int | None
    context: int | None

    @property
    def name(self) -> str:
        """Name in axes and tables."""
        if self.batch is None and self.context is None:
            return "as measured"
        return f"batch {self.batch or '?'}, context {self.context or '?'}"


WHOLE = Cell(None, None)
"""Stands for the whole grid."""


class Spread(NamedTuple):
    """A number with its range."""

    value: float
    low: float
    high: float

    @property
    def decided(self) -> float:
        """The value; 1 if the range holds 1 (of a ratio: no measurable difference)."""
        return 1.0 if self.low <= 1 <= self.high else self.value


LOSS = ("loss", "model", "mean")
Numbers = dict[tuple[str, str, str], dict[Cell, float]]
"""(measure, site, statistic) -> cell -> value, in the order of the rows; finite values only."""


@dataclass(frozen=True)
class BenchmarkedModel:
    """A model and the original that it is compared with."""

    name: str
    part: Part
    baseline: bool
    numbers: Numbers
    original: Numbers
    """Numbers of the original."""
    loss: float | None
    """Held-out loss in nats."""
    base: float | None
    """The original's loss on the same data."""
    stated: bool
    """Whether its loss comes from its plan instead of being measured with its times."""
    entry: Mapping[str, Any]
    """Its entry in the document."""

    @property
    def cells(self) -> list[Cell]:
        """Cells in which it was timed, in the order of measurement."""
        timed = (self.numbers.get((f"{phase}_time", phase, "median"), {}) for phase in PHASES)
        return list(dict.fromkeys(cell for times in timed for cell in times))

    def time(self, phase: str, cell: Cell) -> Spread | None:
        """Seconds in one cell: median, minimum and maximum over the rounds."""
        return _spread(self.numbers, f"{phase}_time", phase, cell)

    def relative(self, phase: str, cell: Cell = WHOLE) -> Spread | None:
        """Time over the original's in one cell, or over the whole grid: median over the rounds with its 95 % interval.

        Without an interval, both ends are the median.
        """
        if self.baseline:
            return Spread(1.0, 1.0, 1.0) if self.cells else None
        return _spread(self.numbers, "time_ratio", phase, cell, ends=("low", "high"))

    def in_cell(self, measure: str, statistic: str, site: str, cell: Cell) -> float | None:
        """A number of one cell."""
        return self.numbers.get((measure, site, statistic), {}).get(cell)

    def single(self, measure: str) -> float | None:
        """A number of the whole model, or its median over the grid."""
        return _single(self.numbers, measure)

    def of_original(self, measure: str) -> float | None:
        """As `single`, of the original."""
        return _single(self.original, measure)


def benchmarked_models(parts: Iterable[Part]) -> list[BenchmarkedModel]:
    """The models of all benchmarks, then of all quantisations; the original of each folder first."""
    timed = [part for part in parts if part.kind in SORTS]
    models = [
        replace(model, name=part.named(model.name)) if sum(other.kind == part.kind for other in timed) > 1 else model
        for part in timed
        for model in _models(part)
    ]
    names = [model.name for model in models]
    return [
        model if names.count(model.name) == 1 else replace(model, name=f"{model.name} ({SORTS[model.part.kind]})")
        for model in models
    ]


def _models(part: Part) -> list[BenchmarkedModel]:
    """The models of one folder."""
    entries = _entries(part)
    rows = {name: numbers(part.table[part.table["model"] == name]) for name in entries}
    first = next((name for name, entry in entries.items() if entry.get("baseline")), next(iter(entries), ""))
    losses = {name: _loss(rows[name], entry) for name, entry in entries.items()}
    bases = [losses.get(first), *(_base(entry) for entry in entries.values())]
    base = next((loss for loss in bases if loss is not None), None)
    losses[first] = base
    models = []
    for name, entry in entries.items():
        stated = not rows[name].get(LOSS)
        own = _base(entry) if stated and part.kind == "bench" and name != first else base
        stated = stated and losses[name] is not None
        models.append(
            BenchmarkedModel(name, part, name == first, rows[name], rows[first], losses[name], own, stated, entry)
        )
    return models


def _entries(part: Part) -> dict[str, Mapping[str, Any]]:
    """Name -> the model's entry in the document; the original first."""
    stated = {str(entry.get("label", "?")): entry for entry in part.meta.get("models") or []}
    names = [str(name) for name in part.table["model"].dropna().unique()] if "model" in part.table.columns else []
    entries = {name: stated.get(name, {}) for name in [*(name for name in stated if name in names), *names]}
    return dict(sorted(entries.items(), key=lambda item: not (item[1].get("baseline") or item[0] == "original")))


def _loss(measured: Numbers, entry: Mapping[str, Any]) -> float | None:
    """A model's loss: measured, or from the plan of the export."""
    stated = [*(entry.get("losses") or [None])[-1:], *([healed] if (healed := entry.get("healed_loss")) else [])]
    return next(iter(measured.get(LOSS, {}).values()), number(stated[-1]))


def _base(entry: Mapping[str, Any]) -> float | None:
    return number((entry.get("losses") or [None])[0])


def numbers(rows: pd.DataFrame) -> Numbers:
    """The finite values in the rows of one model."""
    values: Numbers = {}
    keys = zip(*(rows[name].astype(str) for name in ("measure", "site", "statistic")), strict=True)
    where = map(Cell, _column(rows, "batch"), _column(rows, "context"))
    for key, cell, value in zip(keys, where, rows["value"], strict=True):
        if (finite := number(value)) is not None:
            values.setdefault(key, {})[cell] = finite
    return values


def _column(rows: pd.DataFrame, name: str) -> list[int | None]:
    if name not in rows.columns:
        return [None] * len(rows)
    return [None if pd.isna(value) else int(value) for value in rows[name]]


def _single(numbers: Numbers, measure: str) -> float | None:
    values_of_measure = [value for key, values in numbers.items() if key[0] == measure for value in values.values()]
    return median(values_of_measure) if values_of_measure else None


def _spread(
    numbers: Numbers, measure: str, site: str, cell: Cell, ends: tuple[str, str] = ("min", "max")
) -> Spread | None:
    """The median with the ends of a range; a missing end is the median."""
    middle, low, high = (numbers.get((measure, site, name), {}).get(cell) for name in ("median", *ends))
    if middle is None:
        return None
    return Spread(middle, middle if low is None else low, middle if high is None else high)


def agree(models: Sequence[BenchmarkedModel]) -> bool:
    """Whether all losses were measured on the same data, judged by the originals' losses."""
    bases = [model.base for model in models if model.base is not None]
    return not bases or max(bases) - min(bases) <= TOLERANCE * max(map(abs, bases))
