"""Removal of blocks: held-out loss, divergence and agreement by number of blocks, and loss added by each removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, number, select
from fulldepth.figures.draw import band, legend_entry, line
from fulldepth.figures.record import SKIP, Figure, Method, Source, readings
from fulldepth.figures.skip_results import Part, Removal, by_removed, planned, removals, removed_axis, what_went
from fulldepth.figures.style import (
    CATEGORICAL,
    INK,
    OPPOSITE,
    SEQUENTIAL,
    ZERO,
    Figures,
    axis,
    categorical,
    figure,
    label,
    minus,
    translucent,
)

BAND = "Band: 95 % interval over documents"
NO_CURVE = Curve([], [], [])


@dataclass(frozen=True)
class RemovalCurve:
    """Losses over the number of removed blocks, with the points shown beside them."""

    part: Part | None
    """The folder of its rows; None if the losses come from a document only."""
    removal: Removal
    mean: Curve
    healed: float | None
    scalars_only: float | None
    low: Curve = NO_CURVE
    high: Curve = NO_CURVE

    @property
    def base(self) -> float | None:
        """Loss of the model itself."""
        return dict(zip(self.mean.layers, self.mean.values, strict=True)).get(0)

    def added(self) -> tuple[Curve, Curve, Curve]:
        """Loss added, with its interval: the paired rows if there are any, else differences from the first point."""
        if self.part is not None and self.mean and (paired := _with_range(self.part, "loss_added"))[0]:
            return paired
        values = [None if value is None or self.base is None else value - self.base for value in self.mean.values]
        return Curve(self.mean.layers, values, self.mean.counts), NO_CURVE, NO_CURVE


def _with_range(part: Part, measure: str, states: Sequence[str] = ()) -> tuple[Curve, Curve, Curve]:
    """A measure over the number of removed blocks, and the ends of its interval."""
    low, high = (by_removed(part.table, measure, statistic) for statistic in ("low", "high"))
    return by_removed(part.table, measure, states=states), low, high


def removal_curves(parts: Sequence[Part]) -> list[RemovalCurve]:
    """The curves of a page: those of kind `curve` first; none that coincides with another one."""
    curves: list[RemovalCurve] = []
    searched = [part for part in parts if part.kind in ("curve", "skip")]
    for part in sorted(searched, key=lambda part: part.kind != "curve"):
        removal = planned(part)
        if removal is None:
            continue
        mean, low, high = _with_range(part, "loss", ("original", "skipped"))
        healed, control = (_point(part, state, getattr(removal, state)) for state in ("healed", "scalars_only"))
        covered = any(removal.starts(other.removal) for other in curves)
        if not mean or (covered and healed is None and control is None):
            continue
        if covered:
            mean = NO_CURVE  # the longer line contains the same points
        curves.append(RemovalCurve(part, removal, mean, healed, control, low, high))
    drawn = [curve.removal for curve in curves]
    if curves:  # the losses of a quantised model are shown with the other combinations
        parts = [part for part in parts if part.kind != "quantise"]
    for removal in removals(part for part in parts if part.kind in ("bench", "quantise")):
        losses = [*removal.losses]
        if len(losses) == len(removal.blocks) + 1 and not any(_alike(removal, other) for other in drawn):
            mean = Curve(list(range(len(losses))), list(losses), ["?"] * len(losses))
            curves.append(RemovalCurve(None, removal, mean, removal.healed, removal.scalars_only))
    return curves


def _alike(removal: Removal, other: Removal) -> bool:
    """Whether two removals agree as far as is known (a benchmark does not know the data)."""
    return (removal.granularity, removal.blocks) == (other.granularity, other.blocks[: len(removal.blocks)])


def _point(part: Part, state: str, planned: float | None) -> float | None:
    """The loss in another state, from the rows or else from the plan."""
    if "state" not in part.table.columns:
        return planned
    rows = select(part.table, "loss", "mean", "model")
    rows = rows[(rows["state"] == state).fillna(False).astype(bool)]
    return number(rows["value"].iloc[-1]) if len(rows) else planned


def _base(curve: RemovalCurve, curves: Sequence[RemovalCurve]) -> float | None:
    """Loss of the unmodified model; from the curve that it coincides with if it has no points of its own."""
    if curve.base is not None:
        return curve.base
    longer = (other.base for other in curves if curve.removal.starts(other.removal))
    return next((base for base in longer if base is not None), None)


def _losses(source: Source) -> Figures:
    curves = removal_curves(source.parts)
    return readings([("loss", _loss(curves)), ("added", _loss(curves, added=True))])


def _loss(curves: Sequence[RemovalCurve], added: bool = False) -> go.Figure | None:
    """Losses over the number of removed blocks, or (`added`) their increase over the unmodified model's."""
    traces: list[Any] = []
    shapes: list[dict[str, Any]] = []
    texts: list[str] = []
    single = sum(bool(curve.mean) for curve in curves) == 1
    pointed = sum(curve.healed is not None or curve.scalars_only is not None for curve in curves)
    for index, curve in enumerate(curves):
        style = categorical(index)
        name = _name(curve, single)
        mean, low, high = curve.added() if added else (curve.mean, curve.low, curve.high)
        if mean:
            traces += _with_band(mean, low, high, name, style)
            texts.append(_first_and_last(name, mean, added))
        base = _base(curve, curves)
        if added and base is None:
            continue
        color = CATEGORICAL[2] if single and pointed == 1 else style["color"]
        traces += _points(curve, (base or 0.0) if added else 0.0, color, pointed == 1)
        if curve.part is not None:
            lines, key = _break_point(curve.part, style["color"], single, name)
            shapes += lines
            traces += key
    if not any(trace.y is not None and trace.hoverinfo != "skip" for trace in traces):
        return None
    subtitle = "Above the unmodified model’s, on the same sequences" if added else "Mean over predicted tokens"
    return _over_removed(
        traces,
        subtitle,
        alt=" ".join(texts),
        yaxis=axis("Loss added (nats)" if added else "Loss (nats)"),
        variant="Added" if added else "Loss",
        shapes=shapes,
        showlegend=True,
        height=420,
    )


