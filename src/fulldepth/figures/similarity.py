"""How alike the representations of two layers are: cosine and CKA over all pairs, cosine to the last layer."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.draw import band, heat, line
from fulldepth.figures.rows import NO_FIRST, Matrix, curve, matrix
from fulldepth.figures.style import CATEGORICAL, Figures, extremes, figure, layer_axis, minus

READINGS = {
    "cosine": {"mean": "Centred", "mean_raw": "Raw"},
    "cka": {"debiased": "Debiased", "biased": "Biased"},
}
"""Measure -> statistic -> what the reading is called; the first is the default."""
TITLES = {"cosine": "Cosine similarity of layers", "cka": "Linear CKA of layers"}
SUBTITLES = {
    "mean": "Mean over tokens, each layer centred by its mean state",
    "mean_raw": "Mean over tokens, states as they are",
    "debiased": "Unbiased HSIC estimate",
    "biased": "Plain estimate, biased up unless tokens far outnumber channels",
}


def figures(table: pd.DataFrame, layers: int) -> Figures:
    """`cosine`, `cosine_to_last`, `cka`; every further reading of a map as `name:statistic`."""
    made: Figures = {}
    for measure, readings in READINGS.items():
        for suffix, tail in (("", ""), (NO_FIRST, ", no first token")):
            for statistic, reading in readings.items():
                cells = matrix(table, measure, statistic + suffix)
                if cells:
                    name = f"{measure}:{statistic}{suffix}" if measure in made else measure
                    made[name] = similarity_map(cells, measure, statistic, variant=reading + tail)
        if measure == "cosine" and (drawn := _to_last(table, layers)) is not None:
            made["cosine_to_last"] = drawn
    return made


def similarity_map(cells: Matrix, measure: str, statistic: str, variant: str, beside: bool = False) -> go.Figure:
    """The map of one model, one reading."""
    return heat(
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
    """What the map says, from its first off-diagonal and its far corner."""
    adjacent = [row[index + 1] for index, row in enumerate(cells.values[:-1])]
    known = [value for value in adjacent if value is not None]
    corner = cells.values[0][-1]
    words = []
    if known:
        words.append(f"Neighbouring layers: {minus(min(known), '.2f')} to {minus(max(known), '.2f')}")
    if corner is not None:
        words.append(f"first against last: {minus(corner, '.2f')}")
    return "; ".join(words)[:1].upper() + "; ".join(words)[1:] + "."


def _to_last(table: pd.DataFrame, layers: int) -> go.Figure | None:
    mean = curve(table, "cosine", "mean", other=layers)
    raw = curve(table, "cosine", "mean_raw", other=layers)
    low, high = (curve(table, "cosine", statistic, other=layers) for statistic in ("p25", "p75"))
    traces = []
    if low and high:
        traces += band(low, high, "p25–p75", CATEGORICAL[0])
    if mean:
        traces.append(line(mean, "Centred, mean", CATEGORICAL[0]))
    if raw:
        traces.append(line(raw, "Raw, mean", CATEGORICAL[1], "dash"))
    if not traces:
        return None
    shown = mean if mean else raw
    return figure(
        traces,
        title="Cosine similarity to the last layer",
        subtitle="How much of the final representation is there already",
        alt=extremes("Mean cosine to the last layer", shown.layers, shown.values, ".2f"),
        xaxis=layer_axis(layers, first=0),
        yaxis={"title": {"text": "Cosine"}, "range": _cosine_range(low.values + mean.values + raw.values)},
    )


def _cosine_range(values: list[float | None]) -> list[float]:
    """[0, 1], or [-1, 1] as soon as something is negative."""
    return [-1.04, 1.04] if any(value is not None and value < 0 for value in values) else [0, 1.04]
