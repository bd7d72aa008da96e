"""Plotly figures from a result table; imports neither torch nor the rest of the package.

A new figure is a function in the file of its topic; a new topic is one file and one line in `TOPICS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures import (
    coherence,
    comparison,
    displacement,
    geometry,
    lens,
    memory,
    series,
    similarity,
    skipping,
    training,
    trainings,
)
from fulldepth.figures.rows import num_layers
from fulldepth.figures.skipped import KINDS, TOGETHER
from fulldepth.figures.style import Figures

TOPICS: tuple[Callable[[pd.DataFrame, int], Figures], ...] = (
    displacement.figures,
    similarity.figures,
    lens.figures,
    coherence.figures,
    geometry.figures,
    memory.figures,
)
"""What is drawn of one model at one step, in reading order: (table, number of layers) -> figures."""


def build(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, go.Figure]:
    """Every figure that the table has data for, in reading order.

    Args:
        table: tidy rows of one model, of a series or a training run (column `step`) or of a comparison (columns
            `model`, `difference`; with `step` too, a comparison of training runs). Any measure or statistic may be
            missing; NaN leaves a gap.
        meta: the document beside the table; only kind, names, depths and penalties' weights are read from it.

    Returns:
        Name -> figure. `name:variant` is another reading of the figure `name` (raw instead of centred, another
        model). A series gives the figures of its last step, then the curves over steps (`steps_...`); a training run
        its losses and costs over steps; a comparison one line or one map a model, and what it differs by from the
        baseline (`difference_...`). Folders of `fulldepth skip` have figures of their own.
    """
    if meta.get("kind") in (*KINDS, TOGETHER):
        return skipping.figures(table, meta)
    if "model" in table.columns:
        return (trainings if "step" in table.columns else comparison).figures(table, meta)
    layers = num_layers(table, meta.get("model"))
    if meta.get("kind") == "training":
        return training.figures(table, meta, layers)
    if "step" not in table.columns:
        return layerwise(table, layers)
    last = table[table["step"] == table["step"].max()]
    return layerwise(last, layers) | series.figures(table, layers)


def layerwise(table: pd.DataFrame, layers: int) -> Figures:
    """The figures of one model at one step."""
    made: Figures = {}
    for topic in TOPICS:
        made |= topic(table, layers)
    return made


__all__ = ["TOPICS", "build", "layerwise"]
