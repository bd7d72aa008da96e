"""Similarity of layers: maps of cosine and CKA over all pairs, cosine to the last layer, images against texts."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import NO_FIRST, curve, select
from fulldepth.figures.draw import Grid, Line, band, grid, heat, map_axis, over_layers
from fulldepth.figures.record import COMPARISON, SINGLE, Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import CATEGORICAL, Figures, axis, minus

SMALLEST = 0.05
"""Smallest range of the colours of differences, so that noise stays pale."""
TITLES = {"cosine": "Cosine similarity of layers", "cka": "Linear CKA of layers"}
READINGS = {
    "cosine": {
        "mean": ("Centred", "Mean over tokens, each layer centred by its mean state"),
        "mean_raw": ("Raw", "Mean over tokens, states as they are"),
    },
    "cka": {"debiased": ("Debiased", "Unbiased HSIC estimate")},
}
"""Measure -> statistic -> name of the variant and subtitle; the first is the default."""
PAIRS = {
    "matched": ("cosine", "Matched", "Mean cosine of an image and its own text, after the projections"),
    "mismatched": ("cosine", "Mismatched", "Mean cosine of an image and another image’s text, after the projections"),
    "image_to_text": ("retrieval", "Image to text", "Share of images whose nearest text is their own"),
    "text_to_image": ("retrieval", "Text to image", "Share of texts whose nearest image is their own"),
}
"""Statistic over an image layer and a text layer -> measure, name of the variant, subtitle."""


def _pairs(table: pd.DataFrame, measure: str, statistic: str, column: str = "value") -> Grid:
    """A statistic over all pairs of layers. A pair given in one order holds for both."""
    rows = select(table, measure, statistic, "residual").dropna(subset=["layer", "other"])
    both = pd.concat([rows.assign(layer=rows["other"], other=rows["layer"]), rows])
    return grid(both, both["layer"], both["other"], column)


def _map(cells: Grid, measure: str, **about: Any) -> go.Figure:
    """A square map; depth grows upwards and to the right."""
    side = map_axis("Layer", cells.columns[-1])
    settings = {"quantity": "cosine" if measure == "cosine" else "CKA", "low": -1 if measure == "cosine" else 0}
    return heat(
        cells,
        where="Layers %{y} and %{x}",
        xaxis=side,
        yaxis={**side, "scaleanchor": "x"},
        **{**settings, "high": 1, "title": TITLES[measure], **about},
    )


def _maps(source: Source, measure: str) -> Figures:
    """The map of one model in all variants, or those of all models side by side."""
    first, (_, subtitle) = next(iter(READINGS[measure].items()))
    if source.kind == COMPARISON:
        return {
            run.name: _map(cells, measure, subtitle=subtitle, alt=_neighbours(cells), variant=run.name, beside=True)
            for run in source.runs
            if (cells := _pairs(run.table, measure, first))
        }
    return readings(
        (
            statistic + suffix,
            _map(cells, measure, subtitle=subtitle, alt=_neighbours(cells), variant=reading + tail),
        )
        for suffix, tail in (("", ""), (NO_FIRST, ", no first token"))
        for statistic, (reading, subtitle) in READINGS[measure].items()
        if (cells := _pairs(source.table, measure, statistic + suffix))
    )


def _neighbours(cells: Grid) -> str:
    """Alternative text: similarity of neighbouring layers, and of the first and last layer."""
    adjacent = [value for at, row in enumerate(cells.values[:-1]) if (value := row[at + 1]) is not None]
    far = cells.values[0][-1]
    texts = (
        [f"Neighbouring layers: {minus(min(adjacent), '.2f')} to {minus(max(adjacent), '.2f')}."] if adjacent else []
    )
    return " ".join([*texts, *([] if far is None else [f"First against last: {minus(far, '.2f')}."])])


def _differences(source: Source, measure: str) -> Figures:
    """Difference maps of all other models from the baseline, with one colour scale."""
    statistic = next(iter(READINGS[measure]))
    maps = {run.name: _pairs(run.table, measure, statistic, "difference") for run in source.compared}
    largest = max((abs(value) for cells in maps.values() for value in cells.finite), default=0.0)
    extent = max(SMALLEST, math.ceil(100 * largest) / 100)
    return {
        name: _map(
            cells,
            measure,
            quantity="difference",
            low=-extent,
            high=extent,
            difference=True,
            title=f"{TITLES[measure]}: difference from the baseline",
            subtitle=f"Value minus the baseline’s at the same depth; the colours end at ±{extent:.2f}",
            variant=name,
            beside=True,
        )
        for name, cells in maps.items()
        if cells
    }


def _across(source: Source, statistic: str) -> go.Figure | None:
    """A statistic over image layers (rows) and text layers (columns)."""
    measure, variant, subtitle = PAIRS[statistic]
    rows = select(source.table, measure, statistic, "cross").dropna(subset=["layer", "other"])
    cells = grid(rows, rows["layer"], rows["other"])
    if not cells:
        return None
    return heat(
        cells,
        where="Image layer %{y}, text layer %{x}",
        quantity="cosine" if measure == "cosine" else "share",
        low=-1 if measure == "cosine" else 0,
        high=1,
        title="Images against texts",
        subtitle=subtitle,
        variant=variant,
        xaxis=map_axis("Text layer", cells.columns[-1]),
        yaxis=map_axis("Image layer", cells.rows[-1]),
    )


def _to_last(source: Source) -> go.Figure | None:
    low, high = (curve(source.table, "cosine", statistic, other=source.layers) for statistic in ("p25", "p75"))
    return over_layers(
        source.table,
        source.layers,
        [Line("cosine", "Centred, mean"), Line("cosine", "Raw, mean", "mean_raw", color=CATEGORICAL[1], dash="dash")],
        other=source.layers,
        behind=band(low, high, "p25–p75", CATEGORICAL[0]),
        first=0,
        yaxis=lambda values: axis("Cosine", range=[-1.04 if any(value and value < 0 for value in values) else 0, 1.04]),
    )


OF_PAIRS = (SINGLE, COMPARISON)
ACROSS = (
    Figure(
        "cross",
        "similarity",
        lambda source: readings((statistic, _across(source, statistic)) for statistic in PAIRS),
        methods=(
            Method(
                "Similarity across modalities",
                ("retrieval",),
                """Every layer’s image state and every layer’s text state go through the last norm and the projection
                of their tower, as the model does with the last ones. Matched pairs are an image and its own text;
                equal texts are one text. Retrieval takes the nearest text of each image and the reverse.""",
                r"C_{l m} = \frac{1}{N} ∑_n cos(v_n^l, t_n^m)",
                "Jiang et al., <cite>Tracing Representation Progression</cite>, App. D, Eq. 23.",
            ),
        ),
    ),
)
"""Figures across the towers of a model of images and texts."""
FIGURES = (
    Figure(
        "cosine",
        "similarity",
        lambda source: _maps(source, "cosine"),
        OF_PAIRS,
        methods=(
            Method(
                "Cosine similarity of layers",
                ("cosine",),
                """One token’s state at two layers, each layer centred by its mean over all tokens. The raw reading
                leaves the centring out; a direction that all tokens share then makes everything look alike.""",
                r"C_{l l^′} = \frac{1}{N} ∑_n cos(h_n^l − \bar{h}^l, h_n^{l^′} − \bar{h}^{l^′})",
                "Jiang et al., <cite>Tracing Representation Progression</cite>, Sec. 2.1.",
            ),
        ),
    ),
    Figure("difference_cosine", "similarity", lambda source: _differences(source, "cosine"), (COMPARISON,)),
    Figure(
        "cka",
        "similarity",
        lambda source: _maps(source, "cka"),
        OF_PAIRS,
        methods=(
            Method(
                "Linear CKA",
                ("cka",),
                """Whether two layers arrange the same tokens alike, up to rotation and scale. The table also holds
                the plain estimate, which is far too high unless tokens outnumber channels many times. A few outlying
                tokens drive CKA to one: read it without the first token.""",
                r"CKA(Z, Z^′) = \frac{{‖Z^{′ T} Z‖}_F^2}{{‖Z^T Z‖}_F {‖Z^{′ T} Z^′‖}_F}",
                """Jiang et al., <cite>Tracing Representation Progression</cite>, Eq. 3; debiased with the unbiased
                HSIC estimate.""",
            ),
        ),
    ),
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
    *ACROSS,
)
