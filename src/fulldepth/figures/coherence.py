"""How far a layer's output is a linear image of its input, channel by channel and frequency by frequency."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import bars, line, shade_key
from fulldepth.figures.rows import curve
from fulldepth.figures.style import CATEGORICAL, SEQUENTIAL, Figures, extremes, figure, layer_axis

SITES = {"residual": "Whole layer", "attention": "Attention sub-layer"}
BINS = 10


def figures(table: pd.DataFrame, layers: int) -> Figures:
    """`coherence`, `coherence_effective`, and the stacked bins of each site."""
    made: Figures = {}
    for name, drawn in (("coherence", _means(table, layers)), ("coherence_effective", _effective(table, layers))):
        if drawn is not None:
            made[name] = drawn
    for site in SITES:
        if (drawn := _bins(table, layers, site)) is not None:
            made["coherence_bins" if "coherence_bins" not in made else f"coherence_bins:{site}"] = drawn
    return made


def _means(table: pd.DataFrame, layers: int) -> go.Figure | None:
    traces = []
    for index, (site, name) in enumerate(SITES.items()):
        for statistic, tail, dash in (("mean", "", "solid"), ("mean_corrected", ", bias-corrected", "dot")):
            if found := curve(table, "coherence", statistic, site):
                traces.append(line(found, name + tail, CATEGORICAL[index], dash))
    if not traces:
        return None
    shown = curve(table, "coherence", "mean") or curve(table, "coherence", "mean", "attention")
    return figure(
        traces,
        title="Coherence per layer",
        subtitle="1 = the layer copies, 0 = unrelated; mean over channels and frequencies",
        alt=extremes("Mean coherence", shown.layers, shown.values, ".2f"),
        xaxis=layer_axis(layers),
        yaxis={"title": {"text": "Coherence"}, "range": [0, 1.04]},
    )


def _effective(table: pd.DataFrame, layers: int) -> go.Figure | None:
    curves = {name: curve(table, "coherence", "share_0.3_0.7", site) for site, name in SITES.items()}
    traces = [
        line(found, name, CATEGORICAL[index], form=".1%") for index, (name, found) in enumerate(curves.items()) if found
    ]
    if not traces:
        return None
    shown = next(found for found in curves.values() if found)
    return figure(
        traces,
        title="Share of effective cells",
        subtitle="Channel-frequency cells with a coherence between 0.3 and 0.7",
        alt=extremes("Share of effective cells", shown.layers, shown.values, ".1%"),
        xaxis=layer_axis(layers),
        yaxis={"title": {"text": "Share of cells"}, "rangemode": "tozero", "tickformat": ".0%"},
    )


def _bins(table: pd.DataFrame, layers: int, site: str) -> go.Figure | None:
    stacked = [(index, curve(table, "coherence", f"bin_{index}", site)) for index in range(BINS)]
    traces = [
        bars(found, f"{index / BINS:.1f}–{(index + 1) / BINS:.1f}", SEQUENTIAL[index + 1], ".1%")
        for index, found in stacked
        if found
    ]
    if not traces:
        return None
    top = dict(stacked)[BINS - 1]
    return figure(
        [*traces, shade_key("Coherence", SEQUENTIAL[1:], 0, 1, stepped=True)],
        title="Distribution of coherence",
        subtitle="Share of channel-frequency cells by coherence, the stronger the closer to a copy",
        alt=extremes("Share of cells above 0.9", top.layers, top.values, ".0%"),
        xaxis=layer_axis(layers),
        yaxis={"title": {"text": "Share of cells"}, "range": [0, 1], "tickformat": ".0%"},
        variant=SITES[site],
        showlegend=False,
        barmode="stack",
        bargap=0.15,
    )
