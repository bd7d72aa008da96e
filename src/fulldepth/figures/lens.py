"""Lens: accuracy and loss of the last layer's classifier at every layer, saturation, effective depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, curve, number, select
from fulldepth.figures.draw import Line, each_line, first_line, of_layers, over_layers, set_first_apart
from fulldepth.figures.record import COMPARISON, Figure, Method, Quantity, Source
from fulldepth.figures.style import CATEGORICAL, SHARE, ZERO, axis, extremes, figure, label

TOLERANCES = {
    "eps=": ("ε", "Accuracy ≥ 1 − ε"),
    "relative_eps=": ("relative ε", "Accuracy ≥ (1 − ε) of the last layer’s"),
}
"""Prefix of the statistic -> symbol, meaning."""
SATURATION = (
    Line("saturation", "Settle at this layer", "share", form=".1%", bar=True),
    Line("saturation", "Settled so far", "cumulative", color=CATEGORICAL[1], form=".1%"),
)

PROBES = (
    Line("probe_accuracy", "Linear probe, second set", form=".2%", spread="standard_error"),
    Line("lens_accuracy", "The model’s own head, measured data", color=CATEGORICAL[1], dash="dash", form=".2%"),
)


def _saturation(source: Source) -> go.Figure | None:
    share, cumulative = (line.curve(source.table) for line in SATURATION)
    half = median_layer(cumulative)
    settled = f" Half of all positions have settled by layer {half:.0f}." if half is not None else ""
    drawn = over_layers(
        source.table,
        source.layers,
        SATURATION,
        alt=lambda _: extremes("Share of positions that settle", share.layers, share.values, ".1%") + settled,
        yaxis=axis("Share of positions", **SHARE),
    )
    counts = curve(source.table, "saturation", "count")
    if share and counts and drawn is not None:
        exact = dict(zip(counts.layers, counts.values, strict=True))
        custom = [
            [name, f"{exact.get(layer) or 0:,.0f} of {positions}"]
            for layer, (name, positions) in zip(share.layers, share.custom, strict=True)
        ]
        drawn.data[0].update(customdata=custom, hovertemplate="%{y:.1%}  (%{customdata[1]})")
    return drawn


def _loss(source: Source) -> go.Figure | None:
    drawn = over_layers(
        source.table,
        source.layers,
        [Line("lens_loss", "Loss"), _after_attention("lens_loss")],
        alt=first_line("Cross-entropy in nats", ".2f"),
        yaxis=axis("Loss (nats)", **ZERO),
        first=0,
    )
    return drawn and set_first_apart(drawn, ["Loss"])


def _probes(source: Source) -> go.Figure | None:
    """Probes beside the model's own head; None without probes."""
    if not PROBES[0].curve(source.table):
        return None
    scale = axis("Accuracy", **ZERO, tickformat=".0%")
    return over_layers(source.table, source.layers, PROBES, alt=each_line(".1%"), yaxis=scale, first=0)


def _after_attention(measure: str, form: str = ".4f") -> Line:
    """The line of a lens that also reads between the attention and the MLP of every layer."""
    return Line(measure, "After attention", site="attention_output", color=CATEGORICAL[1], dash="dot", form=form)


def median_layer(cumulative: Curve) -> float | None:
    """First layer by which half of the positions have settled."""
    pairs = zip(cumulative.layers, cumulative.values, strict=True)
    return next((float(layer) for layer, share in pairs if share is not None and share >= 0.5), None)


def _effective_depth(source: Source) -> go.Figure | None:
    traces, texts = [], []
    for color, (prefix, (symbol, meaning)) in zip(CATEGORICAL, TOLERANCES.items(), strict=False):
        depths = tolerances(source.table, prefix)
        if all(depth >= source.layers for depth in depths.values()):
            continue  # L says only that no layer before the last is good enough
        bars = {f"ε = {eps}": depth for eps, depth in depths.items()}
        traces.append(_depth_bars(meaning, bars, color, source.layers))
        texts += [f"{depth:.0f} of {source.layers} at {symbol} = {eps}" for eps, depth in depths.items()]
    return _depths(traces, source.layers, f"Layers needed: {', '.join(texts)}.")


