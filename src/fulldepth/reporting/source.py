"""The table and the document behind a page: its kind, the models side by side, and curves from the tidy table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from fulldepth.reporting.kinds import COMPARISON, GROUPS, KINDS, SERIES, SINGLE, TRAINING, Kind
from fulldepth.reporting.style import categorical, label


@dataclass(frozen=True)
class PlottedCurve:
    """One statistic over layers, steps or removed blocks. False if it has no finite value."""

    at: list[int]
    values: list[float | None]
    counts: list[str]
    """Number of observations of each value as text; "?" if unknown."""
    unit: str = "1"

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values)

    @cached_property
    def points(self) -> dict[int, float]:
        """Layer (or step) -> finite value."""
        return {at: value for at, value in zip(self.at, self.values, strict=True) if value is not None}


NO_CURVE = PlottedCurve([], [], [])


def number(value: Any) -> float | None:
    """A finite float, or None."""
    if pd.isna(value):
        return None
    real = float(value)
    return real if math.isfinite(real) else None


def select(table: pd.DataFrame, measure: str, statistic: str | None = None, site: str | None = None) -> pd.DataFrame:
    """The rows of one measure, and of one statistic and site if given.

    `statistic` may list alternatives, `a|b`: the first one that has rows is selected.
    """
    rows = table[table["measure"] == measure]
    if site is not None:
        rows = rows[rows["site"] == site]
    if statistic is None:
        return rows
    choices = (rows[rows["statistic"] == name] for name in statistic.split("|"))
    return next(filter(len, choices), rows.iloc[:0])


def curve_of(
    table: pd.DataFrame,
    measure: str,
    statistic: str | None = None,
    site: str | None = "residual",
    *,
    by: str = "layer",
    layer: int | None = None,
    other: int | None = None,
    column: str = "value",
) -> PlottedCurve:
    """A statistic by layer (or the column `by`), ascending.

    Args:
        table: rows of one model; at one step unless `by` is `step`.
        measure: name of the measure.
        statistic: see `select`.
        site: see `select`.
        by: the column over which the values run.
        layer: the layer to select, for curves over steps; a step without a value is a gap.
        other: the second layer to select, of measures of pairs.
        column: the column that holds the values.
    """
    rows = select(table, measure, statistic, site)
    if not {by, column} <= {*rows}:
        return NO_CURVE
    for name, wanted in (("layer", layer), ("other", other)):
        if wanted is not None:
            rows = rows[(rows[name] == wanted).fillna(False).astype(bool)]
    rows = rows.dropna(subset=[by]).drop_duplicates(by, keep="last").set_index(by).sort_index()
    unit = str(next(iter(rows["unit"].dropna()), "1"))
    if layer is not None:
        rows = rows.reindex(sorted(table[by].unique()))
    counts = ["?" if pd.isna(count) else f"{int(count):,}" for count in rows["count"]]
    return PlottedCurve([int(at) for at in rows.index], [*map(number, rows[column])], counts, unit)


def num_layers(table: pd.DataFrame, model: Mapping[str, Any] | None) -> int:
    """Number of layers L: from the model's entry, or else the deepest layer in the table."""
    stated = (model or {}).get("num_layers")
    if isinstance(stated, int) and stated > 0:
        return stated
    deepest = table["layer"].max()
    return 1 if pd.isna(deepest) else max(int(deepest), 1)


@dataclass(frozen=True)
class Run:
    """One of several models: its rows, displayed name (unique), depth, colour and dash."""

    name: str
    table: pd.DataFrame
    layers: int
    style: dict[str, Any]
    baseline: bool


@dataclass(frozen=True)
class PageSource:
    """A result table and its document."""

    table: pd.DataFrame
    meta: Mapping[str, Any]

    @cached_property
    def page(self) -> Kind:
        """The kind of page: as the document states it, but measurements, series and runs are told by their columns."""
        stated = KINDS.get(str(self.meta.get("kind")))
        if stated is not None and stated.name == COMPARISON and self.meta.get("of"):
            return next((kind for kind in KINDS.values() if kind.compares == self.meta["of"]), stated)
        if stated is not None and stated.name not in (SINGLE, SERIES, TRAINING, COMPARISON) and not stated.compares:
            return stated
        if "model" in self.table.columns:
            return KINDS[COMPARISON]
        if stated is not None and stated.name == TRAINING:
            return stated
        return KINDS[SERIES if "step" in self.table.columns else SINGLE]

    @cached_property
    def kind(self) -> str:
        """The kind that has the figures and the texts of the page, see `Kind.drawn_as`."""
        return self.page.drawn_as or self.page.name

    @cached_property
    def layers(self) -> int:
        """Number of layers L of the model."""
        return num_layers(self.table, self.meta.get("model"))

    @cached_property
    def steps(self) -> dict[int, pd.DataFrame]:
        """Step -> its rows, ascending."""
        return {step: self.table[self.table["step"] == step] for step in sorted({int(s) for s in self.table["step"]})}

    @cached_property
    def runs(self) -> list[Run]:
        """The models of a comparison in the order of `meta["models"]`; models only in the table come last."""
        described = {str(entry.get("label")): entry for entry in self.meta.get("models") or []}
        labels = list(dict.fromkeys([*described, *map(str, self.table["model"].unique())]))
        names = [label(text, 40) for text in labels]
        runs: list[Run] = []
        for index, (text, name) in enumerate(zip(labels, names, strict=True)):
            rows = self.table[self.table["model"].astype(str) == text]
            entry = described.get(text, {})
            rows = rows[rows["seed"].isna()] if self.kind == GROUPS else rows
            unique = name if names.count(name) == 1 else f"{name} ({index + 1})"
            layers = num_layers(rows, entry.get("model"))
            runs.append(Run(unique, rows, layers, categorical(index), bool(entry.get("baseline"))))
        return runs

    def with_column(self, column: str) -> list[Run]:
        """The models whose rows have values in a column; in the column `difference`, all but the baseline."""
        return [run for run in self.runs if column in run.table and not (column == "difference" and run.baseline)]

    @cached_property
    def baseline(self) -> str:
        """Name of the model that the others are compared with."""
        return next((run.name for run in self.runs if run.baseline), "the baseline")


def rows_of_stack(table: pd.DataFrame, stack: str) -> pd.DataFrame:
    """The rows of one stack, with the sites renamed as in a model of a single stack (`residual`)."""
    sites = table["site"].astype(str)
    rows = table[(sites == stack) | sites.str.startswith(f"{stack}:")]
    sites = rows["site"].astype(str).str.removeprefix(f"{stack}:")
    return rows.assign(site=sites.where(rows["site"] != stack, "residual"))
