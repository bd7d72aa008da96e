"""Displacement of each layer, and jump rates."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from fulldepth.figures.curves import NO_FIRST, Curve, curve
from fulldepth.figures.draw import Line, band, first_line, logarithmic, of_layers, over_layers, set_first_apart
from fulldepth.figures.record import Figure, Method, Quantity, Source
from fulldepth.figures.style import CATEGORICAL, ZERO, Figures, axis
from fulldepth.thresholds import LARGE_JUMP

SUBTITLE = "0 = keeps the direction, ½ = orthogonal, 1 = opposite"
FIRST_SCREEN = 310
"""Height in pixels of the figures that the page shows without scrolling."""
SAME = 0.1
"""Largest relative difference of the means with and without first tokens of which only one is drawn."""
DIAMOND = {"mode": "markers", "marker": {"symbol": "diamond-open", "size": 10, "line": {"width": 2}}}
LINES = (
    Line("displacement", "Mean"),
    Line("displacement", "Mean without first token", "mean" + NO_FIRST, color=CATEGORICAL[1], dash="dash"),
    Line("displacement", "Last layer after the final norm", site="final_normed", color=CATEGORICAL[3], trace=DIAMOND),
)
PERCENT = axis("ζ (%)", **ZERO, ticksuffix=" %")


MEANS = tuple(line.name for line in LINES[:2])


def _displacement(source: Source) -> Figures:
    """Layers 2 to L if layer 1 would flatten them, and all layers on a logarithmic scale."""
    means = LINES[:1] if _alike(*(line.curve(source.table) for line in LINES[:2])) else LINES[:2]
    drawn, logarithm = _drawn(source, means), _drawn(source, LINES)
    if drawn is None or logarithm is None:
        return {} if logarithm is None else {"": logarithm}
    values = [value for trace in logarithm.data for value in trace.y]
    if min((value for value in values if value is not None), default=0) <= 0:
        return {"": logarithm}
    drawn = set_first_apart(drawn, MEANS)
    apart = "apart" in drawn.layout.meta
    logarithm.update_layout(yaxis=logarithmic(values, "Displacement Ψ (log scale)"))
    drawn.layout.meta["variant"] = f"Layers 2 to {source.layers}" if apart else "Linear"
    logarithm.layout.meta["variant"] = "All layers, log scale" if apart else "Log scale"
    return {"": drawn, "log": logarithm}


def _drawn(source: Source, lines: Sequence[Line]) -> go.Figure | None:
    low, high = (curve(source.table, "displacement", statistic) for statistic in ("p05", "p95"))
    return over_layers(
        source.table,
        source.layers,
        lines,
        behind=band(low, high, "p05–p95", CATEGORICAL[0]),
        alt=first_line("Mean displacement"),
        yaxis=axis("Displacement Ψ", **ZERO),
        height=FIRST_SCREEN,
    )


def _alike(first: Curve, second: Curve) -> bool:
    """Whether two curves differ by at most `SAME` everywhere."""
    pairs = list(zip(first.values, second.values, strict=False))
    return len(first.values) == len(second.values) and all(
        one is not None and other is not None and abs(one - other) <= SAME * abs(one) for one, other in pairs
    )


PER_LAYER = (Quantity("displacement", "mean", "Displacement", "Displacement Ψ"),)
FIGURES = (
    Figure(
        "displacement",
        "displacement",
        _displacement,
        title="Displacement per layer",
        subtitle=SUBTITLE,
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
            height=FIRST_SCREEN,
        ),
        title="Jump rate from each layer on",
        subtitle=f"Growth up to the last layer; large from {LARGE_JUMP:g} % (dotted)",
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
