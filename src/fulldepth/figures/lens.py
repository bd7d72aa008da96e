"""What the last layer's classifier reads at every layer: accuracy, loss, where predictions settle, effective depth."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import bars, line
from fulldepth.figures.record import COMPARISON, SHARE, ZERO, Figure, Method, Quantity, Source
from fulldepth.figures.rows import Curve, curve, number, select
from fulldepth.figures.style import CATEGORICAL, extremes, figure, label, layer_axis

TOLERANCES = {"eps=": "Accuracy ≥ 1 − ε", "relative_eps=": "Accuracy ≥ (1 − ε) of the last layer’s"}


def _accuracy(source: Source) -> go.Figure | None:
    accuracy = curve(source.table, "lens_accuracy", "mean")
    if not accuracy:
        return None
    return figure(
        [line(accuracy, "Accuracy", CATEGORICAL[0], form=".2%")],
        alt=extremes("Accuracy", accuracy.layers, accuracy.values, ".1%"),
        xaxis=layer_axis(source.layers, first=0),
        yaxis={"title": {"text": "Accuracy"}, "rangemode": "tozero", "tickformat": ".0%"},
    )


def _loss(source: Source) -> go.Figure | None:
    loss = curve(source.table, "lens_loss", "mean")
    if not loss:
        return None
    return figure(
        [line(loss, "Loss", CATEGORICAL[0])],
        alt=extremes("Cross-entropy in nats", loss.layers, loss.values, ".2f"),
        xaxis=layer_axis(source.layers, first=0),
        yaxis={"title": {"text": "Loss (nats)"}, "rangemode": "tozero"},
    )


def _saturation(source: Source) -> go.Figure | None:
    share = curve(source.table, "saturation", "share")
    cumulative = curve(source.table, "saturation", "cumulative")
    count = curve(source.table, "saturation", "count")
    traces: list[go.Bar | go.Scatter] = []
    if share:
        traces.append(bars(share, "Settle at this layer", CATEGORICAL[0], ".1%"))
        if count:
            exact = dict(zip(count.layers, count.values, strict=True))
            custom = [
                [name, f"{exact.get(layer) or 0:,.0f} of {positions}"]
                for layer, (name, positions) in zip(share.layers, share.custom, strict=True)
            ]
            traces[-1].update(customdata=custom, hovertemplate="%{y:.1%}  (%{customdata[1]})")
    if cumulative:
        traces.append(line(cumulative, "Settled so far", CATEGORICAL[1], form=".1%"))
    if not traces:
        return None
    half = median_layer(cumulative)
    return figure(
        traces,
        alt=extremes("Share of positions that settle", share.layers, share.values, ".1%")
        + (f" Half of all positions have settled by layer {half:.0f}." if half is not None else ""),
        xaxis=layer_axis(source.layers),
        yaxis={"title": {"text": "Share of positions"}, "range": [0, 1.04], "tickformat": ".0%"},
    )


def median_layer(cumulative: Curve) -> float | None:
    """First layer by which half of the positions have settled."""
    pairs = zip(cumulative.layers, cumulative.values, strict=True)
    return next((float(layer) for layer, share in pairs if share is not None and share >= 0.5), None)


def _effective_depth(source: Source) -> go.Figure | None:
    traces = []
    parts = []
    for color, (prefix, name) in zip(CATEGORICAL, TOLERANCES.items(), strict=False):
        depths = tolerances(source.table, prefix)
        if not depths:
            continue
        traces.append(
            go.Bar(
                x=[f"ε = {eps}" for eps in depths],
                y=list(depths.values()),
                name=name,
                marker={"color": color},
                hovertemplate=f"%{{y:.0f}} of {source.layers} layers",
            )
        )
        kind = "relative ε" if prefix.startswith("relative") else "ε"
        parts += [f"{depth:.0f} of {source.layers} at {kind} = {eps}" for eps, depth in depths.items()]
    if not traces:
        return None
    return figure(
        traces,
        alt=f"Layers needed: {', '.join(parts)}.",
        xaxis={"title": {"text": "Tolerance"}, "type": "category"},
        yaxis={"title": {"text": "Layers"}, "range": [0, source.layers * 1.05]},
        barmode="group",
    )


def _depth_of_models(source: Source) -> go.Figure | None:
    traces = []
    for run in source.runs:
        depths = {f"ε = {eps}": value for eps, value in tolerances(run.table, "eps=").items()}
        depths |= {f"relative ε = {eps}": value for eps, value in tolerances(run.table, "relative_eps=").items()}
        if depths:
            traces.append(
                go.Bar(
                    x=list(depths),
                    y=list(depths.values()),
                    name=run.name,
                    marker={"color": run.style["color"]},
                    hovertemplate=f"%{{y:.0f}} of {run.layers} layers",
                )
            )
    if not traces:
        return None
    return figure(
        traces,
        alt="; ".join(f"{trace.name}: {', '.join(f'{v:.0f}' for v in trace.y)} layers" for trace in traces) + ".",
        xaxis={"title": {"text": "Tolerance"}, "type": "category"},
        yaxis={"title": {"text": "Layers"}, "range": [0, max(run.layers for run in source.runs) * 1.05]},
        barmode="group",
        showlegend=True,
    )


def tolerances(table: pd.DataFrame, prefix: str) -> dict[str, float]:
    """Tolerance (as written, ascending) -> effective depth, of the statistics that start with `prefix`."""
    rows = select(table, "effective_depth")
    found = {}
    for statistic, value in zip(rows["statistic"], rows["value"], strict=True):
        depth = number(value)
        if str(statistic).startswith(prefix) and depth is not None:
            found[str(statistic).removeprefix(prefix)] = depth
    return {label(eps, 12): found[eps] for eps in sorted(found, key=_as_number)}


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")


PER_LAYER = Method(
    "Accuracy and loss per layer",
    ("lens_accuracy", "lens_loss"),
    (
        "The model’s own final norm and head applied to the state of every layer. Accuracy is the share of positions "
        "whose top prediction is the true token or class; loss is the cross-entropy in nats, that is, the loss of a "
        "model that stops at this layer. The last layer’s values are the model’s own."
    ),
    source="Jiang et al., <cite>Tracing Representation Progression</cite>, Eq. 2; Shibata et al., App. K.",
)
FIGURES = (
    Figure(
        "lens_accuracy",
        "predictions",
        _accuracy,
        title="Accuracy per layer",
        subtitle="Final norm and head applied to every layer; share of correct top predictions",
        methods=(PER_LAYER,),
        curves=(
            Quantity(
                "lens_accuracy", "mean", "Accuracy", "Accuracy", form=".2%", settings={**ZERO, "tickformat": ".0%"}
            ),
        ),
        followed=True,
    ),
    Figure(
        "lens_loss",
        "predictions",
        _loss,
        title="Loss per layer",
        subtitle="Cross-entropy if the model stopped at this layer",
        methods=(PER_LAYER,),
        curves=(Quantity("lens_loss", "mean", "Loss", "Loss (nats)"),),
        followed=True,
    ),
    Figure(
        "saturation",
        "predictions",
        _saturation,
        title="Where predictions settle",
        subtitle="First layer from which the top prediction never changes again",
        methods=(
            Method(
                "Saturation",
                ("saturation",),
                (
                    "The first layer from which a position’s top prediction stays what it is at the end, right or "
                    "wrong. Bars: share of positions that settle at each layer. Line: share that has settled so far."
                ),
                formula=(
                    "<msub><mi>s</mi><mi>n</mi></msub><mo>=</mo><mi>min</mi><mo>{</mo><mi>l</mi><mo>:</mo><mi>g</mi>"
                    "<mo>(</mo><msubsup><mi>h</mi><mi>n</mi><mi>l</mi></msubsup><mo>)</mo><mo>=</mo><mo>…</mo>"
                    "<mo>=</mo><mi>g</mi><mo>(</mo><msubsup><mi>h</mi><mi>n</mi><mi>L</mi></msubsup><mo>)</mo>"
                    "<mo>}</mo>"
                ),
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, Sec. 2.2.",
            ),
        ),
        curves=(
            Quantity(
                "saturation", "cumulative", "Settled predictions", "Share of positions", form=".1%", settings=SHARE
            ),
        ),
    ),
    Figure(
        "effective_depth",
        "predictions",
        _effective_depth,
        title="Effective depth",
        subtitle="First layer whose accuracy is good enough, for several tolerances",
        methods=(
            Method(
                "Effective depth",
                ("effective_depth",),
                (
                    "The first layer whose accuracy is at least 1 − ε; L if there is none. For models that are far "
                    "from perfect the relative reading says more: the first layer that reaches 1 − ε of the last "
                    "layer’s accuracy."
                ),
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, Def. 1.",
            ),
        ),
    ),
    Figure(
        "effective_depth",
        "predictions",
        _depth_of_models,
        kinds=(COMPARISON,),
        title="Effective depth",
        subtitle="First layer whose accuracy is good enough, for several tolerances",
    ),
)
