"""The models of benchmarks and of quantisation: what each costs in held-out loss, time and memory."""

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
SAME = 1e-4
"""Losses of the original that differ by more (relative) were read on other data."""


class Cell(NamedTuple):
    """A place in the grid of a benchmark; None where the rows do not say."""

    batch: int | None
    context: int | None

    @property
    def name(self) -> str:
        """For axes and tables."""
        if self.batch is None and self.context is None:
            return "as measured"
        return f"batch {self.batch or '?'}, context {self.context or '?'}"


class Spread(NamedTuple):
    """A number with its range."""

    value: float
    low: float
    high: float


Numbers = dict[tuple[str, str, str], dict[Cell, float]]
"""(measure, site, statistic) -> cell -> value, in the order of the rows; what is not finite is not there."""


@dataclass(frozen=True)
class BenchmarkedModel:
    """One model, measured beside an original."""

    name: str
    part: Part
    baseline: bool
    numbers: Numbers
    original: Numbers
    """Those of the model that it is compared with."""
    loss: float | None
    """Held-out, in nats."""
    base: float | None
    """The original's, on the same data."""
    stated: bool
    """Whether its loss is what its plan says, rather than measured with its times."""
    entry: Mapping[str, Any]
    """What the document says of it."""

    @property
    def cells(self) -> list[Cell]:
        """Where it was timed, in the order of measuring."""
        timed = (self.numbers.get((f"{phase}_time", phase, "median"), {}) for phase in PHASES)
        return list(dict.fromkeys(cell for found in timed for cell in found))

    def time(self, phase: str, cell: Cell) -> Spread | None:
        """Seconds in one cell: median, least and most over the rounds."""
        return _spread(self.numbers, f"{phase}_time", phase, cell)

    def relative(self, phase: str) -> Spread | None:
        """Time as a multiple of the original's: median over the grid, and the least and most of it.

        In one cell alone the range is that of the rounds.
        """
        found = []
        for cell in self.cells:
            own, base = self.time(phase, cell), _spread(self.original, f"{phase}_time", phase, cell)
            if own is not None and base is not None and base.value > 0:
                found.append(Spread(*(value / base.value for value in own)))
        if len(found) == 1:
            return found[0]
        ratios = [ratio.value for ratio in found]
        return Spread(median(ratios), min(ratios), max(ratios)) if ratios else None

    def over_grid(self, measure: str, statistic: str, phase: str) -> Spread | None:
        """A number that every cell has: median over the grid, least and most."""
        known = list(self.numbers.get((measure, phase, statistic), {}).values())
        return Spread(median(known), min(known), max(known)) if known else None

    def in_cell(self, measure: str, statistic: str, site: str, cell: Cell) -> float | None:
        """A number of one cell."""
        return self.numbers.get((measure, site, statistic), {}).get(cell)

    def saved(self, phase: str, cell: Cell) -> Spread | None:
        """Share of the original's time that it saves in one cell."""
        return _spread(self.numbers, "time_saved", phase, cell)

    def single(self, measure: str) -> float | None:
        """A number that the model has once, or its median over the grid."""
        return _single(self.numbers, measure)

    def of_original(self, measure: str) -> float | None:
        """The same of the model that it is compared with."""
        return _single(self.original, measure)


