"""Retrieval weights of memory routers, and mixing of residual streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth.figures.curves import Curve, counted, number, select
from fulldepth.figures.draw import BARE, Line, first_line, heat, line, map_ticks, over_layers
from fulldepth.figures.record import Figure, Method, Quantity, Source, readings
from fulldepth.figures.style import MUTED, ZERO, Figures, axis, extremes, layer_name, minus

SITE = "routing"
EXPECTED = Line("expected_retrieval", "Expected state", "value", SITE, form=".2f")
HEAD = "head_"
ROUNDING = 1e-3
"""Differences below this are rounding errors of the model's precision."""
READINGS = {
    "input": ("Read", "How much of each stream the branch reads"),
    "output": ("Written", "How much of the branch each stream takes up"),
    "kept": ("Kept", "How much of each stream stays in it"),
    "given": ("Given", "How much of each stream flows into the others"),
}
"""Statistic of `stream_mixing` -> name of the variant, subtitle; the first is the default."""


@dataclass
class Grid:
    """Cells over layers (columns) and named rows; None if missing. False without a finite value."""

    layers: list[int]
    names: list[str]
    cells: dict[tuple[int, int], tuple[float | None, str]] = field(default_factory=dict)
    """(row, layer) -> value and count."""

    def __bool__(self) -> bool:
        return bool(self.finite)

    @property
    def finite(self) -> list[float]:
        """Every finite value."""
        return [value for value, _ in self.cells.values() if value is not None]

    def differs(self, other: Grid) -> bool:
        """Whether some value differs from the other grid's beyond rounding."""
        pairs = [(value, other.cells.get(cell, (None, ""))[0]) for cell, (value, _) in self.cells.items()]
        return any(abs(a - b) > ROUNDING for a, b in pairs if a is not None and b is not None)

    def rows(self, part: int) -> list[list[Any]]:
        """Values (`part` 0) or counts (1) by row and layer."""
        nothing = (None, "?")
        return [
            [self.cells.get((row, layer), nothing)[part] for layer in self.layers] for row in range(len(self.names))
        ]


def _retrieval_weight(source: Source) -> Figures:
    shares, masses = (_retrieval(source.table, statistic) for statistic in ("share", "mean"))
    signed = shares.differs(masses)  # a router whose weights are not a distribution
    return readings(
        [
            ("share", _retrieval_map(shares, "Share of absolute weight" if signed else "") if shares else None),
            ("mean", _retrieval_map(masses, "Signed weight") if masses and signed else None),
        ]
    )


def _self_retrieval_map(source: Source) -> go.Figure | None:
    heads = _self_retrieval(source.table)
    if not heads:
        return None
    return _grid_map(heads, title="Head", alt=_range("Self-retrieval", heads))


def _stream_mixing(source: Source) -> Figures:
    grids = ((statistic, _streams(source.table, statistic)) for statistic in READINGS)
    return readings((statistic, _stream_map(grid, statistic)) for statistic, grid in grids if grid)


def _grid(rows: pd.DataFrame, named_rows: Iterable[int], names: Sequence[str]) -> Grid:
    """Values and counts of table rows; `named_rows` gives the grid row of each."""
    grid = Grid(sorted({int(layer) for layer in rows["layer"]}), list(names))
    for row, layer, value, count in zip(named_rows, rows["layer"], rows["value"], rows["count"], strict=True):
        grid.cells[row, int(layer)] = (number(value), counted(count))
    return grid


def _retrieval(table: pd.DataFrame, statistic: str) -> Grid:
    """Sources (rows) of the layers that retrieve."""
    rows = select(table, "retrieval_weight", statistic, SITE).dropna(subset=["layer", "other"])
    deepest = max((int(layer) for layer in rows["layer"]), default=0)
    return _grid(rows, map(int, rows["other"]), [layer_name(source, short=True) for source in range(deepest)])


def _retrieval_map(grid: Grid, variant: str) -> go.Figure:
    newest = [grid.cells.get((layer - 1, layer), (None, "?"))[0] for layer in grid.layers]
    return _grid_map(
        grid,
        title="Retrieved state m",
        alt=extremes("Weight of the newest state", grid.layers, newest, ".2f"),
        variant=variant,
    )


def _expected(source: Source) -> go.Figure | None:
    expected = EXPECTED.curve(source.table)
    if not expected:
        return None
    plain = Curve(expected.layers, [float(layer - 1) for layer in expected.layers], ["1"] * len(expected.layers))
    return over_layers(
        source.table,
        source.layers,
        [EXPECTED],
        after=[line(plain, "Attention without a memory, m = r − 1", MUTED, "dot", ".0f")],
        alt=first_line("Expected state", ".2f"),
        yaxis=axis("State m", **ZERO),
    )


