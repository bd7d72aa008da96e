"""Coherence: how far a layer's output is a linear image of its input, per channel and frequency."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import curve
from fulldepth.figures.draw import Line, first_line, of_layers, over_layers, shade_key
from fulldepth.figures.record import Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import CATEGORICAL, SEQUENTIAL, ZERO, axis, extremes

SITES = {"residual": "Whole layer", "attention": "Attention sub-layer"}
BINS = 10


def _bins(source: Source, site: str) -> go.Figure | None:
    top = curve(source.table, "coherence", f"bin_{BINS - 1}", site)
    return over_layers(
        source.table,
        source.layers,
        [
            Line(
                "coherence",
                f"{index / BINS:.1f}–{(index + 1) / BINS:.1f}",
                f"bin_{index}",
                site,
                SEQUENTIAL[index + 1],
                form=".1%",
                bar=True,
            )
            for index in range(BINS)
        ],
        after=[shade_key("Coherence", SEQUENTIAL[1:], 0, 1, stepped=True)],
        alt=lambda _: extremes("Share of cells above 0.9", top.layers, top.values, ".0%"),
        yaxis=axis("Share of cells", range=[0, 1], tickformat=".0%"),
        variant=SITES[site],
        showlegend=False,
        barmode="stack",
        bargap=0.15,
    )


UNIT = {"range": [0, 1.04]}


def _statistic(table: pd.DataFrame) -> str:
    """The bias-corrected mean if the table has it: the raw mean of n sequences is biased upwards by about 1/n."""
    statistics = set(table.loc[table["measure"] == "coherence", "statistic"])
    return "mean_corrected" if "mean_corrected" in statistics else "mean"


def _means(source: Source) -> go.Figure | None:
    statistic = _statistic(source.table)
    return over_layers(
        source.table,
        source.layers,
        [
            Line("coherence", name, statistic, site, color)
            for color, (site, name) in zip(CATEGORICAL, SITES.items(), strict=False)
        ],
        alt=first_line("Mean coherence", ".2f"),
        yaxis=axis("Coherence", **UNIT),
    )


def _curves(table: pd.DataFrame) -> tuple[Quantity, ...]:
    statistic = _statistic(table)
    return tuple(
        Quantity("coherence", statistic, "Coherence", "Coherence", site, settings=UNIT, key=key, variant=name)
        for key, (site, name) in zip(("", "attention"), SITES.items(), strict=True)
    )


FIGURES = (
    Figure(
        "coherence",
        "coherence",
        _means,
        title="Coherence per layer",
        subtitle="1 = the layer copies, 0 = unrelated; mean over channels and frequencies, corrected for bias",
        methods=(
            Method(
                "Coherence",
                ("coherence",),
                (
                    "Each channel is standardised along the sequence, turned into a distribution over positions by a "
                    "softmax, and Fourier transformed; S are spectra averaged over sequences. Near 1 the layer "
                    "copies, near 0 its output is unrelated to its input; cells between 0.3 and 0.7 count as "
                    "effective. The estimate is biased up by about one over the number of sequences; the figures "
                    "show it corrected for that."
                ),
                formula=r"γ^2(d, k) = \frac{{|S_{x y}(d, k)|}^2}{S_{x x}(d, k) \space S_{y y}(d, k)}",
                source="<cite>CR-Guided Transformers</cite>, Sec. 3.1 and App. A.3.",
            ),
        ),
        curves=_curves,
        followed=True,
    ),
    Figure(
        "coherence_effective",
        "coherence",
        of_layers(
            *(
                Line("coherence", name, "share_0.3_0.7", site, color, form=".1%")
                for color, (site, name) in zip(CATEGORICAL, SITES.items(), strict=False)
            ),
            alt=first_line("Share of effective cells", ".1%"),
            yaxis=axis("Share of cells", **ZERO, tickformat=".0%"),
        ),
        title="Share of effective cells",
        subtitle="Channel-frequency cells with a coherence between 0.3 and 0.7",
    ),
    Figure(
        "coherence_bins",
        "coherence",
        lambda source: readings((site, _bins(source, site)) for site in SITES),
        title="Distribution of coherence",
        subtitle="Share of channel-frequency cells by coherence, the stronger the closer to a copy",
        secondary=True,
    ),
)
