"""What removing more and more blocks does: held-out loss, divergence, agreement, and what each removal adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.draw import band, line
from fulldepth.figures.rows import Curve, number, select
from fulldepth.figures.skipped import Part, Removal, by_removed, planned, removals, removed_axis, what_went
from fulldepth.figures.style import (
    CATEGORICAL,
    INK,
    OPPOSITE,
    SEQUENTIAL,
    Figures,
    categorical,
    figure,
    label,
    minus,
    translucent,
)

BAND = "Band: 95 % of resampled sequences"


@dataclass(frozen=True)
class Course:
    """One line over the number of removed blocks, with the points that stand beside it."""

    part: Part | None
    """The folder whose rows it is of; None where only a document knows the losses."""
    removal: Removal
    mean: Curve
    low: Curve
    high: Curve
    healed: float | None
    scalars_only: float | None

    @property
    def base(self) -> float | None:
        """Loss of the model itself."""
        return dict(zip(self.mean.layers, self.mean.values, strict=True)).get(0)


def figures(found: Sequence[Part]) -> Figures:
    """`removal_loss` (and `:added`), `added_loss` for each set of blocks, `kl`, `greedy_agreement`."""
    made: Figures = {}
    every = courses(found)
    for name, drawn in (
        ("removal_loss", _loss(every)),
        ("removal_loss:added", _loss(every, added=True)),
        *_steps(removals(found)),
        ("kl", _beside(found, "kl")),
        ("greedy_agreement", _beside(found, "greedy_agreement")),
    ):
        if drawn is not None:
            made[name] = drawn
    return made


def courses(found: Sequence[Part]) -> list[Course]:
    """The lines of a page: curves first; no line that runs along another one."""
    made: list[Course] = []
    searched = [part for part in found if part.kind in ("curve", "skip")]
    for part in sorted(searched, key=lambda part: part.kind != "curve"):
        one = planned(part)
        if one is None:
            continue
        mean = by_removed(part.table, "loss", states=("original", "skipped"))
        healed, control = _point(part, "healed", one.healed), _point(part, "scalars_only", one.scalars_only)
        farther = next((at for at, other in enumerate(made) if one.starts(other.removal)), None)
        if not mean or (farther is not None and healed is None and control is None):
            continue
        low, high = (by_removed(part.table, "loss", statistic) for statistic in ("low", "high"))
        if farther is not None:
            mean = Curve([], [], [])  # the longer line goes through the same points
        made.append(Course(part, one, mean, low, high, healed, control))
    known = [course.removal for course in made]
    if made:  # a quantised model's losses stand with the other corners
        found = [part for part in found if part.kind != "quantise"]
    for one in removals(part for part in found if part.kind in ("bench", "quantise")):
        losses = [*one.losses]
        if len(losses) == len(one.blocks) + 1 and not any(_same(one, other) for other in known):
            counts = ["?"] * len(losses)
            mean = Curve(list(range(len(losses))), list(losses), counts)
            made.append(Course(None, one, mean, Curve([], [], []), Curve([], [], []), one.healed, one.scalars_only))
    return made


def _same(one: Removal, other: Removal) -> bool:
    """Whether two removals are one as far as it is known (a benchmark does not know the data)."""
    return (one.granularity, one.blocks) == (other.granularity, other.blocks[: len(one.blocks)])


def _point(part: Part, state: str, planned: float | None) -> float | None:
    """A loss in another state, out of the rows, or else out of the plan."""
    if "state" not in part.table.columns:
        return planned
    rows = select(part.table, "loss", "mean", "model")
    rows = rows[(rows["state"] == state).fillna(False).astype(bool)]
    return number(rows["value"].iloc[-1]) if len(rows) else planned


def _loss(every: Sequence[Course], added: bool = False) -> go.Figure | None:
    """Losses over the number of removed blocks, or what they are above the model's own."""
    traces: list[Any] = []
    shapes: list[dict[str, Any]] = []
    most, words = 0, []
    single = sum(bool(course.mean) for course in every) == 1
    pointed = sum(course.healed is not None or course.scalars_only is not None for course in every)
    for index, course in enumerate(every):
        style = categorical(index)
        name = _name(course, single)
        mean, low, high = _added(course) if added else (course.mean, course.low, course.high)
        if mean:
            if low and high:
                traces += _band(low, high, name, style["color"])
            traces.append(line(mean, name, style["color"], style["dash"]))
            words.append(_words(name, mean, added))
            most = max(most, *mean.layers)
        base = _base(course, every)
        if added and base is None:
            continue
        removed = len(course.removal.blocks)
        color = CATEGORICAL[2] if single and pointed == 1 else style["color"]
        points = _points(course, removed, (base or 0.0) if added else 0.0, color, pointed == 1)
        traces += points
        most = max(most, *(int(point.x[0]) for point in points), 0)
        if course.part is not None:
            lines, key = _break(course.part, style["color"], single, name)
            shapes += lines
            traces += key
    if not any(trace.y is not None and trace.hoverinfo != "skip" for trace in traces):
        return None
    return figure(
        traces,
        title="Held-out loss against blocks removed",
        subtitle=("Above the unmodified model’s, on the same sequences" if added else "Mean over predicted tokens")
        + (f". {BAND}" if any(trace.fill for trace in traces) else ""),
        alt=" ".join(words),
        xaxis=removed_axis(max(most, 1)),
        yaxis={"title": {"text": "Loss added (nats)" if added else "Loss (nats)"}},
        variant="Added" if added else "Loss",
        shapes=shapes,
        legend={"traceorder": "normal"},
        showlegend=True,
        height=420,
    )