def _with_band(
    mean: Curve, low: Curve, high: Curve, name: str, style: dict[str, str], form: str = ".4f"
) -> list[go.Scatter]:
    """A line and its band; the subtitle explains the band, so it has no entry in the legend."""
    behind = band(low, high, f"{name}, 95 %", style["color"], form)
    for trace in behind:
        trace.update(showlegend=False, legendgroup=None)
    return [*behind, line(mean, name, style["color"], style["dash"], form)]


def _over_removed(traces: Sequence[go.Scatter], subtitle: str, **settings: Any) -> go.Figure:
    """A figure over the number of removed blocks."""
    largest = max((int(x) for trace in traces for x in trace.x if x is not None), default=0)
    return figure(
        traces,
        subtitle=f"{subtitle}. {BAND}" if any(trace.fill for trace in traces) else subtitle,
        xaxis=removed_axis(max(largest, 1)),
        legend={"traceorder": "normal"},
        **settings,
    )


def _name(curve: RemovalCurve, single: bool) -> str:
    named = not single and curve.removal.names
    return f"{label(curve.removal.name, 40)}, not healed" if named else "Not healed"


def _points(curve: RemovalCurve, base: float, color: str, single: bool) -> list[go.Scatter]:
    """Marks of the healed loss and the control."""
    suffix = "" if single or not curve.removal.name else f" ({label(curve.removal.name, 40)})"
    return [
        go.Scatter(
            x=[removed],
            y=[value - base],
            name=name + suffix,
            mode="markers",
            marker={"color": color, "size": 11, **mark},
            hovertemplate="%{y:.4f}",
        )
        for value, removed, name, mark in (
            (curve.healed, len(curve.removal.blocks), "Healed", {"symbol": "diamond"}),
            (curve.scalars_only, 0, "Control: scalars only", {"symbol": "circle-open", "line": {"width": 2}}),
        )
        if value is not None
    ]


def _break_point(part: Part, color: str, single: bool, name: str) -> tuple[list[dict[str, Any]], list[go.Scatter]]:
    """The break point as a line with its interval, and its entry in the legend."""
    rows = select(part.table, "break_point").drop_duplicates("statistic", keep="last").set_index("statistic")["value"]
    at, low, high = (number(rows.get(key)) for key in ("value", "low", "high"))
    if at is None:
        return [], []
    across = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    shapes: list[dict[str, Any]] = []
    text = f"Break point: {at:.0f}"
    if low is not None and high is not None:
        text += f" (95 %: {low:.0f} to {high:.0f})"
        if high > low:
            fill = translucent(CATEGORICAL[4])
            shapes.append({"type": "rect", "x0": low, "x1": high, "fillcolor": fill, "line": {"width": 0}, **across})
    stroke = {"color": INK if single else color, "width": 1.5, "dash": "dot"}
    shapes.append({"type": "line", "x0": at, "x1": at, "line": stroke, **across})
    return shapes, [legend_entry(text if single else f"{text}, {name}", "lines", line=stroke)]


