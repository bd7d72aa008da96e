"""Models side by side, and what each differs by from the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import heat, line
from fulldepth.figures.lens import tolerances
from fulldepth.figures.quantities import Quantity, quantities
from fulldepth.figures.rows import Matrix, matrix, num_layers
from fulldepth.figures.similarity import TITLES, similarity_map
from fulldepth.figures.style import MUTED, Figures, categorical, extremes, figure, label, layer_axis, layer_name, minus


@dataclass(frozen=True)
class Run:
    """One of the models: its rows, its name as shown (unique), its depth, its line."""

    name: str
    table: pd.DataFrame
    layers: int
    style: dict[str, str]
    baseline: bool


def runs(table: pd.DataFrame, meta: Mapping[str, Any]) -> list[Run]:
    """The models in the order of `meta["models"]`; those that only the table knows come last."""
    described = {str(entry.get("label")): entry for entry in meta.get("models") or []}
    order = [*described, *(str(name) for name in table["model"].unique() if str(name) not in described)]
    found: list[Run] = []
    names = [label(name, 40) for name in order]
    for index, name in enumerate(order):
        rows = table[table["model"].astype(str) == name]
        entry = described.get(name, {})
        shown = names[index] if names.count(names[index]) == 1 else f"{names[index]} ({index + 1})"
        found.append(
            Run(shown, rows, num_layers(rows, entry.get("model")), categorical(index), bool(entry.get("baseline")))
        )
    return found


def figures(table: pd.DataFrame, meta: Mapping[str, Any]) -> Figures:
    """Each quantity with a line a model, `difference_NAME` against the baseline, similarity maps a model each."""
    models = runs(table, meta)
    relative = meta.get("depth") == "relative"
    made: Figures = {}
    for quantity in quantities(table):
        base = quantity.name if not quantity.variant else quantity.measure
        for prefix, column in (("", "value"), ("difference_", "difference")):
            drawn = _overlay(quantity, models, relative, column)
            if drawn is not None:
                name = prefix + base
                made[name if name not in made else prefix + quantity.name] = drawn
    made |= _maps(models)
    if (depth := _effective_depth(models)) is not None:
        made["effective_depth"] = depth
    return made


def _overlay(quantity: Quantity, models: list[Run], relative: bool, column: str) -> go.Figure | None:
    difference = column == "difference"
    traces, words = [], []
    for run in models:
        if difference and (run.baseline or "difference" not in run.table.columns):
            continue
        found = quantity.curve(run.table, run.layers, column)
        if not found:
            continue
        form = f"+{quantity.form}" if difference else quantity.form
        traces.append(line(found, run.name, form=form, depth=run.layers if relative else None, **run.style))
        words.append(extremes(run.name, found.layers, found.values))
    if not traces:
        return None
    baseline = next((run.name for run in models if run.baseline), "the baseline")
    depth = max(run.layers for run in models)
    settings = quantity.settings
    if difference:
        settings = {key: settings[key] for key in ("tickformat", "ticksuffix") if key in settings}
    first = 0 if any(0 in quantity.curve(run.table, run.layers).layers for run in models) else 1
    drawn = figure(
        traces,
        title=f"{quantity.title}: difference from {baseline}" if difference else f"{quantity.title} per layer",
        subtitle="Value minus the baseline’s at the same depth" if difference else "One line a model",
        alt=" ".join(words),
        xaxis=layer_axis(depth, first=first, relative=relative),
        yaxis={"title": {"text": f"Δ {quantity.axis}" if difference else quantity.axis}, **settings},
        variant=quantity.variant,
        showlegend=True,
        hovermode="closest" if relative else "x unified",
    )
    if difference:
        drawn.add_hline(0, line={"color": MUTED, "width": 1})
    return drawn


def _maps(models: list[Run]) -> Figures:
    """The cosine and CKA map of every model, and the difference maps of all but the baseline."""
    made: Figures = {}
    for measure, statistic in (("cosine", "mean"), ("cka", "debiased")):
        for run in models:
            if cells := matrix(run.table, measure, statistic):
                made[f"{measure}:{run.name}"] = similarity_map(cells, measure, statistic, run.name, beside=True)
        for run in models:
            if run.baseline or "difference" not in run.table.columns:
                continue
            if cells := matrix(run.table, measure, statistic, "difference"):
                made[f"difference_{measure}:{run.name}"] = heat(
                    cells,
                    quantity="difference",
                    signed=True,
                    title=f"{TITLES[measure]}: difference from the baseline",
                    subtitle="Value minus the baseline’s at the same depth",
                    alt=_largest(cells),
                    variant=run.name,
                    beside=True,
                )
    return made


def _largest(cells: Matrix) -> str:
    """Where a difference map departs most from zero."""
    known = [
        (abs(value), value, row, column)
        for row, values in zip(cells.layers, cells.values, strict=True)
        for column, value in zip(cells.layers, values, strict=True)
        if value is not None
    ]
    _, value, row, column = max(known)
    pair = f"{layer_name(row).lower()} and {layer_name(column).lower()}"
    return f"Largest difference: {minus(value, '+.2f')}, between {pair}."


def _effective_depth(models: list[Run]) -> go.Figure | None:
    traces = []
    for run in models:
        depths = {f"ε = {eps}": value for eps, value in tolerances(run.table, "eps=").items()}
        depths |= {f"relative ε = {eps}": value for eps, value in tolerances(run.table, "relative_eps=").items()}
        if depths:
            traces.append(
                go.Bar(
                    x=list(depths),
                    y=list(depths.values()),
                    name=run.name,
                    marker={"color": run.style["color"]},
                    hovertemplate=f"%{{y:.0f}} of {run.layers} layers",
                )
            )
    if not traces:
        return None
    return figure(
        traces,
        title="Effective depth",
        subtitle="First layer whose accuracy is good enough, for several tolerances",
        alt="; ".join(f"{trace.name}: {', '.join(f'{v:.0f}' for v in trace.y)} layers" for trace in traces) + ".",
        xaxis={"title": {"text": "Tolerance"}, "type": "category"},
        yaxis={"title": {"text": "Layers"}, "range": [0, max(run.layers for run in models) * 1.05]},
        barmode="group",
        showlegend=True,
    )
