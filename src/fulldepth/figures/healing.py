"""What healing did: scalars per layer, distance of the states from the original's, and the weights that went."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from fulldepth.figures.draw import line
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


def figures(found: Sequence[Part], layers: int) -> Figures:
    """`scalars`, `mmd`, `spectral_norm` (a reading for each kind of projection), of each folder of a search."""
    made: Figures = {}
    every = [part for part in found if part.kind == "skip"]
    for part in every:
        removal = planned(part)
        suffix = f":{part.label}" if made else ""
        reading = label(part.label, 40) if len(every) > 1 else ""
        for name, drawn in (
            (f"scalars{suffix}", _scalars(part, removal, layers, reading)),
            (f"mmd{suffix}", _mmd(part, removal, layers, reading)),
        ):
            if drawn is not None:
                made[name] = drawn
        for group, drawn in _norms(part, removal, layers, reading):
            made["spectral_norm" if "spectral_norm" not in made else f"spectral_norm:{part.label}:{group}"] = drawn
    return made


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
        title="Scalars per layer",
        subtitle="As fitted; 1 leaves everything as it was. A gap: what it would scale is gone",
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
        title="Distance from the original per layer",
        subtitle="Squared maximum mean discrepancy of the states after each layer, on held-out tokens",
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
