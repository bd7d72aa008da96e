"""How far each layer turns the residual stream, and how much that grows over the last layers."""

from __future__ import annotations

import plotly.graph_objects as go

from fulldepth.figures.draw import band, bars, line
from fulldepth.figures.record import ZERO, Figure, Method, Quantity, Source
from fulldepth.figures.rows import NO_FIRST, curve
from fulldepth.figures.style import CATEGORICAL, MUTED, extremes, figure, layer_axis
from fulldepth.thresholds import LARGE_JUMP


def _displacement(source: Source) -> go.Figure | None:
    mean = curve(source.table, "displacement", "mean")
    normed = curve(source.table, "displacement", "mean", "final_normed")
    without = curve(source.table, "displacement", "mean" + NO_FIRST)
    low, high = curve(source.table, "displacement", "p05"), curve(source.table, "displacement", "p95")
    traces = []
    if low and high:
        traces += band(low, high, "p05–p95", CATEGORICAL[0])
    if mean:
        traces.append(line(mean, "Mean", CATEGORICAL[0]))
    if without:
        traces.append(line(without, "Mean without first token", CATEGORICAL[1], "dash"))
    if normed:
        last = line(normed, "Last layer after the final norm", CATEGORICAL[3])
        traces.append(last.update(mode="markers", marker={"symbol": "diamond-open", "size": 10, "line": {"width": 2}}))
    if not traces:
        return None
    return figure(
        traces,
        alt=extremes("Mean displacement", mean.layers, mean.values),
        xaxis=layer_axis(source.layers),
        yaxis={"title": {"text": "Displacement Ψ"}, "rangemode": "tozero"},
    )


def _jump_rate(source: Source) -> go.Figure | None:
    rate = curve(source.table, "jump_rate", "value")
    if not rate:
        return None
    drawn = figure(
        [bars(rate, "ζ", CATEGORICAL[0], ".2f")],
        alt=extremes("Jump rate in per cent", rate.layers, rate.values, ".1f"),
        xaxis=layer_axis(source.layers),
        yaxis={"title": {"text": "ζ (%)"}, "rangemode": "tozero", "ticksuffix": " %"},
    )
    drawn.add_hline(LARGE_JUMP, line={"color": MUTED, "dash": "dot", "width": 1})
    return drawn


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
                formula=(
                    "<msub><mi>Ψ</mi><mi>l</mi></msub><mo>=</mo><mn>1</mn><mo>−</mo><mfrac><mrow><mn>1</mn><mo>+</mo>"
                    "<mi>cos</mi><mo>(</mo><msub><mi>h</mi><mrow><mi>l</mi><mo>−</mo><mn>1</mn></mrow></msub><mo>,</mo>"
                    "<msub><mi>h</mi><mi>l</mi></msub><mo>)</mo></mrow><mn>2</mn></mfrac>"
                ),
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
        _jump_rate,
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
                formula=(
                    "<msub><mi>ζ</mi><mi>l</mi></msub><mo>=</mo><mn>100</mn><munderover><mo>∑</mo><mrow><mi>k</mi>"
                    "<mo>=</mo><mi>l</mi></mrow><mi>L</mi></munderover><mi>max</mi><mo>(</mo><mn>0</mn><mo>,</mo><msub>"
                    "<mover><mi>Ψ</mi><mo>¯</mo></mover><mi>k</mi></msub><mo>−</mo><msub><mover><mi>Ψ</mi><mo>¯</mo>"
                    "</mover><mrow><mi>k</mi><mo>−</mo><mn>1</mn></mrow></msub><mo>)</mo>"
                ),
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
