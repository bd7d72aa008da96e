"""What the last layer's classifier reads at every layer: accuracy, loss, where predictions settle, effective depth."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import bars, line
from fulldepth.figures.rows import Curve, curve, number, select
from fulldepth.figures.style import CATEGORICAL, Figures, extremes, figure, label, layer_axis

TOLERANCES = {"eps=": "Accuracy ≥ 1 − ε", "relative_eps=": "Accuracy ≥ (1 − ε) of the last layer’s"}


def figures(table: pd.DataFrame, layers: int) -> Figures:
    """`lens_accuracy`, `lens_loss`, `saturation`, `effective_depth`."""
    made = {
        "lens_accuracy": _accuracy(table, layers),
        "lens_loss": _loss(table, layers),
        "saturation": _saturation(table, layers),
        "effective_depth": _effective_depth(table, layers),
    }
    return {name: drawn for name, drawn in made.items() if drawn is not None}


def _accuracy(table: pd.DataFrame, layers: int) -> go.Figure | None:
    accuracy = curve(table, "lens_accuracy", "mean")
    if not accuracy:
        return None
    return figure(
        [line(accuracy, "Accuracy", CATEGORICAL[0], form=".2%")],
        title="Accuracy per layer",
        subtitle="Final norm and head applied to every layer; share of correct top predictions",
        alt=extremes("Accuracy", accuracy.layers, accuracy.values, ".1%"),
        xaxis=layer_axis(layers, first=0),
        yaxis={"title": {"text": "Accuracy"}, "rangemode": "tozero", "tickformat": ".0%"},
    )


def _loss(table: pd.DataFrame, layers: int) -> go.Figure | None:
    loss = curve(table, "lens_loss", "mean")
    if not loss:
        return None
    return figure(
        [line(loss, "Loss", CATEGORICAL[0])],
        title="Loss per layer",
        subtitle="Cross-entropy if the model stopped at this layer",
        alt=extremes("Cross-entropy in nats", loss.layers, loss.values, ".2f"),
        xaxis=layer_axis(layers, first=0),
        yaxis={"title": {"text": "Loss (nats)"}, "rangemode": "tozero"},
    )


def _saturation(table: pd.DataFrame, layers: int) -> go.Figure | None:
    share = curve(table, "saturation", "share")
    cumulative = curve(table, "saturation", "cumulative")
    count = curve(table, "saturation", "count")
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
        title="Where predictions settle",
        subtitle="First layer from which the top prediction never changes again",
        alt=extremes("Share of positions that settle", share.layers, share.values, ".1%")
        + (f" Half of all positions have settled by layer {half:.0f}." if half is not None else ""),
        xaxis=layer_axis(layers),
        yaxis={"title": {"text": "Share of positions"}, "range": [0, 1.04], "tickformat": ".0%"},
    )


def median_layer(cumulative: Curve) -> float | None:
    """First layer by which half of the positions have settled."""
    pairs = zip(cumulative.layers, cumulative.values, strict=True)
    return next((float(layer) for layer, share in pairs if share is not None and share >= 0.5), None)


def _effective_depth(table: pd.DataFrame, layers: int) -> go.Figure | None:
    traces = []
    parts = []
    for color, (prefix, name) in zip(CATEGORICAL, TOLERANCES.items(), strict=False):
        depths = tolerances(table, prefix)
        if not depths:
            continue
        traces.append(
            go.Bar(
                x=[f"ε = {eps}" for eps in depths],
                y=list(depths.values()),
                name=name,
                marker={"color": color},
                hovertemplate=f"%{{y:.0f}} of {layers} layers",
            )
        )
        kind = "relative ε" if prefix.startswith("relative") else "ε"
        parts += [f"{depth:.0f} of {layers} at {kind} = {eps}" for eps, depth in depths.items()]
    if not traces:
        return None
    return figure(
        traces,
        title="Effective depth",
        subtitle="First layer whose accuracy is good enough, for several tolerances",
        alt=f"Layers needed: {', '.join(parts)}.",
        xaxis={"title": {"text": "Tolerance"}, "type": "category"},
        yaxis={"title": {"text": "Layers"}, "range": [0, layers * 1.05]},
        barmode="group",
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