def benchmarked_models(found: Iterable[Part]) -> list[BenchmarkedModel]:
    """Every model of the benchmarks, then of the quantisations; the original of each folder first."""
    every = [part for part in found if part.kind in ("bench", "quantise")]
    made = []
    for part in every:
        entries = _entries(part)
        rows = {name: numbers(part.table[part.table["model"] == name]) for name in entries}
        losses = {name: _loss(rows[name], entry) for name, entry in entries.items()}
        first = next((name for name, entry in entries.items() if entry.get("baseline")), next(iter(entries), ""))
        known = [losses.get(first), *(_base(entry) for entry in entries.values())]
        base = next((one for one in known if one is not None), None)
        several = sum(other.kind == part.kind for other in every) > 1
        for name, entry in entries.items():
            stated = not _read_losses(rows[name])
            own = _base(entry) if stated and part.kind == "bench" and name != first else base
            loss = base if name == first else losses[name]
            stated = stated and loss is not None
            shown = part.named(name) if several else name
            made.append(BenchmarkedModel(shown, part, name == first, rows[name], rows[first], loss, own, stated, entry))
    names = [one.name for one in made]
    return [
        one if names.count(one.name) == 1 else replace(one, name=f"{one.name} ({SORTS[one.part.kind]})") for one in made
    ]


def _entries(part: Part) -> dict[str, Mapping[str, Any]]:
    """Name -> what the document says of the model; the original first."""
    stated = {}
    for entry in part.meta.get("models") or []:
        described = entry if isinstance(entry, Mapping) else {"label": entry}
        stated[str(described.get("label", described.get("name", "?")))] = described
    names = [str(name) for name in part.table["model"].dropna().unique()] if "model" in part.table.columns else []
    found = {name: stated.get(name, {}) for name in [*(name for name in stated if name in names), *names]}
    return dict(sorted(found.items(), key=lambda item: not (item[1].get("baseline") or item[0] == "original")))


def _loss(measured: Numbers, entry: Mapping[str, Any]) -> float | None:
    """A model's loss: measured, or what the plan of the export says."""
    if known := _read_losses(measured):
        return known[0]
    losses = entry.get("losses") or []
    healed = number(entry.get("healed_loss"))
    return healed if healed is not None else (number(losses[-1]) if losses else None)


def _read_losses(measured: Numbers) -> list[float]:
    """The loss that was read with the model, if any."""
    return list(measured.get(("loss", "model", "mean"), {}).values())


def _base(entry: Mapping[str, Any]) -> float | None:
    losses = entry.get("losses") or []
    return number(losses[0]) if losses else None


def numbers(rows: pd.DataFrame) -> Numbers:
    """The rows of one model, by what they are."""
    found: Numbers = {}
    keys = zip(*(rows[name].astype(str) for name in ("measure", "site", "statistic")), strict=True)
    where = map(Cell, _column(rows, "batch"), _column(rows, "context"))
    for key, cell, value in zip(keys, where, rows["value"], strict=True):
        if (finite := number(value)) is not None:
            found.setdefault(key, {})[cell] = finite
    return found


def _column(rows: pd.DataFrame, name: str) -> list[int | None]:
    if name not in rows.columns:
        return [None] * len(rows)
    return [None if pd.isna(value) else int(value) for value in rows[name]]


def _single(found: Numbers, measure: str) -> float | None:
    known = [value for key, values in found.items() if key[0] == measure for value in values.values()]
    return median(known) if known else None


def _spread(found: Numbers, measure: str, site: str, cell: Cell) -> Spread | None:
    """Median, least and most; what is missing of the range is the median."""
    middle, low, high = (found.get((measure, site, name), {}).get(cell) for name in ("median", "min", "max"))
    if middle is None:
        return None
    return Spread(middle, middle if low is None else low, middle if high is None else high)


def agree(found: Sequence[BenchmarkedModel]) -> bool:
    """Whether all losses were read on data on which the originals' losses are the same."""
    bases = [one.base for one in found if one.base is not None]
    return not bases or max(bases) - min(bases) <= SAME * max(map(abs, bases))


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points nothing else beats: none is at most as large in both numbers and smaller in one.

    Returns:
        Indices by ascending first number; points that are equal are all in or all out.
    """
    order = sorted(range(len(points)), key=lambda index: points[index])
    kept: list[int] = []
    best = float("inf")
    for index in order:
        second = points[index][1]
        if second < best or (kept and points[index] == points[kept[-1]]):
            kept.append(index)
            best = min(best, second)
    return kept
