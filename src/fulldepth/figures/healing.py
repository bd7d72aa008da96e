"""What healing did: scalars per layer, distance of the states from the original's, and the weights that went."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go

from fulldepth.figures.draw import line
from fulldepth.figures.record import SKIP, Figure, Method, Source, readings
from fulldepth.figures.rows import Curve, curve, select
from fulldepth.figures.skipped import Part, Removal, marked_layers, planned
from fulldepth.figures.style import (
    CATEGORICAL,
    GRID,
    MUTED,
    Figures,
    categorical,
    extremes,
    figure,
    label,
    layer_axis,
)

SCALARS = (
    ("attention", "b", "b_att: what attention adds", CATEGORICAL[0], "solid"),
    ("attention", "s", "s_att: the stream past it", CATEGORICAL[0], "dot"),
    ("mlp", "b", "b_mlp: what the MLP adds", CATEGORICAL[1], "solid"),
    ("mlp", "s", "s_mlp: the stream past it", CATEGORICAL[1], "dot"),
)
"""Site, statistic, name, colour, dash."""
STATES = {"skipped": ("Skipped, not healed", CATEGORICAL[1]), "healed": ("Healed with scalars", CATEGORICAL[2])}


def _searches(source: Source) -> list[tuple[Part, Removal | None, str]]:
    """(folder, its removal, its name where there are several) of every search."""
    every = [part for part in source.parts if part.kind == "skip"]
    return [(part, planned(part), label(part.label, 40) if len(every) > 1 else "") for part in every]


def _by_search(source: Source, draw: Callable[[Part, Removal | None, int, str], go.Figure | None]) -> Figures:
    """A figure for each search."""
    return readings(
        (part.label, draw(part, removal, source.layers, reading)) for part, removal, reading in _searches(source)
    )


def _spectral_norm(source: Source) -> Figures:
    """A figure for each search and kind of projection."""
    return readings(
        (f"{part.label}:{group}", drawn)
        for part, removal, reading in _searches(source)
        for group, drawn in _norms(part, removal, source.layers, reading)
    )


def removed(removal: Removal | None) -> tuple[int, ...]:
    """The layers of a removal, in order of depth."""
    return () if removal is None else tuple(sorted(removal.blocks))


def key_of_gone(removal: Removal | None) -> list[go.Scatter]:
    """The legend's entry for the grey columns."""
    if not removed(removal):
        return []
    mark = {"symbol": "square", "size": 11, "color": GRID}
    return [go.Scatter(x=[None], y=[None], name="Removed here", mode="markers", marker=mark, hoverinfo="skip")]


def whole(found: Curve, layers: int, first: int = 1) -> Curve:
    """The curve at every layer first..L, with gaps where it has none."""
    known = dict(zip(found.layers, zip(found.values, found.counts, strict=True), strict=True))
    across = range(first, layers + 1)
    return Curve(
        list(across), [known.get(at, (None, "?"))[0] for at in across], [known.get(at, (None, "?"))[1] for at in across]
    )


def _scalars(part: Part, removal: Removal | None, layers: int, reading: str) -> go.Figure | None:
    traces, words = [], []
    for site, statistic, name, color, dash in SCALARS:
        found = curve(part.table, "scalar", statistic, site)
        if not found:
            continue
        drawn = line(whole(found, layers), name, color, dash)
        drawn.marker.size = 5 if layers <= 40 else 3
        spread = curve(part.table, "scalar", f"{statistic}_std", site)
        if spread:
            widths = whole(spread, layers).values
            drawn.error_y = {"array": [width or 0 for width in widths], "color": color, "thickness": 1.2, "width": 2}
        traces.append(drawn)
        words.append(extremes(name.split(":")[0], found.layers, found.values))
    if not traces:
        return None
    drawn = figure(
        [*traces, *key_of_gone(removal)],
        alt=" ".join(words),
        xaxis=layer_axis(layers),
        yaxis={"title": {"text": "Factor"}},
        variant=reading,
        shapes=marked_layers(removed(removal)),
        height=420,
        showlegend=True,
    )
    return drawn.add_hline(1, line={"color": MUTED, "width": 1})


