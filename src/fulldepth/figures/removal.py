"""Removal of blocks: loss added, divergence and agreement by number of blocks, states, quality against time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, counted, number, select
from fulldepth.figures.draw import Line, band, each_line, error_bars, legend_entry, line, marked_layers, over_layers
from fulldepth.figures.record import SKIP, Figure, Method, Source, readings
from fulldepth.figures.skip_results import PHASES, Part, Removal, model_name, plans, removals
from fulldepth.figures.style import (
    CATEGORICAL,
    INK,
    ZERO,
    Figures,
    axis,
    categorical,
    figure,
    label,
    minus,
    translucent,
)

HOPSCOTCH = "<cite>Hopscotch: Discovering and Skipping Redundancies in Language Models</cite>, arXiv 2506.03303"
STATES = {"skipped": ("Skipped, not healed", CATEGORICAL[1]), "healed": ("Healed with scalars", CATEGORICAL[2])}


def by_removed(part: Part, measure: str, statistic: str = "mean") -> Curve:
    """A statistic of a curve by number of removed blocks, ascending."""
    if "removed" not in part.table.columns:
        return Curve([], [], [])
    rows = select(part.table, measure, statistic, "model").dropna(subset=["removed"])
    rows = rows.drop_duplicates("removed", keep="last").sort_values("removed")
    return Curve([int(n) for n in rows["removed"]], [*map(number, rows["value"])], [*map(counted, rows["count"])])


def _with_band(part: Part, measure: str, name: str, style: dict[str, str], form: str = ".4f") -> list[go.Scatter]:
    """A measure of a curve with its interval; the subtitle explains the band, so it has no entry in the legend."""
    mean, low, high = (by_removed(part, measure, statistic) for statistic in ("mean", "low", "high"))
    behind = band(low, high, f"{name}, 95 %", style["color"], form)
    for trace in behind:
        trace.update(showlegend=False, legendgroup=None)
    return [*behind, line(mean, name, style["color"], style["dash"], form)] if mean else []


def _over_removed(traces: Sequence[go.Scatter], subtitle: str, **settings: Any) -> go.Figure:
    """A figure over the number of removed blocks."""
    largest = max([1, *(int(x) for trace in traces for x in trace.x if x is not None)])
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if largest / s <= 13)
    margin = max(0.4, largest * 0.03)
    across = axis("Blocks removed", unifiedhovertitle={"text": "%{x} removed"}, dtick=step, tick0=0)
    return figure(
        traces,
        subtitle=f"{subtitle}. Band: 95 % interval over documents" if any(one.fill for one in traces) else subtitle,
        xaxis={**across, "range": [-margin, largest + margin]},
        legend={"traceorder": "normal"},
        height=420,
        **settings,
    )


def _losses(source: Source) -> go.Figure | None:
    """The loss that the first removals add together; healed and control as marks, the break point as a line."""
    known = [removal for removal in removals(source.parts) if removal.losses]
    drawn = [one for one in known if one.healed is not None or not any(_begins(one, other) for other in known)]
    traces: list[Any] = []
    shapes: list[dict[str, Any]] = []
    texts = []
    for index, removal in enumerate(drawn):
        style = categorical(index)
        several = f" ({label(removal.name, 40)})" if len(drawn) > 1 and removal.name else ""
        if not any(_begins(removal, other) for other in known):  # else a longer line contains the same points
            counts = list(range(len(removal.losses)))
            means = Curve(counts, [removal.added(loss) for loss in removal.losses], ["?"] * len(counts))
            paired = _with_band(removal.curve, "loss_added", f"Not healed{several}", style) if removal.curve else []
            traces += paired or [line(means, f"Not healed{several}", style["color"], style["dash"])]
            end = minus(removal.added(removal.losses[-1]) or 0.0, "+.4f")
            texts.append(f"{len(removal.blocks)} blocks removed{several}: {end} nats.")
        for name, loss, at, mark in (
            ("Healed", removal.healed, len(removal.blocks), {"symbol": "diamond"}),
            ("Control: scalars only", removal.scalars_only, 0, {"symbol": "circle-open", "line": {"width": 2}}),
        ):
            if loss is not None:
                marker = {"color": CATEGORICAL[2] if not several else style["color"], "size": 11, **mark}
                point = {"x": [at], "y": [removal.added(loss)], "mode": "markers", "marker": marker}
                traces.append(go.Scatter(name=name + several, hovertemplate="%{y:.4f}", **point))
        if removal.curve is not None:
            rows = select(removal.curve.table, "break_point").drop_duplicates("statistic").set_index("statistic")
            middle, low, high = (number(rows["value"].get(key)) for key in ("value", "low", "high"))
            if middle is not None:
                across = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
                stroke = {"color": INK, "width": 1.5, "dash": "dot"}
                box = {"fillcolor": translucent(CATEGORICAL[4]), "line": {"width": 0}}
                shapes += [{"type": "rect", "x0": low, "x1": high, **box, **across}] if low != high else []
                shapes.append({"type": "line", "x0": middle, "x1": middle, "line": stroke, **across})
                interval = "" if low is None else f" (95 %: {low:.0f} to {high:.0f})"
                traces.append(legend_entry(f"Break point: {middle:.0f}{interval}{several}", "lines", line=stroke))
    if not traces:
        return None
    settings = {"alt": " ".join(texts), "yaxis": axis("Loss added (nats)"), "shapes": shapes, "showlegend": True}
    return _over_removed(traces, "Above the unmodified model’s, on the same sequences", **settings)


def _begins(removal: Removal, other: Removal) -> bool:
    """Whether a longer removal has begun with the same blocks at the same losses."""
    size = len(removal.blocks)
    return (
        len(other.blocks) > size
        and other.granularity == removal.granularity
        and other.blocks[:size] == removal.blocks
        and all(abs(a - b) <= 1e-4 * abs(a) for a, b in zip(removal.losses, other.losses, strict=False))
    )


def _predictions(
    source: Source, measure: str, subtitle: str, yaxis: dict[str, Any], form: str = ".4f"
) -> go.Figure | None:
    """A measure of the predictions of curves over the number of removed blocks."""
    curves = [part for part in source.parts if by_removed(part, measure)]
    traces, texts = [], []
    for index, part in enumerate(curves):
        name = "Mean" if len(curves) == 1 else label(part.label, 40)
        traces += _with_band(part, measure, name, categorical(index), form)
        texts.append(f"{name} at the end: {minus(by_removed(part, measure).values[-1] or 0.0, form)}.")
    if not traces:
        return None
    return _over_removed(traces, subtitle, alt=" ".join(texts), yaxis=yaxis, showlegend=len(curves) > 1)


def _mmd(source: Source) -> Figures:
    """The distance of the states from the original's, a figure for each search."""
    searches = [part for part in source.parts if part.kind == "skip"]
    lines = [
        Line("mmd", name, "value", color=color, form=".4~g", state=state) for state, (name, color) in STATES.items()
    ]
    drawings = []
    for part in searches:
        blocks = {int(block) for _, plan in plans(part) for block in plan.get("blocks") or []}
        shapes, key = marked_layers(sorted(blocks), "Removed here")
        drawn = over_layers(
            part.table,
            source.layers,
            lines,
            alt=each_line(".3g"),
            yaxis=axis("MMD²", **ZERO),
            first=0,
            after=key,
            shapes=shapes,
            variant=label(part.label, 40) if len(searches) > 1 else "",
            height=420,
            showlegend=True,
        )
        drawings.append((part.label, drawn))
    return readings(drawings)


