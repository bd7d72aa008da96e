"""Marks of figures over training steps: the axis, a line, the sentence on how a line changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.style import minus

STEP_AXIS: dict[str, Any] = {
    "title": {"text": "Training step"},
    "tickformat": ",d",
    "nticks": 7,
    "unifiedhovertitle": {"text": "Step %{x:,}"},
}
MARKED = 60
"""A line of more points than this is drawn without a mark on each."""


def step_line(
    steps: Sequence[float],
    values: Sequence[float | None],
    name: str,
    color: str,
    form: str,
    dash: str = "solid",
    **extra: Any,
) -> go.Scatter:
    """A curve over steps. `form` is a d3 number format."""
    return go.Scatter(
        x=list(steps),
        y=list(values),
        name=name,
        mode="lines+markers" if len(steps) <= MARKED else "lines",
        line={"color": color, "dash": dash, "width": 2},
        marker={"color": color, "size": 5},
        hovertemplate=f"%{{y:{form}}}",
        **extra,
    )


def change(name: str, steps: Sequence[int], values: Sequence[float | None], form: str) -> str:
    """One sentence: from the first step's value to the last one's."""
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not known:
        return f"{name}: no finite value."
    (start, first), (end, last) = known[0], known[-1]
    if start == end:
        return f"{name}: {minus(first, form)} at step {start:,}."
    return f"{name}: {minus(first, form)} at step {start:,}, {minus(last, form)} at step {end:,}."


def thin(steps: list[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]
