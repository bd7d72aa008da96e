"""Plotly figures from a result table; imports neither torch nor the rest of the package.

A new figure needs one `Figure` in the `FIGURES` of its topic's file: `Results.figures()`, the sections of the page and
the notes on how to read it use that record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures import (
    early_exit,
    evaluation,
    layers,
    lens,
    memory,
    removal,
    similarity,
    training,
)
from fulldepth.figures.comparison import overlays
from fulldepth.figures.record import COMPARISON, SERIES, SINGLE, TRAINING, Figure, Method, Quantity, Source
from fulldepth.figures.style import Figures
from fulldepth.figures.training import followed

FIGURES: tuple[Figure, ...] = (
    *training.FIGURES,
    *layers.DISPLACEMENT,
    *similarity.FIGURES,
    *lens.FIGURES,
    *layers.FIGURES,
    *memory.FIGURES,
    *training.OF_RUNS,
    *removal.FIGURES,
    *early_exit.FIGURES,
    *evaluation.FIGURES,
)
"""All figures; those of one kind of results are in reading order."""


def records(kind: str) -> list[Figure]:
    """The figures of a kind of results (see `Source.kind`), including those derived from a record's curves.

    A series has the figures of a single model, drawn at its last step, and figures over steps.
    """
    own = [one for record in FIGURES for one in (record, *_derived(record)) if kind in one.kinds]
    return [*records(SINGLE), *own] if kind == SERIES else own


def _derived(record: Figure) -> Iterator[Figure]:
    """Figures of a record's curves compared between models and, if `followed`, over training."""

    def of_curves(draw: Callable[..., Figures], *more: str) -> Callable[[Source], Figures]:
        return lambda source: draw(source, record.quantities(source.table), *more)

    if record.curves:
        yield record.beside(record.name, of_curves(overlays), COMPARISON)
        yield record.beside(f"difference_{record.name}", of_curves(overlays, "difference"), COMPARISON)
    if record.followed:
        steps = record.beside(f"steps_{record.name}", of_curves(followed), TRAINING)
        folded = record.secondary or record.section != "displacement"
        yield replace(steps, kinds=(SERIES,), section="training", secondary=folded)
        yield steps


def build(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, go.Figure]:
    """Every figure that the table has data for, in reading order.

    Args:
        table: tidy rows of one model, of a series or a training run (column `step`), of a comparison (columns `model`,
            `difference`) or of a comparison of training runs (all three columns). Any measure or statistic may be
            missing; NaN leaves a gap.
        meta: the document of the table; only kind, names, depths and weights of penalties are read.

    Returns:
        Name -> figure. `name:variant` is another reading of the figure `name` (raw instead of centred, another
        model). A series gives the figures of its last step, then the curves over steps (`steps_...`); a training run
        its losses and costs over steps; a comparison one line or one map per model, and differences from the
        baseline (`difference_...`). Folders of `fulldepth skip` have figures of their own.
    """
    if meta.get("stacks") and "model" not in table.columns:
        return _of_stacks(table, meta)
    source = Source(table, meta)
    last = Source(table[table["step"] == table["step"].max()], meta) if source.kind == SERIES else source
    drawn: dict[str, go.Figure] = {}
    for record in records(source.kind):
        drawn |= record.drawn(last if SINGLE in record.kinds else source)
    return drawn


def _of_stacks(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, go.Figure]:
    """The figures of every stack as variants of one another, `name:Stack`, and those across stacks."""
    rest = {key: value for key, value in meta.items() if key != "stacks"}
    drawn: dict[str, dict[str, go.Figure]] = {}
    for stack in meta["stacks"]:
        title = str(stack["name"]).capitalize()
        model = {**(rest.get("model") or {}), "num_layers": stack.get("num_layers")}
        for name, figure in build(stack_rows(table, str(stack["name"])), {**rest, "model": model}).items():
            about = dict(figure.layout.meta)
            about["variant"] = f"{title}, {about['variant']}" if about.get("variant") else title
            base, _, variant = name.partition(":")
            own = f"{base}:{title}" + (f" {variant}" if variant else "")
            drawn.setdefault(base, {})[own] = figure.update_layout(meta=about)
    across = {
        name: figure for record in similarity.ACROSS for name, figure in record.drawn(Source(table, rest)).items()
    }
    return {**across, **{name: figure for variants in drawn.values() for name, figure in variants.items()}}


def stack_rows(table: pd.DataFrame, stack: str) -> pd.DataFrame:
    """The rows of one stack, with the sites that they have in a model of one stack."""
    sites = table["site"].astype(str)
    own = table[(sites == stack) | sites.str.startswith(f"{stack}:")]
    sites = own["site"].astype(str).str.removeprefix(f"{stack}:")
    return own.assign(site=sites.where(own["site"] != stack, "residual"))


__all__ = ["FIGURES", "Figure", "Method", "Quantity", "Source", "build", "records", "stack_rows"]