def _pareto(source: Source) -> Figures:
    """Loss added over time as a multiple of the original's, for decoding and for the prompt."""
    return readings((phase, _plane(source, phase)) for phase in reversed(PHASES))


def _plane(source: Source, phase: str) -> go.Figure | None:
    known = [one for one in source.timed if phase in one.times and None not in (one.loss, one.base)]
    originals = [one for one in known if one.baseline][:1]
    shown = [*originals, *(one for one in known if not one.baseline)]
    if len(shown) == len(originals):
        return None
    traces, texts = [], []
    for index, model in enumerate(shown):
        color, time = INK if model.baseline else categorical(index - 1)["color"], model.times[phase]
        added = (model.loss or 0.0) - (model.base or 0.0)
        reach = (
            {} if model.error is None else {"error_y": {"array": [2 * model.error], "color": color, "thickness": 1.2}}
        )
        traces.append(
            go.Scatter(
                x=[time.value],
                y=[added],
                customdata=[[time.low, time.high]],
                name=model_name(model),
                mode="markers",
                marker={"color": color, "size": 11, "symbol": "square" if model.baseline else "circle"},
                error_x=error_bars([time], color),
                hovertemplate="%{fullData.name}<br>%{x:.3f} (%{customdata[0]:.3f} to %{customdata[1]:.3f})<br>"
                "<b>%{y:+.4f}</b> nats<extra></extra>",
                **reach,
            )
        )
        texts.append(f"{model_name(model)}: {time.value:.2f} times, {minus(added, '+.3f')} nats")
    return figure(
        traces,
        alt="; ".join(texts),
        xaxis=axis(f"{phase.capitalize()} time over the original’s", tickformat=".2f"),
        yaxis=axis("Loss added to the original’s (nats)"),
        variant=phase.capitalize(),
        hovermode="closest",
        height=440,
        showlegend=True,
    )


