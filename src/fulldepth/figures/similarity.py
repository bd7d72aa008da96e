"""Similarity of layers: cosine and CKA over all pairs, cosine to the last layer."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import NO_FIRST, Matrix, curve, matrix, number, select
from fulldepth.figures.draw import Line, band, first_line, layer_map, over_layers
from fulldepth.figures.record import COMPARISON, Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import CATEGORICAL, Figures, axis, figure, layer_axis, layer_name, minus

READINGS = {"cosine": {"mean": "Centred", "mean_raw": "Raw"}, "cka": {"debiased": "Debiased", "biased": "Biased"}}
"""Measure -> statistic -> name of the variant; the first is the default."""
SMALLEST = 0.05
"""Smallest range of the colours of differences, so that noise stays pale."""
TITLES = {"cosine": "Cosine similarity of layers", "cka": "Linear CKA of layers"}
SUBTITLES = {
    "mean": "Mean over tokens, each layer centred by its mean state",
    "mean_raw": "Mean over tokens, states as they are",
    "debiased": "Unbiased HSIC estimate",
    "biased": "Plain estimate, biased up unless tokens far outnumber channels",
}


def _readings(table: pd.DataFrame, measure: str) -> Figures:
    """The map of one model in all variants."""
    return readings(
        (statistic + suffix, similarity_map(cells, measure, statistic, variant=reading + tail))
        for suffix, tail in (("", ""), (NO_FIRST, ", no first token"))
        for statistic, reading in READINGS[measure].items()
        if (cells := matrix(table, measure, statistic + suffix))
    )


def _of_models(source: Source, measure: str) -> Figures:
    """The maps of all models, side by side."""
    statistic = next(iter(READINGS[measure]))
    return {
        run.name: similarity_map(cells, measure, statistic, run.name, beside=True)
        for run in source.runs
        if (cells := matrix(run.table, measure, statistic))
    }


def _differences(source: Source, measure: str) -> Figures:
    """Difference maps of all other models from the baseline, with one colour scale."""
    statistic = next(iter(READINGS[measure]))
    maps = {run.name: matrix(run.table, measure, statistic, "difference") for run in source.compared}
    extent = max([SMALLEST, *(_extent(cells) for cells in maps.values() if cells)])
    return {
        name: layer_map(
            cells,
            quantity="difference",
            signed=True,
            extent=extent,
            title=f"{TITLES[measure]}: difference from the baseline",
            subtitle=f"Value minus the baseline’s at the same depth; the colours end at ±{extent:.2f}",
            alt=_largest(cells),
            variant=name,
            beside=True,
        )
        for name, cells in maps.items()
        if cells
    }


def _extent(cells: Matrix) -> float:
    """The largest absolute value of a map, rounded up to two digits."""
    largest = max((abs(value) for row in cells.values for value in row if value is not None), default=0.0)
    return math.ceil(100 * largest) / 100


def _largest(cells: Matrix) -> str:
    """Where a difference map departs most from zero."""
    finite = [
        (abs(value), value, row, column)
        for row, values in zip(cells.layers, cells.values, strict=True)
        for column, value in zip(cells.layers, values, strict=True)
        if value is not None
    ]
    _, value, row, column = max(finite)
    pair = f"{layer_name(row).lower()} and {layer_name(column).lower()}"
    return f"Largest difference: {minus(value, '+.2f')}, between {pair}."


def similarity_map(cells: Matrix, measure: str, statistic: str, variant: str, beside: bool = False) -> go.Figure:
    """The map of one model in one variant."""
    return layer_map(
        cells,
        quantity="cosine" if measure == "cosine" else "CKA",
        signed=measure == "cosine",
        title=TITLES[measure],
        subtitle=SUBTITLES[statistic],
        alt=_neighbours(cells),
        variant=variant,
        beside=beside,
    )


def _neighbours(cells: Matrix) -> str:
    """Alternative text: similarity of neighbouring layers, and of the first and last layer."""
    adjacent = [row[index + 1] for index, row in enumerate(cells.values[:-1])]
    finite = [value for value in adjacent if value is not None]
    far_corner = cells.values[0][-1]
    texts = []
    if finite:
        texts.append(f"Neighbouring layers: {minus(min(finite), '.2f')} to {minus(max(finite), '.2f')}")
    if far_corner is not None:
        texts.append(f"first against last: {minus(far_corner, '.2f')}")
    return "; ".join(texts)[:1].upper() + "; ".join(texts)[1:] + "."


def _to_last(source: Source) -> go.Figure | None:
    low, high = (curve(source.table, "cosine", statistic, other=source.layers) for statistic in ("p25", "p75"))
    return over_layers(
        source.table,
        source.layers,
        [Line("cosine", "Centred, mean"), Line("cosine", "Raw, mean", "mean_raw", color=CATEGORICAL[1], dash="dash")],
        other=source.layers,
        behind=band(low, high, "p25–p75", CATEGORICAL[0]),
        alt=first_line("Mean cosine to the last layer", ".2f"),
        first=0,
        yaxis=_cosine_axis,
    )


def _spread(source: Source) -> go.Figure | None:
    """One box for each layer: the quantiles of the tokens' cosine to the last layer."""
    quantiles = {name: curve(source.table, "cosine", name, other=source.layers) for name in QUANTILES}
    if not all(quantiles.values()):
        return None
    boxes = go.Box(
        x=quantiles["p50"].layers,
        **{part: quantiles[name].values for name, part in QUANTILES.items()},
        line={"color": CATEGORICAL[0]},
        boxpoints=False,
        showlegend=False,
    )
    low, middle = (quantiles[name].values for name in ("p05", "p50"))
    negative = [layer for layer, value in zip(quantiles["p05"].layers, low, strict=True) if value and value < 0]
    first = middle[0]
    return figure(
        [boxes],
        alt=f"Median at layer {quantiles['p50'].layers[0]}: {'?' if first is None else minus(first, '.2f')}; "
        f"layers where the lowest 5 % are negative: {', '.join(map(str, negative)) or 'none'}.",
        xaxis=layer_axis(source.layers, first=0),
        yaxis=axis("Cosine", range=[-1.04 if negative else -0.04, 1.04]),
    )