def _mmd(part: Part, removal: Removal | None, layers: int, reading: str) -> go.Figure | None:
    traces, words = [], []
    for state, (name, color) in STATES.items():
        rows = part.table
        if "state" in rows.columns:
            rows = rows[(rows["state"] == state).fillna(False).astype(bool)]
        found = curve(rows, "mmd", "value")
        if found:
            traces.append(line(found, name, color, form=".4~g"))
            words.append(extremes(name, found.layers, found.values, ".3g"))
    if not traces:
        return None
    return figure(
        [*traces, *key_of_gone(removal)],
        alt=" ".join(words),
        xaxis=layer_axis(layers, first=0),
        yaxis={"title": {"text": "MMD²"}, "rangemode": "tozero"},
        variant=reading,
        shapes=marked_layers(removed(removal)),
        height=420,
        showlegend=True,
    )


def groups(part: Part, removal: Removal | None) -> dict[str, list[str]]:
    """Kind of projection (`self_attn`, `mlp`) -> its projections; what was removed comes first."""
    sites = [str(site) for site in select(part.table, "spectral_norm")["site"].dropna().unique()]
    found: dict[str, list[str]] = {}
    for site in sites:
        found.setdefault(site.rpartition(".")[0] or site, []).append(site)
    last = "mlp" if removal is None or removal.granularity != "mlp" else "att"
    return dict(sorted(found.items(), key=lambda item: last in item[0].lower()))


def _norms(part: Part, removal: Removal | None, layers: int, reading: str) -> list[tuple[str, go.Figure]]:
    made = []
    found = groups(part, removal)
    for group, sites in found.items():
        norms = {site: curve(part.table, "spectral_norm", "value", site) for site in sites}
        traces = [
            line(norm, label(site.rpartition(".")[2], 36), categorical(index)["color"], form=".3f")
            for index, (site, norm) in enumerate(norms.items())
            if norm
        ]
        if not traces:
            continue
        variant = " · ".join(filter(None, [reading, label(group, 36) if len(found) > 1 else ""]))
        drawn = figure(
            [*traces, *key_of_gone(removal)],
            title="Spectral norm of the original’s projections",
            subtitle="Largest singular value of each weight matrix, skipped layers against kept ones",
            alt=" ".join(
                extremes(label(site.rpartition(".")[2], 36), norm.layers, norm.values, ".2f")
                for site, norm in norms.items()
                if norm
            ),
            xaxis=layer_axis(layers),
            yaxis={"title": {"text": "‖W‖₂"}, "rangemode": "tozero"},
            variant=variant,
            shapes=marked_layers(removed(removal)),
            height=420,
            showlegend=True,
        )
        made.append((group, drawn))
    return made


FIGURES = (
    Figure(
        "scalars",
        "healing",
        lambda source: _by_search(source, _scalars),
        kinds=(SKIP,),
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
                formula=(
                    "<msup><mi>x</mi><mo>′</mo></msup><mo>=</mo><msub><mi>b</mi><mtext>att</mtext></msub><mi>A</mi>"
                    "<mo>(</mo><mi>x</mi><mo>)</mo><mo>+</mo><msub><mi>s</mi><mtext>att</mtext></msub><mi>x</mi>"
                    '<mo>,</mo><mspace width="0.8em"></mspace><mi>y</mi><mo>=</mo><msub><mi>b</mi><mtext>mlp</mtext>'
                    "</msub><mi>M</mi><mo>(</mo><msup><mi>x</mi><mo>′</mo></msup><mo>)</mo><mo>+</mo><msub><mi>s</mi>"
                    "<mtext>mlp</mtext></msub><msup><mi>x</mi><mo>′</mo></msup>"
                ),
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
        kinds=(SKIP,),
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
                formula=(
                    '<msup><mi>MMD</mi><mn>2</mn></msup><mo>=</mo><mi>E</mi><mspace width="0.1em"></mspace><mi>k</mi>'
                    "<mo>(</mo><mi>x</mi><mo>,</mo><msup><mi>x</mi><mo>′</mo></msup><mo>)</mo><mo>+</mo><mi>E</mi>"
                    '<mspace width="0.1em"></mspace><mi>k</mi><mo>(</mo><mi>y</mi><mo>,</mo><msup><mi>y</mi><mo>′</mo>'
                    '</msup><mo>)</mo><mo>−</mo><mn>2</mn><mi>E</mi><mspace width="0.1em"></mspace><mi>k</mi><mo>(</mo>'
                    "<mi>x</mi><mo>,</mo><mi>y</mi><mo>)</mo>"
                ),
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
        _spectral_norm,
        kinds=(SKIP,),
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
