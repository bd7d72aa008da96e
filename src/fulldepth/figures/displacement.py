"""Displacement of each layer, and jump rates."""

from __future__ import annotations

import plotly.graph_objects as go

from fulldepth.figures.curves import NO_FIRST, curve
from fulldepth.figures.draw import Line, band, first_line, of_layers, over_layers
from fulldepth.figures.record import Figure, Method, Quantity, Source
from fulldepth.figures.style import CATEGORICAL, ZERO, axis
from fulldepth.thresholds import LARGE_JUMP

DIAMOND = {"mode": "markers", "marker": {"symbol": "diamond-open", "size": 10, "line": {"width": 2}}}
LINES = (
    Line("displacement", "Mean"),
    Line("displacement", "Mean without first token", "mean" + NO_FIRST, color=CATEGORICAL[1], dash="dash"),
    Line("displacement", "Last layer after the final norm", site="final_normed", color=CATEGORICAL[3], trace=DIAMOND),
)
PERCENT = axis("ζ (%)", **ZERO, ticksuffix=" %")


def _displacement(source: Source) -> go.Figure | None:
    low, high = (curve(source.table, "displacement", statistic) for statistic in ("p05", "p95"))
    return over_layers(
        source.table,
        source.layers,
        LINES,
        behind=band(low, high, "p05–p95", CATEGORICAL[0]),
        alt=first_line("Mean displacement"),
        yaxis=axis("Displacement Ψ", **ZERO),
    )


PER_LAYER = (Quantity("displacement", "mean", "Displacement", "Displacement Ψ"),)
FIGURES = (
    Figure(
        "displacement",
        "displacement",
        _displacement,
        title="Displacement per layer",
        subtitle="0 = the layer keeps the direction, ½ = orthogonal, 1 = opposite",
        methods=(
            Method(
                "Displacement Ψ",
                ("displacement",),
                (
                    "Per token, then averaged. 0 means that the layer keeps the direction of its input, ½ that its "
                    "output is orthogonal to it, 1 that it turns it around. A long run of values near zero is depth "
                    "that hardly works. The open diamond reads the last layer after the final norm, as some published "
                    "numbers do."
                ),
                formula=r"Ψ_l = 1 − \frac{1 + cos(h_{l − 1}, h_l)}{2}",
                source=(
                    "Shibata et al., <cite>Suppressing Final Layer Hidden State Jumps in Transformer "
                    "Pretraining</cite>, Eq. 2."
                ),
            ),
        ),
        curves=PER_LAYER,
        followed=True,
    ),
    Figure(
        "jump_rate",
        "displacement",
        of_layers(
            Line("jump_rate", "ζ", "value", form=".2f", bar=True),
            alt=first_line("Jump rate in per cent", ".1f"),
            yaxis=PERCENT,
            level=LARGE_JUMP,
        ),
        title="Jump rate from each layer on",
        subtitle="Accumulated growth of the mean displacement up to the last layer; "
        f"large from {LARGE_JUMP:g} % (dotted)",
        methods=(
            Method(
                "Jump rate ζ",
                ("jump_rate",),
                (
                    "In per cent. How much the mean displacement grows from layer l to the last; "
                    f"{LARGE_JUMP:g} % or more is a large jump: "
                    "work that piles up at the end instead of being spread over the depth."
                ),
                formula=r"ζ_l = 100 ∑_{k = l}^L max(0, \bar{Ψ}_k − \bar{Ψ}_{k − 1})",
                source=(
                    "Shibata et al., <cite>Suppressing Final Layer Hidden State Jumps in Transformer "
                    "Pretraining</cite>, Eq. 3."
                ),
            ),
        ),
        curves=(
            Quantity("jump_rate", "value", "Jump rate", "ζ (%)", form=".2f", settings={**ZERO, "ticksuffix": " %"}),
        ),
    ),
)