def _band(low: Curve, high: Curve, name: str, color: str, form: str = ".4f") -> list[go.Scatter]:
    """A band that the subtitle explains: no entry in the legend."""
    return [trace.update(showlegend=False, legendgroup=None) for trace in band(low, high, f"{name}, 95 %", color, form)]


def _name(course: Course, single: bool) -> str:
    if single:
        return "Not healed"
    return f"{label(course.removal.name, 40)}, not healed" if course.removal.names else "Not healed"


def _added(course: Course) -> tuple[Curve, Curve, Curve]:
    """What is added: the paired rows where there are any, else differences from the first point."""
    if course.part is not None and (paired := by_removed(course.part.table, "loss_added")) and course.mean:
        low, high = (by_removed(course.part.table, "loss_added", statistic) for statistic in ("low", "high"))
        return paired, low, high
    base, mean = course.base, course.mean
    values = [None if value is None or base is None else value - base for value in mean.values]
    return Curve(mean.layers, values, mean.counts), Curve([], [], []), Curve([], [], [])


def _base(course: Course, every: Sequence[Course]) -> float | None:
    """Loss of the unmodified model; that of the line it runs along where it has no line of its own."""
    if course.base is not None:
        return course.base
    longer = [other.base for other in every if course.removal.starts(other.removal)]
    return next((base for base in longer if base is not None), None)


def _points(course: Course, removed: int, base: float, color: str, single: bool) -> list[go.Scatter]:
    """The healed loss and the control, as marks."""
    of = "" if single or not course.removal.name else f" ({label(course.removal.name, 40)})"
    made = []
    for value, at, name, symbol in (
        (course.healed, removed, "Healed", "diamond"),
        (course.scalars_only, 0, "Control: scalars only", "circle-open"),
    ):
        if value is not None:
            mark: dict[str, Any] = {"color": color, "size": 11, "symbol": symbol}
            if symbol.endswith("open"):
                mark["line"] = {"width": 2}
            made.append(
                go.Scatter(
                    x=[at], y=[value - base], name=name + of, mode="markers", marker=mark, hovertemplate="%{y:.4f}"
                )
            )
    return made


def _break(part: Part, color: str, single: bool, name: str) -> tuple[list[dict[str, Any]], list[go.Scatter]]:
    """The break point as a line with its interval, and its entry in the legend."""
    rows = select(part.table, "break_point").drop_duplicates("statistic", keep="last").set_index("statistic")["value"]
    found = {key: number(rows[key]) for key in ("value", "low", "high") if key in rows.index}
    at, low, high = (found.get(key) for key in ("value", "low", "high"))
    if at is None:
        return [], []
    across = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    shapes: list[dict[str, Any]] = []
    said = f"Break point: {at:.0f}"
    if low is not None and high is not None:
        said += f" (95 %: {low:.0f} to {high:.0f})"
        if high > low:
            fill = translucent(CATEGORICAL[4])
            shapes.append({"type": "rect", "x0": low, "x1": high, "fillcolor": fill, "line": {"width": 0}, **across})
    stroke = {"color": INK if single else color, "width": 1.5, "dash": "dot"}
    shapes.append({"type": "line", "x0": at, "x1": at, "line": stroke, **across})
    key = go.Scatter(
        x=[None], y=[None], name=said if single else f"{said}, {name}", mode="lines", line=stroke, hoverinfo="skip"
    )
    return shapes, [key]