def _depth_of_models(source: Source) -> go.Figure | None:
    traces = []
    for run in source.runs:
        depths = {
            f"{symbol} = {eps}": depth
            for prefix, (symbol, _) in TOLERANCES.items()
            for eps, depth in tolerances(run.table, prefix).items()
        }
        traces.append(_depth_bars(run.name, depths, run.style["color"], run.layers))
    texts = [f"{trace.name}: {', '.join(f'{depth:.0f}' for depth in trace.y)} layers" for trace in traces if trace.y]
    return _depths(traces, max((run.layers for run in source.runs), default=1), "; ".join(texts) + ".", showlegend=True)


def _depth_bars(name: str, depths: Mapping[str, float], color: str, layers: int) -> go.Bar:
    return go.Bar(
        x=list(depths),
        y=list(depths.values()),
        name=name,
        marker={"color": color},
        hovertemplate=f"%{{y:.0f}} of {layers} layers",
    )


def _depths(traces: Sequence[go.Bar], layers: int, alt: str, **layout: Any) -> go.Figure | None:
    drawn = [trace for trace in traces if trace.y]
    if not drawn:
        return None
    return figure(
        drawn,
        alt=alt,
        xaxis=axis("Tolerance", type="category"),
        yaxis=axis("Layers", range=[0, layers * 1.05]),
        barmode="group",
        **layout,
    )


def tolerances(table: pd.DataFrame, prefix: str) -> dict[str, float]:
    """Tolerance (as written, ascending) -> effective depth, of the statistics that start with `prefix`."""
    rows = select(table, "effective_depth")
    depths = {}
    for statistic, value in zip(rows["statistic"], rows["value"], strict=True):
        depth = number(value)
        if str(statistic).startswith(prefix) and depth is not None:
            depths[str(statistic).removeprefix(prefix)] = depth
    return {label(eps, 12): depths[eps] for eps in sorted(depths, key=_as_number)}


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")


PER_LAYER = Method(
    "Accuracy and loss per layer",
    ("lens_accuracy", "lens_loss"),
    (
        "The model’s own final norm and head applied to the state of every layer; layers of a multi-exit model before "
        "the last are read by heads of their own. Accuracy is the share of positions whose top prediction is the true "
        "token or class; loss is the cross-entropy in nats, that is, the loss of a model that stops at this layer. The "
        "last layer’s values are the model’s own. “After attention”, if drawn, is the same in the middle of the layer, "
        "before its MLP is added."
    ),
    source="Jiang et al., <cite>Tracing Representation Progression</cite>, Eq. 2; Shibata et al., App. K.",
)
FIGURES = (
    Figure(
        "lens_accuracy",
        "predictions",
        of_layers(
            Line("lens_accuracy", "Accuracy", form=".2%"),
            _after_attention("lens_accuracy", ".2%"),
            alt=first_line("Accuracy", ".1%"),
            yaxis=axis("Accuracy", **ZERO, tickformat=".0%"),
            first=0,
        ),
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
        "probe_accuracy",
        "predictions",
        _probes,
        title="Linear probes per layer",
        subtitle="What a classifier fitted to each layer’s features gets right, beside the model’s own head",
        methods=(
            Method(
                "Linear probes",
                ("probe_accuracy",),
                (
                    "Logistic regression on the frozen features of each layer, fitted to the measured data and scored "
                    "on a second set: the mean over classes of the share that is right. The model’s own head is read "
                    "on the measured data. A probe far above it says that a layer holds the classes in directions "
                    "that the head does not read."
                ),
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, App. B.4.",
            ),
        ),
        curves=(
            Quantity(
                "probe_accuracy",
                "mean",
                "Linear probes",
                "Accuracy",
                form=".2%",
                settings={**ZERO, "tickformat": ".0%"},
            ),
        ),
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
        secondary=True,
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
                formula=r"s_n = min \{ l : g(h_n^l) = … = g(h_n^L) \}",
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
        secondary=True,
    ),
    Figure(
        "effective_depth",
        "predictions",
        _depth_of_models,
        kinds=(COMPARISON,),
        title="Effective depth",
        subtitle="First layer whose accuracy is good enough, for several tolerances",
        secondary=True,
    ),
)
