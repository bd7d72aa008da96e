"""Retrieval weights of memory routers, and mixing of residual streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, select
from fulldepth.figures.draw import Grid, Line, grid, heat, line, map_axis, over_layers
from fulldepth.figures.record import Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import MUTED, ZERO, Figures, axis, layer_name

SITE = "routing"
ROUNDING = 1e-3
"""Differences below this are rounding errors of the model's precision."""
READINGS = {
    "input": ("Read", "How much of each stream the branch reads"),
    "output": ("Written", "How much of the branch each stream takes up"),
    "kept": ("Kept", "How much of each stream stays in it"),
    "given": ("Given", "How much of each stream flows into the others"),
}
"""Statistic of `stream_mixing` -> name of the variant, subtitle; the first is the default."""
BRANCHES = {"attention": "Attention", "mlp": "MLP"}


def _retrieval(source: Source) -> Figures:
    """Mean weights; if they are not shares of one (weights of keys and values of their own), also the signed ones."""
    rows = select(source.table, "retrieval_weight", site=SITE).dropna(subset=["layer", "other"])
    shares, masses = (
        grid(own, own["other"], own["layer"]) for own in (rows[rows["statistic"] == name] for name in ("share", "mean"))
    )
    signed = any(abs(a - b) > ROUNDING for a, b in zip(shares.finite, masses.finite, strict=False))
    return readings(
        (key, _map(cells, [layer_name(row, short=True) for row in cells.rows], "Retrieved state m", variant=variant))
        for key, cells, variant in (
            ("share", shares, "Share of absolute weight" if signed else ""),
            ("mean", masses, "Signed weight"),
        )
        if cells and (signed or key == "share")
    )


def _expected(source: Source) -> go.Figure | None:
    expected = Line("expected_retrieval", "Expected state", "value", SITE, form=".2f")
    layers = expected.curve(source.table).layers
    plain = Curve(layers, [float(layer - 1) for layer in layers], ["1"] * len(layers))
    return over_layers(
        source.table,
        source.layers,
        [expected],
        after=[line(plain, "Attention without a memory, m = r − 1", MUTED, "dot", ".0f")],
        yaxis=axis("State m", **ZERO),
    )


def _streams(source: Source, statistic: str) -> go.Figure | None:
    """Streams (rows) of both connections of every layer."""
    reading, subtitle = READINGS[statistic]
    rows = select(source.table, "stream_mixing", statistic).dropna(subset=["layer", "site"])
    places = {site: (site.split("_")[0], int(site.rpartition("_")[2])) for site in rows["site"].unique()}
    order = sorted(places, key=places.__getitem__)
    cells = grid(rows, map(order.index, rows["site"]), rows["layer"])
    if not cells:
        return None
    return _map(
        cells,
        [f"{BRANCHES.get(branch, '?')} {stream}" for branch, stream in map(places.__getitem__, order)],
        "Branch and stream",
        subtitle=f"{subtitle}; mean over tokens",
        variant=reading,
    )


def _map(cells: Grid, names: Sequence[str], title: str, **about: Any) -> go.Figure:
    """A map of layers (x) and rows (y); the range is 0 to the largest value, or symmetric if values are negative."""
    low, high = min(cells.finite), max(cells.finite)
    top = max(-low, high) or 1.0
    return heat(
        cells,
        names=names,
        where=f"Layer %{{x}}, {title.lower()} %{{y}}",
        quantity="weight",
        low=-top if low < 0 else 0,
        high=top,
        xaxis=map_axis("Layer", cells.columns[-1], first=1),
        yaxis=axis(title, type="category", tickvals=names[:: max(1, len(names) // 16)]),
        **about,
    )


LIME = "Gerasimov et al., <cite>You Do Not Fully Utilize Transformer’s Representation Capacity</cite>"
FIGURES = (
    Figure(
        "retrieval_weight",
        "memory",
        _retrieval,
        title="Retrieval weight",
        subtitle="Mean over heads and tokens; the topmost cell of a column is the newest state, m = r − 1",
        methods=(
            Method(
                "Retrieval weight",
                ("retrieval_weight",),
                """With a memory, a layer makes keys and values of a mixture of all earlier states. Shown is the mean
                weight of state m in layer r over heads and counted tokens; m = r − 1 is the newest state, which
                attention without a memory reads alone. Where the memory mixes keys and values themselves, weights may
                be negative: the share is that of the absolute weights, over the source’s heads.""",
                source=f"{LIME}, Eq. 1, Fig. 2 and 3.",
            ),
        ),
    ),
    Figure(
        "expected_retrieval",
        "memory",
        _expected,
        title="Expected retrieved state",
        subtitle="Mean m from which a layer takes keys and values, over heads, by the norm of their output projection",
        methods=(
            Method(
                "Expected retrieved state",
                ("expected_retrieval",),
                """p(m|h,r) is the share that head h of layer r retrieves of state m; p(h|r) is the norm of the head’s
                slice of the output projection over the sum of all. The further below r − 1, the more a layer reads
                from early states.""",
                r"E[m|r] = ∑_h p(h|r) ∑_m p(m|h, r) \thin m",
                f"{LIME}, Eq. 2.",
            ),
        ),
        curves=(Quantity("expected_retrieval", "value", "Expected retrieved state", "State m", site=SITE),),
    ),
    Figure(
        "stream_mixing",
        "memory",
        lambda source: readings((statistic, _streams(source, statistic)) for statistic in READINGS),
        title="Mixing of residual streams",
        methods=(
            Method(
                "Mixing of residual streams",
                ("stream_mixing",),
                """With Hyper-Connections several streams run side by side. Of each stream: how much a branch reads of
                it, how much of the branch it takes up, how much of it stays, and how much flows into the other
                streams; means over tokens. All other measures read the sum of the streams, as the final norm does.""",
                source="Zhu et al., <cite>Hyper-Connections</cite>, Sec. 2.",
            ),
        ),
    ),
)
