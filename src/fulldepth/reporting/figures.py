"""Builds the figures of results: chooses the records for their kind, and draws each one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.reporting import charts, evaluation, exits, groups, rankings, skip
from fulldepth.reporting.charts import Figure, every_record
from fulldepth.reporting.kinds import COMPARISON, EXIT, EXITS, GROUPS, SERIES, SINGLE, TRAINING
from fulldepth.reporting.source import PageSource, rows_of_stack
from fulldepth.reporting.style import Figures

Draw = Callable[[Figure, PageSource], Figures]
"""Function that returns key -> figure. The figure is called `name:key`, or `name` if the key is ""."""
DRAWINGS: dict[str, Draw] = {
    "displacement": charts.displacement_figures,
    "profiles": charts.profiles,
    "word_maps": charts.word_maps,
    "numbered": charts.numbered,
    "seeds": groups.seeds,
    "loss_by_flops": groups.loss_by_flops,
    "removal_loss": skip.removal_loss,
    "ranking": rankings.ranking,
    "by_removed": skip.by_removed,
    "pareto": skip.pareto,
    "under_load": skip.under_load,
    "tradeoff": exits.tradeoff,
    "histogram": exits.histogram,
    "scores": evaluation.scores,
    "quality": evaluation.quality,
}
STOPPING = ("lens_accuracy", "lens_loss")
"""Figures that pages of early exit show for stopping all samples at one layer."""


def records(kind: str) -> list[tuple[Figure, Draw]]:
    """The figures of a kind of results, including those derived from a record: differences, and lines over training.

    A series has the figures of a single model, drawn at its last step, and figures over steps.
    """
    drawn: list[tuple[Figure, Draw]] = []
    for record in every_record():
        generic = charts.maps if record.maps else charts.lines
        drawing = DRAWINGS.get(record.draw, generic)
        if kind in record.kinds:
            drawn.append((replace(record, section="training") if kind == SERIES else record, drawing))
        if kind in (EXIT, EXITS) and record.name in STOPPING and SINGLE in record.kinds:
            drawn.append((replace(record, section="stopping", secondary=False), generic))
        difference = replace(record, name=f"difference_{record.name}", column="difference")
        compared = SINGLE in record.kinds and (record.maps or any(line.compared for line in record.lines))
        if kind in (COMPARISON, GROUPS) and compared:
            drawn += [(difference, generic)] if kind == GROUPS else [(record, generic), (difference, generic)]
        if kind in (SERIES, TRAINING) and record.followed:
            folded = record.secondary or record.section != "displacement"
            moved: dict[str, Any] = {"section": "training", "secondary": folded} if kind == SERIES else {}
            drawn.append((replace(record, name=f"steps_{record.name}", **moved), charts.followed))
    return [*records(SINGLE), *drawn] if kind == SERIES else drawn


def build(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, go.Figure]:
    """Every figure that the table has data for, in reading order.

    Args:
        table: tidy rows of one model, of a series or a training run (column `step`), of a comparison (columns `model`,
            `difference`) or of one of groups (also `seed`). Any measure or statistic may be missing; NaN leaves a gap.
        meta: the document of the table; only kind, names, depths and weights of penalties are read.

    Returns:
        Name -> figure. `name:variant` is another reading of the figure `name` (raw instead of centred, another
        model). A series gives the figures of its last step, then the curves over steps (`steps_...`); a training run
        its losses and costs over steps; a comparison one line or one map per model, and differences from the
        baseline (`difference_...`). Folders of `fulldepth skip` have figures of their own.
    """
    if meta.get("stacks") and "model" not in table.columns:
        return _of_stacks(table, meta)
    source = PageSource(table, meta)
    last = source
    if source.kind == SERIES:
        last = PageSource(table[table["step"] == table["step"].max()].drop(columns="step"), meta)
    drawn: dict[str, go.Figure] = {}
    for record, draw in records(source.kind):
        of_last = SINGLE in record.kinds and draw is not charts.followed
        drawn |= record.finished(draw(record, last if of_last else source))
    return drawn


def _of_stacks(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, go.Figure]:
    """The figures of every stack as variants of one another, `name:Stack`, and those across stacks."""
    rest = {key: value for key, value in meta.items() if key != "stacks"}
    (cross,) = [record for record, _ in records(SINGLE) if record.name == "cross"]
    drawn = {"": cross.finished(charts.maps(cross, PageSource(table, rest)))}
    for stack in meta["stacks"]:
        title = str(stack["name"]).capitalize()
        model = {**(rest.get("model") or {}), "num_layers": stack.get("num_layers")}
        for name, figure in build(rows_of_stack(table, str(stack["name"])), {**rest, "model": model}).items():
            about = figure.layout.meta
            about["variant"] = ", ".join(filter(None, (title, about["variant"])))
            base, _, variant = name.partition(":")
            drawn.setdefault(base, {})[f"{base}:{title} {variant}".strip()] = figure
    return {name: figure for variants in drawn.values() for name, figure in variants.items()}