def _self_retrieval(table: pd.DataFrame) -> Grid:
    """Heads (rows) of the layers that retrieve."""
    rows = select(table, "retrieval_weight", "share").dropna(subset=["layer", "site"])
    rows = rows[rows["site"].astype(str).str.fullmatch(rf"{HEAD}\d+")]
    heads = [int(str(site).removeprefix(HEAD)) for site in rows["site"]]
    return _grid(rows, heads, [str(head) for head in range(max(heads, default=-1) + 1)])


def _streams(table: pd.DataFrame, statistic: str) -> Grid:
    """Streams (rows) of both connections of every layer."""
    rows = select(table, "stream_mixing", statistic).dropna(subset=["layer", "site"])
    sites = sorted(rows["site"].unique(), key=lambda site: (str(site).split("_")[0], int(str(site).rpartition("_")[2])))
    names = {"attention": "Attention", "mlp": "MLP"}
    named = [f"{names.get(site.split('_')[0], '?')} {site.rpartition('_')[2]}" for site in map(str, sites)]
    return _grid(rows, map(sites.index, rows["site"]), named)


def _stream_map(grid: Grid, statistic: str) -> go.Figure:
    reading, subtitle = READINGS[statistic]
    return _grid_map(
        grid,
        title="Branch and stream",
        subtitle=f"{subtitle}; mean over tokens",
        alt=_range(f"{reading} weights", grid),
        variant=reading,
    )


def _range(title: str, grid: Grid) -> str:
    """One sentence on the smallest and the largest value."""
    return f"{title}: {minus(min(grid.finite), '.2f')} to {minus(max(grid.finite), '.2f')}."


def _grid_map(grid: Grid, *, title: str, alt: str, **about: Any) -> go.Figure:
    """A map of layers (x) and rows (y); the range is 0 to the largest value, or symmetric if values are negative."""
    top = max(map(abs, grid.finite)) or 1.0
    signed = min(grid.finite) < 0
    return heat(
        {
            "x": grid.layers,
            "y": grid.names,
            "z": grid.rows(0),
            "customdata": [
                [[name, count] for count in row] for name, row in zip(grid.names, grid.rows(1), strict=True)
            ],
            "zmin": -top if signed else 0,
            "zmax": top,
            "hovertemplate": f"Layer %{{x}}, {title.lower()} %{{customdata[0]}}<br>weight <b>%{{z:.4f}}</b>"
            "<br>n = %{customdata[1]}<extra></extra>",
        },
        signed=signed,
        alt=alt,
        xaxis={**axis("Layer"), **map_ticks(grid.layers[-1])},
        yaxis=axis(title, type="category", tickvals=grid.names[:: max(1, len(grid.names) // 16)], **BARE),
        **about,
    )


FIGURES = (
    Figure(
        "retrieval_weight",
        "memory",
        _retrieval_weight,
        title="Retrieval weight",
        subtitle="Mean over heads and tokens; the topmost cell of a column is the newest state, m = r − 1",
        methods=(
            Method(
                "Retrieval weight",
                ("retrieval_weight",),
                (
                    "With a memory, a layer makes keys and values of a mixture of all earlier states. Shown is the "
                    "mean weight of state m in layer r over heads and counted tokens; m = r − 1 is the newest state, "
                    "which attention without a memory reads alone. Where the memory mixes keys and values themselves, "
                    "weights may be negative: the share is that of the absolute weights, over the source’s heads."
                ),
                source=(
                    "Gerasimov et al., <cite>You Do Not Fully Utilize Transformer’s Representation Capacity</cite>, "
                    "Eq. 1, Fig. 2 and 3."
                ),
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
                (
                    "p(m|h,r) is the share that head h of layer r retrieves of state m; p(h|r) is the norm of the "
                    "head’s slice of the output projection over the sum of all. The further below r − 1, the more a "
                    "layer reads from early states."
                ),
                formula=r"E[m|r] = ∑_h p(h|r) ∑_m p(m|h, r) \thin m",
                source=(
                    "Gerasimov et al., <cite>You Do Not Fully Utilize Transformer’s Representation Capacity</cite>, "
                    "Eq. 2."
                ),
            ),
        ),
        curves=(Quantity("expected_retrieval", "value", "Expected retrieved state", "State m", site=SITE),),
    ),
    Figure(
        "self_retrieval",
        "memory",
        _self_retrieval_map,
        title="Self-retrieval per head",
        subtitle="Weight of the newest source, m = r − 1; attention without a memory has 1",
    ),
    Figure(
        "stream_mixing",
        "memory",
        _stream_mixing,
        title="Mixing of residual streams",
        methods=(
            Method(
                "Mixing of residual streams",
                ("stream_mixing",),
                (
                    "With Hyper-Connections several streams run side by side. Of each stream: how much a branch reads "
                    "of it, how much of the branch it takes up, how much of it stays, and how much flows into the "
                    "other streams; means over tokens. All other measures read the sum of the streams, as the final "
                    "norm does."
                ),
                source="Zhu et al., <cite>Hyper-Connections</cite>, Sec. 2.",
            ),
        ),
    ),
)
