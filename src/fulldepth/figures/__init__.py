"""Plotly figures from a result table; imports neither torch nor the rest of the package.

A new figure needs one `Figure` in the `FIGURES` of its topic's file: `Results.figures()`, the sections of the page and
the notes on how to read it use that record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures import (
    checkpoints,
    coherence,
    detection,
    displacement,
    early_exit,
    evaluation,
    geometry,
    healing,
    lens,
    memory,
    pareto,
    removal,
    similarity,
    towers,
    training_run,
    training_runs,
)
from fulldepth.figures.checkpoints import followed
from fulldepth.figures.comparison import overlays
from fulldepth.figures.record import COMPARISON, SERIES, SINGLE, TRAINING, Figure, Method, Quantity, Source

FIGURES: tuple[Figure, ...] = (
    *training_run.FIGURES,
    *training_runs.FIGURES,
    *checkpoints.FIGURES,
    *displacement.FIGURES,
    *similarity.FIGURES,
    *towers.FIGURES,
    *lens.FIGURES,
    *detection.FIGURES,
    *coherence.FIGURES,
    *geometry.FIGURES,
    *memory.FIGURES,
    *checkpoints.OF_TRAINING,
    *removal.FIGURES,
    *healing.FIGURES,
    *pareto.FIGURES,
    *early_exit.FIGURES,
    *evaluation.FIGURES,
)
"""All figures; those of one kind of results are in reading order."""


def records(kind: str) -> list[Figure]:
    """The figures of a kind of results (see `Source.kind`), including those derived from a record's curves.

    A series has the figures of a single model, drawn at its last step, and figures over steps.
    """
    if kind == SERIES:
        return [*records(SINGLE), *_of_kind(SERIES)]
    return _of_kind(kind)


def _of_kind(kind: str) -> list[Figure]:
    return [one for record in FIGURES for one in (record, *_derived(record)) if kind in one.kinds]


def _derived(record: Figure) -> Iterator[Figure]:
    """Figures of a record's curves compared between models and, if `followed`, over training."""

    def draw(source: Source) -> dict[str, go.Figure]:
        return overlays(source, record.quantities(source.table))

    def differences(source: Source) -> dict[str, go.Figure]:
        return overlays(source, record.quantities(source.table), "difference")

    def over_steps(source: Source) -> dict[str, go.Figure]:
        return followed(source, record.quantities(source.table))

    if record.curves:
        yield record.beside(record.name, draw, COMPARISON)
        yield record.beside(f"difference_{record.name}", differences, COMPARISON)
    if record.followed:
        folded = record.secondary or record.section != "displacement"
        yield record.beside(f"steps_{record.name}", over_steps, SERIES, section="training", secondary=folded)
        yield record.beside(f"steps_{record.name}", over_steps, TRAINING)


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
    across = {name: figure for record in towers.FIGURES for name, figure in record.drawn(Source(table, rest)).items()}
    return {**across, **{name: figure for variants in drawn.values() for name, figure in variants.items()}}


def stack_rows(table: pd.DataFrame, stack: str) -> pd.DataFrame:
    """The rows of one stack, with the sites that they have in a model of one stack."""
    sites = table["site"].astype(str)
    own = table[(sites == stack) | sites.str.startswith(f"{stack}:")]
    sites = own["site"].astype(str).str.removeprefix(f"{stack}:")
    return own.assign(site=sites.where(own["site"] != stack, "residual"))


__all__ = ["FIGURES", "Figure", "Method", "Quantity", "Source", "build", "records", "stack_rows"]