FIGURES = (
    Figure(
        "removal_loss",
        "removal",
        _losses,
        (SKIP,),
        "Loss added by removing blocks",
        methods=(
            Method(
                "Loss",
                ("loss", "loss_added"),
                (
                    "Mean cross-entropy in nats (natural logarithms; one nat is 1.44 bits) over the predicted tokens: "
                    "those of the response for pairs of prompt and response, every token but a window’s first for "
                    "plain text. Added: the difference from the unmodified model’s, on the same tokens. The band is "
                    "the 95 % interval over documents (Student’s t)."
                ),
                formula=r"ℓ = − \frac{1}{N} ∑_n ln p(x_n | x_{< n})",
            ),
            Method(
                "Block removed",
                ("loss", "mmd", "prefill_time"),
                (
                    "The attention block (or the MLP, or the whole layer) is not computed and adds nothing; the "
                    "stream passes it by. Blocks are numbered from 1. In a greedy search every candidate is judged "
                    "again after each removal, by the held-out loss. “Not healed”: nothing else was changed. "
                    "“Healed”: scalars were fitted on the remaining blocks. “Control”: the same training of scalars "
                    "with nothing removed."
                ),
                source=f"{HOPSCOTCH}.",
            ),
            Method(
                "Break point",
                ("break_point",),
                (
                    "The last number of removed blocks up to which the loss grows along one straight line that ends "
                    "in a kink. A line is fitted to the first points; the first point outside its band (from the "
                    "spread of the documents, 5 % over all points) ends it. It is a kink if the curve turns there by "
                    "more than four times the mean of the turns just before; a curve that bends smoothly has no break "
                    "point. Later points have no influence. The interval holds 95 % of the break points found on "
                    "documents drawn again with replacement."
                ),
                source=f"{HOPSCOTCH} (break point, read off the curve); Efron 1979 (bootstrap).",
            ),
        ),
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
            "Share of predicted positions where the likeliest next token is still the unmodified model’s",
            axis("Agreement", tickformat=".0%"),
            ".2%",
        ),
        (SKIP,),
        "Greedy agreement",
    ),
    Figure(
        "mmd",
        "states",
        _mmd,
        (SKIP,),
        title="Distance from the original per layer",
        subtitle="Squared maximum mean discrepancy of the states after each layer, on held-out tokens",
        methods=(
            Method(
                "Maximum mean discrepancy",
                ("mmd",),
                (
                    "Distance between the states of the modified model and of the original after the same layer, on "
                    "the same held-out tokens, with a Gaussian kernel as wide as the median distance between points. "
                    "0 means that the two are distributed alike. Scalars that change the size of the stream raise it "
                    "even where the final norm takes that size away again."
                ),
                formula=r"MMD^2 = E \thin k(x, x^′) + E \thin k(y, y^′) − 2 E \thin k(x, y)",
                source=(
                    "Gretton et al., <cite>A Kernel Two-Sample Test</cite>, JMLR 13, 2012 (V-statistic); "
                    "<cite>Hopscotch</cite>, arXiv 2506.03303, analysis."
                ),
            ),
        ),
    ),
    Figure(
        "pareto",
        "pareto",
        _pareto,
        (SKIP,),
        "Quality against time",
        "Lower left is better. Bars: 95 % interval of the ratio of times, two standard errors of the loss",
        methods=(
            Method(
                "Time over the original’s",
                ("time_ratio", "prefill_time", "decode_time"),
                (
                    "Prefill is the pass over the prompt, decode that of one token with a cache. All models run in the "
                    "same rounds, in changing order. The ratio is the median of the rounds’ ratios, its 95 % interval "
                    "that of the order statistics, from 9 rounds on. An interval that holds 1 is no measurable "
                    "difference. Over the whole grid, a round’s time is the geometric mean over batches and contexts. "
                    "Times are not compared if other programs used more than 10 % of the processor."
                ),
                formula=r'r = median \thin \frac{t_"export"}{t_"original"}',
            ),
            Method(
                "Memory and size",
                ("peak_memory", "parameter_bytes", "kv_bytes_per_token"),
                (
                    "Peak memory counts weights and all tensors that live at once during a prompt and the tokens after "
                    "it. Weights count tied tensors once. The cache’s bytes are read off the cache itself after the "
                    "last token, per token and sequence."
                ),
            ),
        ),
    ),
)