def _relation(source: Source) -> go.Figure | None:
    """CKA against cosine, one point for every pair of layers."""
    pairs = cosine_and_cka(source.table)
    order = float(pairs["cosine"].rank().corr(pairs["cka"].rank()))
    if len(pairs) < FEWEST_PAIRS or not math.isfinite(order):
        return None
    points = go.Scatter(
        x=[number(value) for value in pairs["cosine"]],
        y=[number(value) for value in pairs["cka"]],
        mode="markers",
        marker={"color": CATEGORICAL[0], "size": 6, "opacity": 0.7},
        customdata=[[int(a), int(b)] for a, b in zip(pairs["layer"], pairs["other"], strict=True)],
        hovertemplate="Layers %{customdata[0]} and %{customdata[1]}<br>cosine <b>%{x:.4f}</b><br>CKA <b>%{y:.4f}</b>"
        "<extra></extra>",
        showlegend=False,
    )
    return figure(
        [points],
        alt=f"{len(pairs)} pairs; rank correlation (Spearman) {minus(order, '.2f')}.",
        xaxis=axis("Cosine"),
        yaxis=axis("CKA"),
    )


def cosine_and_cka(table: pd.DataFrame) -> pd.DataFrame:
    """Columns `layer`, `other`, `cosine` (centred) and `cka` (debiased) of every pair of different layers with both."""
    parts = []
    for measure, statistic in (("cosine", "mean"), ("cka", "debiased")):
        rows = select(table, measure, statistic, "residual").dropna(subset=["layer", "other", "value"])
        rows = rows[(rows["layer"] < rows["other"]).astype(bool)]
        parts.append(rows[["layer", "other", "value"]].rename(columns={"value": measure}))
    return parts[0].merge(parts[1], on=["layer", "other"])


