"""Detection: average precision of every decoder layer."""

from __future__ import annotations

import plotly.graph_objects as go

from fulldepth.figures.draw import Line, each_line, over_layers
from fulldepth.figures.record import Figure, Method, Quantity, Source
from fulldepth.figures.style import CATEGORICAL, SHARE, ZERO, axis

PRECISIONS = (
    Line("average_precision", "AP50", "ap50", form=".1%"),
    Line("average_precision", "AP75", "ap75", color=CATEGORICAL[1], dash="dash", form=".1%"),
    Line("average_precision", "AP, IoU 0.5 to 0.95", "ap", color=CATEGORICAL[2], dash="dot", form=".1%"),
)


def _precision(source: Source) -> go.Figure | None:
    return over_layers(
        source.table, source.layers, PRECISIONS, alt=each_line(".1%"), yaxis=axis("Average precision", **SHARE)
    )


FIGURES = (
    Figure(
        "average_precision",
        "predictions",
        _precision,
        title="Average precision per decoder layer",
        subtitle="Each layer read by the model’s final norm, class head and box head; multi-exit models have own heads",
        methods=(
            Method(
                "Average precision",
                ("average_precision",),
                (
                    "Every query gives one detection: its most probable class, with that probability as score. A "
                    "detection is right if it overlaps a free object of its class by at least the threshold "
                    "(intersection over union). Precision is averaged over 101 points of recall and over the classes; "
                    "AP50 has the threshold 0.5, AP is the mean over 0.5, 0.55, …, 0.95. Boxes of all sizes count."
                ),
                source="Lin et al., <cite>Microsoft COCO</cite>, its evaluation code.",
            ),
        ),
        curves=(
            Quantity(
                "average_precision",
                "ap50",
                "Average precision (AP50)",
                "AP50",
                form=".1%",
                settings={**ZERO, "tickformat": ".0%"},
            ),
        ),
        followed=True,
    ),
)
