"""Healing: scalars per layer, distance of the states from the original's, and norms of the removed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, select
from fulldepth.figures.draw import Line, each_line, marked_layers, over_layers
from fulldepth.figures.record import SKIP, Figure, Method, Source, readings
from fulldepth.figures.skip_results import Part, Removal, planned
from fulldepth.figures.style import CATEGORICAL, ZERO, Figures, axis, categorical, label

SCALARS = (
    ("attention", "b", "b_att: what attention adds", CATEGORICAL[0], "solid"),
    ("attention", "s", "s_att: the stream past it", CATEGORICAL[0], "dot"),
    ("mlp", "b", "b_mlp: what the MLP adds", CATEGORICAL[1], "solid"),
    ("mlp", "s", "s_mlp: the stream past it", CATEGORICAL[1], "dot"),
)
"""Site, statistic, name, colour, dash."""
STATES = {"skipped": ("Skipped, not healed", CATEGORICAL[1]), "healed": ("Healed with scalars", CATEGORICAL[2])}
Drawings = Iterable[tuple[str, go.Figure | None]]
"""Key -> figure of one search."""


def _by_search(source: Source, draw: Callable[[Part, Removal | None, int, str], Drawings]) -> Figures:
    """The figures of each search; named after it if there are several."""
    searches = [part for part in source.parts if part.kind == "skip"]
    return readings(
        (f"{part.label}:{key}" if key else part.label, drawn)
        for part in searches
        for key, drawn in draw(part, planned(part), source.layers, label(part.label, 40) if len(searches) > 1 else "")
    )


def removed(removal: Removal | None) -> tuple[int, ...]:
    """The layers of a removal, in order of depth."""
    return () if removal is None else tuple(sorted(removal.blocks))


def _over_layers(*arguments: Any, removal: Removal | None, **settings: Any) -> go.Figure | None:
    """Lines over layers, with grey columns at layers with a removed block."""
    shapes, key = marked_layers(removed(removal), "Removed here")
    return over_layers(*arguments, shapes=shapes, after=key, height=420, showlegend=True, **settings)


def _scalars(part: Part, removal: Removal | None, layers: int, variant: str) -> Drawings:
    size = {"marker": {"size": 5 if layers <= 40 else 3}}
    lines = [
        Line("scalar", name, statistic, site, color, dash, spread=f"{statistic}_std", trace=size)
        for site, statistic, name, color, dash in SCALARS
    ]
    drawn = _over_layers(
        part.table,
        layers,
        lines,
        removal=removal,
        read=lambda values: with_gaps(values, layers),
        alt=each_line(name=lambda line: line.name.split(":")[0]),
        yaxis=axis("Factor"),
        variant=variant,
        level=1,
        dash="solid",
    )
    return [("", drawn)]


def with_gaps(values: Curve, layers: int) -> Curve:
    """The curve at every layer 1..L, with gaps at missing layers."""
    by_layer = dict(zip(values.layers, zip(values.values, values.counts, strict=True), strict=True))
    points = [by_layer.get(layer, (None, "?")) for layer in range(1, layers + 1)]
    return Curve(list(range(1, layers + 1)), [value for value, _ in points], [count for _, count in points])


def _mmd(part: Part, removal: Removal | None, layers: int, variant: str) -> Drawings:
    lines = [
        Line("mmd", name, "value", color=color, form=".4~g", state=state) for state, (name, color) in STATES.items()
    ]
    drawn = _over_layers(
        part.table,
        layers,
        lines,
        removal=removal,
        alt=each_line(".3g"),
        first=0,
        yaxis=axis("MMD²", **ZERO),
        variant=variant,
    )
    return [("", drawn)]


def groups(part: Part, removal: Removal | None) -> dict[str, list[str]]:
    """Kind of projection (`self_attn`, `mlp`) -> its projections; the removed kind comes first."""
    grouped: dict[str, list[str]] = {}
    for site in map(str, select(part.table, "spectral_norm")["site"].dropna().unique()):
        grouped.setdefault(site.rpartition(".")[0] or site, []).append(site)
    last = "mlp" if removal is None or removal.granularity != "mlp" else "att"
    return dict(sorted(grouped.items(), key=lambda item: last in item[0].lower()))


def _norms(part: Part, removal: Removal | None, layers: int, variant: str) -> Drawings:
    """A figure for each kind of projection."""
    grouped = groups(part, removal)
    for group, sites in grouped.items():
        lines = [
            Line(
                "spectral_norm", label(site.rpartition(".")[2], 36), "value", site, categorical(at)["color"], form=".3f"
            )
            for at, site in enumerate(sites)
        ]
        yield (
            group,
            _over_layers(
                part.table,
                layers,
                lines,
                removal=removal,
                alt=each_line(".2f"),
                yaxis=axis("‖W‖₂", **ZERO),
                variant=" · ".join(filter(None, [variant, label(group, 36) if len(grouped) > 1 else ""])),
            ),
        )


FIGURES = (
    Figure(
        "scalars",
        "healing",
        lambda source: _by_search(source, _scalars),
        (SKIP,),
        title="Scalars per layer",
        subtitle="As fitted; 1 leaves everything as it was. A gap: what it would scale is gone",
        methods=(
            Method(
                "Scalars b and s",
                ("scalar",),
                (
                    "A and M are a layer’s attention and MLP with their norms. The factors start at 1, are trained "
                    "alone with everything else frozen, and are folded into the weights afterwards. A layer without "
                    "its attention has the two of the MLP only. “Healed” is the model with blocks removed and scalars "
                    "fitted; the control has scalars fitted and nothing removed, and tells how much of the gain is "
                    "not healing."
                ),
                formula=r'x^′ = b_"att" A(x) + s_"att" x, \quad y = b_"mlp" M(x^′) + s_"mlp" x^′',
                source=(
                    "<cite>Hopscotch: Discovering and Skipping Redundancies in Language Models</cite>, arXiv "
                    "2506.03303."
                ),
            ),
        ),
    ),
    Figure(
        "mmd",
        "states",
        lambda source: _by_search(source, _mmd),
        (SKIP,),
        title="Distance from the original per layer",
        subtitle="Squared maximum mean discrepancy of the states after each layer, on held-out tokens",
        methods=(
            Method(
                "Maximum mean discrepancy",
                ("mmd",),
                (
                    "Distance between the states of the modified model and of the original after the same layer, on "
                    "the same held-out tokens, with a Gaussian kernel as wide as the median distance between points. "
                    "0 means that the two are distributed alike. Scalars that change the size of the stream raise it "
                    "even where the final norm takes that size away again."
                ),
                formula=r"MMD^2 = E \thin k(x, x^′) + E \thin k(y, y^′) − 2 E \thin k(x, y)",
                source=(
                    "Gretton et al., <cite>A Kernel Two-Sample Test</cite>, JMLR 13, 2012 (V-statistic); "
                    "<cite>Hopscotch</cite>, arXiv 2506.03303, analysis."
                ),
            ),
        ),
    ),
    Figure(
        "spectral_norm",
        "states",
        lambda source: _by_search(source, _norms),
        (SKIP,),
        "Spectral norm of the original’s projections",
        "Largest singular value of each weight matrix, skipped layers against kept ones",
        methods=(
            Method(
                "Spectral norm",
                ("spectral_norm",),
                (
                    "The largest singular value of a weight matrix: the most by which it can stretch its input. Of the "
                    "original’s weights, before anything was folded into them."
                ),
                source=(
                    "<cite>Hopscotch: Discovering and Skipping Redundancies in Language Models</cite>, arXiv "
                    "2506.03303, analysis."
                ),
            ),
        ),
    ),
)