def _words(name: str, mean: Curve, added: bool) -> str:
    known = [(count, value) for count, value in zip(mean.layers, mean.values, strict=True) if value is not None]
    (first, start), (last, end) = known[0], known[-1]
    form = "+.4f" if added else ".4f"
    return f"{name}: {minus(start, form)} nats with {first} removed, {minus(end, form)} with {last}."


def _steps(every: Sequence[Removal]) -> list[tuple[str, go.Figure | None]]:
    """A figure for each set of blocks: what each removal added."""
    made: list[tuple[str, go.Figure | None]] = []
    known = [one for one in every if len(one.losses) == len(one.blocks) + 1]
    for index, one in enumerate(known):
        made.append((f"added_loss:{index}" if index else "added_loss", _step_bars(one, alone=len(known) == 1)))
    return made


def _step_bars(one: Removal, alone: bool) -> go.Figure:
    """Bars in the order of removal, each under the number of its layer."""
    orders = list(range(1, len(one.blocks) + 1))
    added = [value if value is not None else 0.0 for value in one.added]
    colors = [SEQUENTIAL[6] if value >= 0 else OPPOSITE[6] for value in added]
    step = next(s for s in (1, 2, 5, 10, 20, 50, 1000) if len(orders) / s <= 16)
    ticks = [order for order in orders if order == 1 or (order - 1) % step == 0]
    worst, order = max(zip(added, orders, strict=True))
    total = sum(added)
    return figure(
        [
            go.Bar(
                x=orders,
                y=added,
                customdata=[[block, loss] for block, loss in zip(one.blocks, one.losses[1:], strict=True)],
                name="Loss added",
                marker={"color": colors, "line": {"width": 0}},
                hovertemplate="Number %{x}: layer %{customdata[0]}<br><b>%{y:+.4f}</b> nats, then "
                "%{customdata[1]:.4f}<extra></extra>",
            )
        ],
        title="Loss that each removal added",
        subtitle="In the order of removal, against the loss before it; below zero the removal helped",
        alt=f"All {len(orders)} together: {minus(total, '+.4f')} nats. Most came with layer {one.blocks[order - 1]}: "
        f"{minus(worst, '+.4f')}.",
        xaxis={
            "title": {"text": "Layer, in the order of removal"},
            "tickvals": ticks,
            "ticktext": [str(one.blocks[tick - 1]) for tick in ticks],
            "range": [0.4, len(orders) + 0.6],
        },
        yaxis={"title": {"text": "Loss added (nats)"}, "zeroline": True, "zerolinecolor": INK, "zerolinewidth": 1},
        variant="" if alone else label(one.names[0] if one.names else what_went(one), 48),
        hovermode="closest",
        bargap=0.4,
        height=420,
    )


BESIDE = {
    "kl": (
        "Divergence from the unmodified model",
        "KL(unmodified ‖ modified) of the next token, mean over predicted tokens",
        {"title": {"text": "KL (nats)"}, "rangemode": "tozero"},
        ".4f",
    ),
    "greedy_agreement": (
        "Greedy agreement",
        "Share of positions where the likeliest next token is still the unmodified model’s",
        {"title": {"text": "Agreement"}, "tickformat": ".0%"},
        ".2%",
    ),
}
"""Measure -> title, subtitle, value axis, d3 format."""


def _beside(found: Sequence[Part], measure: str) -> go.Figure | None:
    """A measure of curves over the number of removed blocks."""
    title, subtitle, axis, form = BESIDE[measure]
    drawn = [(part, curve) for part in found if (curve := by_removed(part.table, measure))]
    if not drawn:
        return None
    single, traces, words = len(drawn) == 1, [], []
    for index, (part, curve) in enumerate(drawn):
        name = "Mean" if single else label(part.label, 40)
        low, high = (by_removed(part.table, measure, statistic) for statistic in ("low", "high"))
        style = categorical(index)
        if low and high:
            traces += _band(low, high, name, style["color"], form)
        traces.append(line(curve, name, style["color"], style["dash"], form))
        known = [(count, v) for count, v in zip(curve.layers, curve.values, strict=True) if v is not None]
        end = minus(known[-1][1], form)
        words.append(f"{'At the end' if single else name}: {end} with {known[-1][0]} removed.")
    most = max(max(curve.layers) for _, curve in drawn)
    return figure(
        traces,
        title=title,
        subtitle=f"{subtitle}. {BAND}" if any(trace.fill for trace in traces) else subtitle,
        alt=" ".join(words),
        xaxis=removed_axis(max(most, 1)),
        yaxis=axis,
        showlegend=not single,
        legend={"traceorder": "normal"},
    )