def _first_and_last(name: str, mean: Curve, added: bool) -> str:
    points = [(count, value) for count, value in zip(mean.layers, mean.values, strict=True) if value is not None]
    (first, start), (last, end) = points[0], points[-1]
    form = "+.4f" if added else ".4f"
    return f"{name}: {minus(start, form)} nats with {first} removed, {minus(end, form)} with {last}."


def _steps(source: Source) -> Figures:
    """A figure for each set of blocks: the loss that each removal added."""
    complete = [removal for removal in removals(source.parts) if None not in removal.added]
    return {str(at) if at else "": _step_bars(removal, len(complete) == 1) for at, removal in enumerate(complete)}


def _step_bars(removal: Removal, alone: bool) -> go.Figure:
    """Bars in the order of removal, each under the number of its layer."""
    orders = list(range(1, len(removal.blocks) + 1))
    added = [value or 0.0 for value in removal.added]
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
                customdata=[[block, loss] for block, loss in zip(removal.blocks, removal.losses[1:], strict=True)],
                name="Loss added",
                marker={"color": colors, "line": {"width": 0}},
                hovertemplate="Number %{x}: layer %{customdata[0]}<br><b>%{y:+.4f}</b> nats, then "
                "%{customdata[1]:.4f}<extra></extra>",
            )
        ],
        alt=f"All {len(orders)} together: {minus(total, '+.4f')} nats. "
        f"Most came with layer {removal.blocks[order - 1]}: {minus(worst, '+.4f')}.",
        xaxis=axis(
            "Layer, in the order of removal",
            tickvals=ticks,
            ticktext=[str(removal.blocks[tick - 1]) for tick in ticks],
            range=[0.4, len(orders) + 0.6],
        ),
        yaxis=axis("Loss added (nats)", zeroline=True, zerolinecolor=INK, zerolinewidth=1),
        variant="" if alone else label(removal.names[0] if removal.names else what_went(removal), 48),
        hovermode="closest",
        bargap=0.4,
        height=420,
    )


def _predictions(
    source: Source, measure: str, subtitle: str, yaxis: dict[str, Any], form: str = ".4f"
) -> go.Figure | None:
    """A measure of the predictions of curves over the number of removed blocks."""
    drawn = [(part, curves) for part in source.parts if (curves := _with_range(part, measure))[0]]
    single, traces, texts = len(drawn) == 1, [], []
    for index, (part, (mean, low, high)) in enumerate(drawn):
        name = "Mean" if single else label(part.label, 40)
        traces += _with_band(mean, low, high, name, categorical(index), form)
        count, end = [pair for pair in zip(mean.layers, mean.values, strict=True) if pair[1] is not None][-1]
        texts.append(f"{'At the end' if single else name}: {minus(end or 0.0, form)} with {count} removed.")
    return _over_removed(traces, subtitle, alt=" ".join(texts), yaxis=yaxis, showlegend=not single) if drawn else None


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
                    "unmodified model’s, on the same tokens. The band is the 95 % interval over documents "
                    "(Student’s t)."
                ),
                formula=r"ℓ = − \frac{1}{N} ∑_n ln p(x_n | x_{< n})",
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
                    "spread of the documents, 5 % over all points, or a tolerance in nats) ends it. It is a kink if "
                    "the curve turns there by more than four times the mean of the turns just before; a curve that "
                    "bends smoothly has no break point. Later points have no influence. The interval holds 95 % of "
                    "the break points found on documents drawn again with replacement."
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
        lambda source: _predictions(
            source,
            "kl",
            "KL(unmodified ‖ modified) of the next token, mean over predicted tokens",
            axis("KL (nats)", **ZERO),
        ),
        (SKIP,),
        "Divergence from the unmodified model",
        methods=(
            Method(
                "KL divergence",
                ("kl",),
                (
                    "Of the next token’s distribution: p is the unmodified model’s, q the modified one’s; mean over "
                    "predicted tokens, in nats. 0 means that nothing has changed, whether or not the predictions were "
                    "right."
                ),
                formula=r"KL(p ‖ q) = ∑_v p(v) ln \frac{p(v)}{q(v)}",
            ),
        ),
    ),
    Figure(
        "greedy_agreement",
        "removal",
        lambda source: _predictions(
            source,
            "greedy_agreement",
            "Share of positions where the likeliest next token is still the unmodified model’s",
            axis("Agreement", tickformat=".0%"),
            ".2%",
        ),
        (SKIP,),
        "Greedy agreement",
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
