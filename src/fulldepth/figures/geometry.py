"""Norms, entropy, weights, classes: the geometry of the representations and of the projections."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import line
from fulldepth.figures.rows import NO_FIRST, Curve, curve, select
from fulldepth.figures.style import CATEGORICAL, MUTED, Figures, categorical, extremes, figure, label, layer_axis

SITES = {"residual": "Residual stream", "value": "Value states"}


def figures(table: pd.DataFrame, layers: int) -> Figures:
    """`norm_ratio`, `renyi_entropy` (one per preset), `spectral_norm`, `nc1`, `separability`, `mmd`."""
    made: Figures = {}
    if (drawn := _norm_ratio(table, layers)) is not None:
        made["norm_ratio"] = drawn
    for preset, drawn in _entropy(table, layers):
        made["renyi_entropy" if "renyi_entropy" not in made else f"renyi_entropy:{preset}"] = drawn
    for name, drawn in (
        ("spectral_norm", _spectral_norm(table, layers)),
        ("nc1", _nc1(table, layers)),
        ("separability", _separability(table, layers)),
        ("mmd", _mmd(table, layers)),
    ):
        if drawn is not None:
            made[name] = drawn
    return made


def logarithmic(values: list[float | None], title: str) -> dict[str, object]:
    """A log axis where every value is positive; else a linear one, so that nothing vanishes."""
    known = [value for value in values if value is not None]
    if min(known, default=0) <= 0:
        return {"title": {"text": title}, "rangemode": "tozero"}
    marks = (1, 2, 5) if max(known) / min(known) < 1e3 else (1,)
    ticks = [mark * 10.0**power for power in range(-12, 13) for mark in marks]
    return {"title": {"text": title}, "type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _norm_ratio(table: pd.DataFrame, layers: int) -> go.Figure | None:
    ratio, without = curve(table, "norm_ratio", "mean"), curve(table, "norm_ratio", "mean" + NO_FIRST)
    traces = [line(ratio, "All counted tokens", CATEGORICAL[0], form=".3f")] if ratio else []
    if without:
        traces.append(line(without, "Without first token", CATEGORICAL[1], "dash", form=".3f"))
    if not traces:
        return None
    drawn = figure(
        traces,
        title="Residual dominance per layer",
        subtitle="Norm of the incoming stream over the norm of what the layer adds (log scale)",
        alt=extremes("Norm ratio", ratio.layers, ratio.values, ".2f"),
        xaxis=layer_axis(layers),
        yaxis=logarithmic(ratio.values + without.values, "‖h‖ / ‖update‖"),
    )
    drawn.add_hline(1, line={"color": MUTED, "dash": "dot", "width": 1})
    return drawn


def _entropy(table: pd.DataFrame, layers: int) -> Iterator[tuple[str, go.Figure]]:
    statistics = [str(s).split(":") for s in select(table, "renyi_entropy")["statistic"].unique()]
    triples = [parts for parts in statistics if len(parts) == 3 and parts[0] == "mean"]
    for preset in dict.fromkeys(parts[1] for parts in triples):
        alphas = sorted({parts[2] for parts in triples if parts[1] == preset})
        found = {
            (site, alpha): curve(table, "renyi_entropy", f"mean:{preset}:{alpha}", site)
            for site in SITES
            for alpha in alphas
        }
        traces = [
            line(
                entropy,
                f"{SITES[site]}, α = {label(alpha, 8)}",
                CATEGORICAL[list(SITES).index(site)],
                categorical(6 * alphas.index(alpha))["dash"],
            )
            for (site, alpha), entropy in found.items()
            if entropy
        ]
        if not traces:
            continue
        shown = next(entropy for entropy in found.values() if entropy)
        yield (
            preset,
            figure(
                traces,
                title="Matrix entropy per layer",
                subtitle="Rényi entropy of a sequence’s Gram matrix; low = collapsed onto few directions",
                alt=extremes("Entropy in nats", shown.layers, shown.values, ".2f"),
                xaxis=layer_axis(layers, first=0),
                yaxis={"title": {"text": "Entropy (nats)"}, "rangemode": "tozero"},
                variant=f"Preset {label(preset, 24)}",
            ),
        )


def _spectral_norm(table: pd.DataFrame, layers: int) -> go.Figure | None:
    sites = [site for site in select(table, "spectral_norm")["site"].unique() if site is not None]
    norms = {site: curve(table, "spectral_norm", "value", site) for site in sites}
    norms |= {f"{site}, mean of experts": curve(table, "spectral_norm", "mean", site) for site in sites}
    norms = {site: norm for site, norm in norms.items() if norm}
    if not norms:
        return None
    traces = []
    for index, (site, norm) in enumerate(norms.items()):
        style = categorical(index)
        traces.append(line(norm, label(site, 48), style["color"], style["dash"], ".3f"))
    largest = max((max(v for v in norm.values if v is not None), site) for site, norm in norms.items())
    return figure(
        traces,
        title="Spectral norm per projection",
        subtitle="Largest singular value of each weight matrix",
        alt=f"{len(norms)} projections; the largest norm, {largest[0]:.2f}, is in {label(largest[1], 48)}.",
        xaxis=layer_axis(layers),
        yaxis={"title": {"text": "‖W‖₂"}, "rangemode": "tozero"},
        hoverlabel={"font": {"size": 11}},
        height=420,
    )


def _nc1(table: pd.DataFrame, layers: int) -> go.Figure | None:
    collapse = curve(table, "nc1", "value")
    if not collapse:
        return None
    return figure(
        [line(collapse, "NC1", CATEGORICAL[0], form=".3~g")],
        title="Class collapse per layer (NC1)",
        subtitle="Within-class over between-class spread; small = classes have collapsed to points (log scale)",
        alt=extremes("NC1", collapse.layers, collapse.values, ".3g"),
        xaxis=layer_axis(layers, first=0),
        yaxis=logarithmic(collapse.values, "NC1"),
    )


def _separability(table: pd.DataFrame, layers: int) -> go.Figure | None:
    traces = []
    shown: Curve | None = None
    for index, (site, name) in enumerate(SITES.items()):
        mean, spread = curve(table, "separability", "mean", site), curve(table, "separability", "std", site)
        if not mean:
            continue
        shown = shown or mean
        drawn = line(mean, name, CATEGORICAL[index], form=".1%")
        widths = dict(zip(spread.layers, spread.values, strict=True))
        if spread:
            heights = [widths.get(layer) or 0 for layer in mean.layers]
            drawn.error_y = {"array": heights, "color": CATEGORICAL[index], "thickness": 1.5, "width": 3}
        traces.append(drawn)
    if shown is None:
        return None
    return figure(
        traces,
        title="Linear separability of look-alike words",
        subtitle="Cross-validated accuracy of a logistic regression; bars: one standard deviation over folds",
        alt=extremes("Separability", shown.layers, shown.values, ".1%"),
        xaxis=layer_axis(layers, first=0),
        yaxis={"title": {"text": "Accuracy"}, "range": [0, 1.04], "tickformat": ".0%"},
    )


def _mmd(table: pd.DataFrame, layers: int) -> go.Figure | None:
    distance = curve(table, "mmd", "value")
    if not distance:
        return None
    return figure(
        [line(distance, "MMD²", CATEGORICAL[0], form=".4~g")],
        title="Distance from the reference model",
        subtitle="Squared maximum mean discrepancy of the hidden states, RBF kernel",
        alt=extremes("MMD²", distance.layers, distance.values, ".3g"),
        xaxis=layer_axis(layers, first=0),
        yaxis={"title": {"text": "MMD²"}, "rangemode": "tozero"},
    )
