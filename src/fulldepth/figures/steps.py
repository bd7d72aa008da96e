"""Figures over training steps: tracks, their lines, and the sentence on how they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import number, select
from fulldepth.figures.style import CATEGORICAL, figure, minus

STEP_AXIS: dict[str, Any] = {
    "title": {"text": "Training step"},
    "tickformat": ",d",
    "nticks": 7,
    "unifiedhovertitle": {"text": "Step %{x:,}"},
}
MARKED = 60
"""Maximum number of points of a line with markers."""


@dataclass(frozen=True)
class Track:
    """One number over steps, and how it is drawn. False if it has no finite value."""

    steps: list[int]
    values: list[float | None]
    name: str = ""
    color: str = CATEGORICAL[0]
    dash: str = "solid"
    unit: str = "1"

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values)

    @property
    def at(self) -> dict[int, float | None]:
        """Step -> value."""
        return dict(zip(self.steps, self.values, strict=True))

    def later(self) -> Track:
        """The second half of the steps; empty if too few steps would remain."""
        half = [(step, value) for step, value in self.at.items() if 2 * step >= max(self.steps)]
        half = half if 3 <= len(half) < len(self.steps) else []
        return replace(self, steps=[step for step, _ in half], values=[value for _, value in half])


def track(
    table: pd.DataFrame,
    measure: str,
    site: str = "model",
    layer: int | None = None,
    column: str = "value",
    **drawn: Any,
) -> Track:
    """One row per step as a track, ascending; of one layer if the rows have layers.

    `drawn` holds name, colour and dash of the line.
    """
    rows = select(table, measure, site=site)
    if layer is not None:
        rows = rows[(rows["layer"] == layer).fillna(False).astype(bool)]
    rows = rows.drop_duplicates("step", keep="last").sort_values("step")
    unit = next(iter(rows["unit"].dropna()), "1")
    return Track([int(step) for step in rows["step"]], [*map(number, rows[column])], unit=str(unit), **drawn)


def over_steps(
    tracks: Iterable[Track], form: str, *, alt: Callable[[Sequence[Track]], str], yaxis: dict[str, Any], **layout: Any
) -> go.Figure | None:
    """Lines over training steps; None if none has a finite value.

    Args:
        tracks: what is drawn; those without a finite value are left out.
        form: d3 number format of hover boxes.
        alt: see `figure`; called with the lines that are drawn.
        yaxis: settings of the value axis.
        layout: passed on to `figure`.
    """
    drawn = [track for track in tracks if track]
    if not drawn:
        return None
    traces = [step_line(line.steps, line.values, line.name, line.color, form, line.dash) for line in drawn]
    return figure(traces, alt=alt(drawn), xaxis=STEP_AXIS, yaxis=yaxis, **layout)


def first_track(title: str, form: str) -> Callable[[Sequence[Track]], str]:
    """Alternative text: how the first line changes. `form` is a Python number format."""
    return lambda tracks: change(title.format(tracks[0].name), tracks[0].steps, tracks[0].values, form)


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
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not points:
        return f"{name}: no finite value."
    (start, first), (end, last) = points[0], points[-1]
    if start == end:
        return f"{name}: {minus(first, form)} at step {start:,}."
    return f"{name}: {minus(first, form)} at step {start:,}, {minus(last, form)} at step {end:,}."


def thin(steps: list[int], limit: int) -> list[int]:
    """At most `limit` of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= limit:
        return steps
    return [steps[round(index * (len(steps) - 1) / (limit - 1))] for index in range(limit)]
