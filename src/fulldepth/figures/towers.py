"""Similarity across the towers of a model of images and texts."""

from __future__ import annotations

import plotly.graph_objects as go

from fulldepth.figures.curves import Matrix, counted, number, select
from fulldepth.figures.draw import heat, map_ticks
from fulldepth.figures.record import Figure, Method, Source, readings
from fulldepth.figures.style import Figures, axis, minus

SHOWN = {
    "matched": ("cosine", "Matched", "Mean cosine of an image and its own text, after the projections"),
    "mismatched": ("cosine", "Mismatched", "Mean cosine of an image and another image’s text, after the projections"),
    "image_to_text": ("retrieval", "Image to text", "Share of images whose nearest text is their own"),
    "text_to_image": ("retrieval", "Text to image", "Share of texts whose nearest image is their own"),
}
"""Statistic -> measure, name of the variant, subtitle."""


def _maps(source: Source) -> Figures:
    """The maps of all statistics over image layers (rows) and text layers (columns)."""
    return readings((statistic, _map(source, statistic)) for statistic in SHOWN)


def _map(source: Source, statistic: str) -> go.Figure | None:
    measure, variant, subtitle = SHOWN[statistic]
    cells, others = _cells(source, measure, statistic)
    if not cells:
        return None
    signed = measure == "cosine"
    counts = sorted({count for row in cells.counts for count in row})
    corner = cells.values[-1][-1]
    name = "cosine" if signed else "share"
    return heat(
        {
            "x": others,
            "y": cells.layers,
            "z": cells.values,
            "zmin": -1 if signed else 0,
            "zmax": 1,
            "hovertemplate": f"Image layer %{{y}}, text layer %{{x}}<br>{name} <b>%{{z:.4f}}</b><br>"
            f"n = {', '.join(counts)}<extra></extra>",
        },
        signed=signed,
        alt=f"Last layers: {'?' if corner is None else minus(corner, '.2f')}.",
        title="Images against texts",
        subtitle=subtitle,
        variant=variant,
        xaxis={**axis("Text layer"), "constrain": "domain", **map_ticks(others[-1], first=0)},
        yaxis={**axis("Image layer"), "constrain": "domain", **map_ticks(cells.layers[-1], first=0)},
    )


def _cells(source: Source, measure: str, statistic: str) -> tuple[Matrix, list[int]]:
    """Values by image layer (rows) and text layer; the text layers."""
    rows = select(source.table, measure, statistic, "cross").dropna(subset=["layer", "other"])
    layers = sorted({int(layer) for layer in rows["layer"]})
    others = sorted({int(other) for other in rows["other"]})
    found = {
        (int(layer), int(other)): (number(value), counted(count))
        for layer, other, value, count in zip(rows["layer"], rows["other"], rows["value"], rows["count"], strict=True)
    }
    grid = [[found.get((layer, other), (None, "?")) for other in others] for layer in layers]
    values, counts = ([[cell[part] for cell in row] for row in grid] for part in (0, 1))
    return Matrix(layers, values, counts), others  # type: ignore[arg-type]


FIGURES = (
    Figure(
        "cross",
        "similarity",
        _maps,
        methods=(
            Method(
                "Similarity across modalities",
                ("retrieval",),
                (
                    "Every layer’s image state and every layer’s text state go through the last norm and the "
                    "projection of their tower, as the model does with the last ones. Matched pairs are an image and "
                    "its own text; equal texts are one text. Retrieval takes the nearest text of each image and the "
                    "reverse."
                ),
                formula=r"C_{l m} = \frac{1}{N} ∑_n cos(v_n^l, t_n^m)",
                source="Jiang et al., <cite>Tracing Representation Progression</cite>, App. D, Eq. 23.",
            ),
        ),
    ),
)
