"""How far a layer's output is a linear image of its input, channel by channel and frequency by frequency."""

from __future__ import annotations

import plotly.graph_objects as go

from fulldepth.figures.draw import bars, line, shade_key
from fulldepth.figures.record import Figure, Method, Quantity, Source, readings
from fulldepth.figures.rows import curve
from fulldepth.figures.style import CATEGORICAL, SEQUENTIAL, extremes, figure, layer_axis

SITES = {"residual": "Whole layer", "attention": "Attention sub-layer"}
BINS = 10


def _means(source: Source) -> go.Figure | None:
    traces = []
    for index, (site, name) in enumerate(SITES.items()):
        for statistic, tail, dash in (("mean", "", "solid"), ("mean_corrected", ", bias-corrected", "dot")):
            if found := curve(source.table, "coherence", statistic, site):
                traces.append(line(found, name + tail, CATEGORICAL[index], dash))
    if not traces:
        return None
    shown = curve(source.table, "coherence", "mean") or curve(source.table, "coherence", "mean", "attention")
    return figure(
        traces,
        alt=extremes("Mean coherence", shown.layers, shown.values, ".2f"),
        xaxis=layer_axis(source.layers),
        yaxis={"title": {"text": "Coherence"}, "range": [0, 1.04]},
    )


def _effective(source: Source) -> go.Figure | None:
    curves = {name: curve(source.table, "coherence", "share_0.3_0.7", site) for site, name in SITES.items()}
    traces = [
        line(found, name, CATEGORICAL[index], form=".1%") for index, (name, found) in enumerate(curves.items()) if found
    ]
    if not traces:
        return None
    shown = next(found for found in curves.values() if found)
    return figure(
        traces,
        alt=extremes("Share of effective cells", shown.layers, shown.values, ".1%"),
        xaxis=layer_axis(source.layers),
        yaxis={"title": {"text": "Share of cells"}, "rangemode": "tozero", "tickformat": ".0%"},
    )


def _bins(source: Source, site: str) -> go.Figure | None:
    stacked = [(index, curve(source.table, "coherence", f"bin_{index}", site)) for index in range(BINS)]
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
        alt=extremes("Share of cells above 0.9", top.layers, top.values, ".0%"),
        xaxis=layer_axis(source.layers),
        yaxis={"title": {"text": "Share of cells"}, "range": [0, 1], "tickformat": ".0%"},
        variant=SITES[site],
        showlegend=False,
        barmode="stack",
        bargap=0.15,
    )


UNIT = {"range": [0, 1.04]}
FIGURES = (
    Figure(
        "coherence",
        "coherence",
        _means,
        title="Coherence per layer",
        subtitle="1 = the layer copies, 0 = unrelated; mean over channels and frequencies",
        methods=(
            Method(
                "Coherence",
                ("coherence",),
                (
                    "Each channel is standardised along the sequence, turned into a distribution over positions by a "
                    "softmax, and Fourier transformed; S are spectra averaged over sequences. Near 1 the layer "
                    "copies, near 0 its output is unrelated to its input; cells between 0.3 and 0.7 count as "
                    "effective. The value is biased up by about one over the number of sequences; the corrected "
                    "reading takes that out."
                ),
                formula=(
                    "<msup><mi>γ</mi><mn>2</mn></msup><mo>(</mo><mi>d</mi><mo>,</mo><mi>k</mi><mo>)</mo><mo>=</mo>"
                    "<mfrac><msup><mrow><mo>|</mo><msub><mi>S</mi><mrow><mi>x</mi><mi>y</mi></mrow></msub><mo>(</mo>"
                    "<mi>d</mi><mo>,</mo><mi>k</mi><mo>)</mo><mo>|</mo></mrow><mn>2</mn></msup><mrow><msub><mi>S</mi>"
                    "<mrow><mi>x</mi><mi>x</mi></mrow></msub><mo>(</mo><mi>d</mi><mo>,</mo><mi>k</mi><mo>)</mo>"
                    '<mspace width="0.2em"></mspace><msub><mi>S</mi><mrow><mi>y</mi><mi>y</mi></mrow></msub>'
                    "<mo>(</mo><mi>d</mi><mo>,</mo><mi>k</mi><mo>)</mo></mrow></mfrac>"
                ),
                source="<cite>CR-Guided Transformers</cite>, Sec. 3.1 and App. A.3.",
            ),
        ),
        curves=(
            Quantity("coherence", "mean", "Coherence", "Coherence", settings=UNIT, variant=SITES["residual"]),
            Quantity(
                "coherence",
                "mean",
                "Coherence",
                "Coherence",
                site="attention",
                settings=UNIT,
                key="attention",
                variant=SITES["attention"],
            ),
        ),
        followed=True,
    ),
    Figure(
        "coherence_effective",
        "coherence",
        _effective,
        title="Share of effective cells",
        subtitle="Channel-frequency cells with a coherence between 0.3 and 0.7",
    ),
    Figure(
        "coherence_bins",
        "coherence",
        lambda source: readings((site, _bins(source, site)) for site in SITES),
        title="Distribution of coherence",
        subtitle="Share of channel-frequency cells by coherence, the stronger the closer to a copy",
    ),
)
