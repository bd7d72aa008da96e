"""What removing more and more blocks does: held-out loss, divergence, agreement, and what each removal adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.courses import Course, base_of, courses
from fulldepth.figures.draw import band, line
from fulldepth.figures.record import SKIP, Figure, Method, Source
from fulldepth.figures.rows import Curve, number, select
from fulldepth.figures.skipped import Part, Removal, by_removed, removals, removed_axis, what_went
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


def _losses(source: Source) -> Figures:
    every = courses(source.parts)
    made = {"": _loss(every), "added": _loss(every, added=True)}
    return {key: drawn for key, drawn in made.items() if drawn is not None}


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
        base = base_of(course, every)
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


def _steps(source: Source) -> Figures:
    """A figure for each set of blocks: what each removal added."""
    known = [one for one in removals(source.parts) if len(one.losses) == len(one.blocks) + 1]
    return {str(at) if at else "": _step_bars(one, alone=len(known) == 1) for at, one in enumerate(known)}


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


FIGURES = (
    Figure(
        "removal_loss",
        "removal",
        _losses,
        kinds=(SKIP,),
        title="Held-out loss against blocks removed",
        methods=(
            Method(
                "Loss",
                ("loss", "loss_added"),
                (
                    "Mean cross-entropy in nats (natural logarithms; one nat is 1.44 bits) over the predicted tokens: "
                    "those of the response for pairs of prompt and response, every token but a window’s first for "
                    "plain text. What a removal adds is the difference from the loss before it, or from the "
                    "unmodified model’s, on the same tokens. The band holds 95 % of the means over sequences drawn "
                    "again with replacement."
                ),
                formula=(
                    "<mi>ℓ</mi><mo>=</mo><mo>−</mo><mfrac><mn>1</mn><mi>N</mi></mfrac><munder><mo>∑</mo><mi>n</mi>"
                    "</munder><mi>ln</mi><mi>p</mi><mo>(</mo><msub><mi>x</mi><mi>n</mi></msub><mo>|</mo><msub>"
                    "<mi>x</mi><mrow><mo>&lt;</mo><mi>n</mi></mrow></msub><mo>)</mo>"
                ),
            ),
            Method(
                "Block removed",
                ("loss", "mmd", "prefill_time"),
                (
                    "The attention block (or the MLP, or the whole layer) is not computed and adds nothing; the "
                    "stream passes it by. Blocks are numbered from 1. In a greedy search every candidate is judged "
                    "again after each removal, by the held-out loss; the order of removal is the order of picking. "
                    "“Not healed” means that nothing else was changed."
                ),
                source=(
                    "<cite>Hopscotch: Discovering and Skipping Redundancies in Language Models</cite>, arXiv "
                    "2506.03303."
                ),
            ),
            Method(
                "Break point",
                ("break_point",),
                (
                    "The last number of removed blocks up to which the loss grows along one straight line that ends "
                    "in a kink. A line is fitted to the first points; the first point outside its band (from the "
                    "spread of the sequences, 5 % over all points, or a tolerance in nats) ends it. It is a kink if "
                    "the curve turns there by more than four times the mean of the turns just before; a curve that "
                    "bends smoothly has no break point. Later points have no influence. The interval holds 95 % of "
                    "the break points found on sequences drawn again with replacement."
                ),
                source=(
                    "<cite>Hopscotch: Discovering and Skipping Redundancies in Language Models</cite>, arXiv "
                    "2506.03303 (break point, read off the curve); Efron 1979 (bootstrap)."
                ),
            ),
        ),
    ),
    Figure(
        "added_loss",
        "removal",
        _steps,
        kinds=(SKIP,),
        title="Loss that each removal added",
        subtitle="In the order of removal, against the loss before it; below zero the removal helped",
    ),
    Figure(
        "kl",
        "removal",
        lambda source: _beside(source.parts, "kl"),
        kinds=(SKIP,),
        methods=(
            Method(
                "KL divergence",
                ("kl",),
                (
                    "Of the next token’s distribution: p is the unmodified model’s, q the modified one’s; mean over "
                    "predicted tokens, in nats. 0 means that nothing has changed, whether or not the predictions were "
                    "right."
                ),
                formula=(
                    "<mi>KL</mi><mo>(</mo><mi>p</mi><mo>‖</mo><mi>q</mi><mo>)</mo><mo>=</mo><munder><mo>∑</mo>"
                    "<mi>v</mi></munder><mi>p</mi><mo>(</mo><mi>v</mi><mo>)</mo><mi>ln</mi><mfrac><mrow><mi>p</mi>"
                    "<mo>(</mo><mi>v</mi><mo>)</mo></mrow><mrow><mi>q</mi><mo>(</mo><mi>v</mi><mo>)</mo></mrow></mfrac>"
                ),
            ),
        ),
    ),
    Figure(
        "greedy_agreement",
        "removal",
        lambda source: _beside(source.parts, "greedy_agreement"),
        kinds=(SKIP,),
        methods=(
            Method(
                "Greedy agreement",
                ("greedy_agreement",),
                (
                    "Share of predicted positions at which the likeliest next token is the same as the unmodified "
                    "model’s, given the same tokens before it."
                ),
            ),
        ),
    ),
)