def _cosine_axis(values: list[float | None]) -> dict[str, Any]:
    """From 0 to 1, or from -1 to 1 if a value is negative."""
    negative = any(value is not None and value < 0 for value in values)
    return axis("Cosine", range=[-1.04 if negative else 0, 1.04])


FEWEST_PAIRS = 3
"""Fewest pairs of layers that an order is stated for."""
QUANTILES = {"p05": "lowerfence", "p25": "q1", "p50": "median", "p75": "q3", "p95": "upperfence"}
"""Statistic -> part of a box."""
FIGURES = (
    Figure(
        "cosine",
        "similarity",
        lambda source: _readings(source.table, "cosine"),
        methods=(
            Method(
                "Cosine similarity of layers",
                ("cosine",),
                (
                    "One token’s state at two layers, each layer centred by its mean over all tokens. The raw reading "
                    "leaves the centring out; a direction that all tokens share then makes everything look alike."
                ),
                formula=r"C_{l l^′} = \frac{1}{N} ∑_n cos(h_n^l − \bar{h}^l, h_n^{l^′} − \bar{h}^{l^′})",
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, Sec. 2.1.",
            ),
        ),
    ),
    Figure("cosine", "similarity", lambda source: _of_models(source, "cosine"), (COMPARISON,)),
    Figure("difference_cosine", "similarity", lambda source: _differences(source, "cosine"), (COMPARISON,)),
    Figure(
        "cka",
        "similarity",
        lambda source: _readings(source.table, "cka"),
        methods=(
            Method(
                "Linear CKA",
                ("cka",),
                (
                    "Whether two layers arrange the same tokens alike, up to rotation and scale. The plain estimate is "
                    "far too high unless tokens outnumber channels many times, and a few outlying tokens drive it to "
                    "one: read the debiased one, without the first token."
                ),
                formula=r"CKA(Z, Z^′) = \frac{{‖Z^{′ T} Z‖}_F^2}{{‖Z^T Z‖}_F {‖Z^{′ T} Z^′‖}_F}",
                source=(
                    "Jiang et al., <cite>Tracing Representation Progression</cite>, Eq. 3; debiased with the unbiased "
                    "HSIC estimate."
                ),
            ),
        ),
    ),
    Figure("cka", "similarity", lambda source: _of_models(source, "cka"), (COMPARISON,), secondary=True),
    Figure("difference_cka", "similarity", lambda source: _differences(source, "cka"), (COMPARISON,), secondary=True),
    Figure(
        "cosine_to_last",
        "similarity",
        _to_last,
        title="Cosine similarity to the last layer",
        subtitle="How much of the final representation is there already",
        curves=(
            Quantity(
                "cosine",
                "mean",
                "Cosine similarity to the last layer",
                "Cosine",
                to_last=True,
                settings={"range": [-1.04, 1.04]},
            ),
        ),
        secondary=True,
    ),
    Figure(
        "cosine_spread",
        "similarity",
        _spread,
        title="Tokens’ cosine similarity to the last layer",
        subtitle="Boxes: quartiles over the sampled tokens; whiskers: 5 % and 95 %",
        secondary=True,
    ),
    Figure(
        "cosine_against_cka",
        "similarity",
        _relation,
        title="Cosine against CKA",
        subtitle="One point for each pair of layers; if the two agree, the points lie on a rising curve",
        methods=(
            Method(
                "Cosine and CKA",
                ("cka",),
                (
                    "Cosine compares the states of one token at two layers, CKA the arrangement of all tokens, "
                    "whatever its rotation. In residual networks the two put pairs of layers in the same order: they "
                    "agree up to a monotone map. Where features rotate, CKA stays high and cosine does not."
                ),
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, Sec. 2.1, Fig. 2.",
            ),
        ),
        secondary=True,
    ),
)
