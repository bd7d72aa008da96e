"""Benchmarks under load on a page: tokens per second and time to the first token, by number of clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from fulldepth.reporting.draw import add_level, points
from fulldepth.reporting.phrases import short
from fulldepth.reporting.source import number
from fulldepth.reporting.style import axis, categorical, figure, label
from fulldepth.reporting.tables import Table, of_record


class Spread(NamedTuple):
    """A time divided by the original's, with its 95 % interval. Without an interval, both ends equal the value."""

    value: float
    low: float
    high: float

    @property
    def speed_up(self) -> Spread:
        """The inverse: the original's time divided by this time."""
        return Spread(1 / self.value, 1 / self.high, 1 / self.low)

    @property
    def contains_one(self) -> bool:
        """True if there is an interval, and it contains 1."""
        return self.low < self.high and self.low <= 1 <= self.high

    @property
    def interval(self) -> str:
        """The interval as text, in brackets."""
        return "(no interval)" if self.low == self.high else f"({self.low:.2f} to {self.high:.2f})"


def ratio_text(ratio: Spread) -> str:
    """A speed-up with its interval, as text; `≈ 1×` if the interval contains 1."""
    return f"{'≈ 1' if ratio.contains_one else f'{ratio.value:.2f}'}× {ratio.interval}"


def served_cells(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each model, length of the prompt and number of clients (`batch`), in the order of a benchmark's table.

    The other columns are `measure statistic` for the measures of servers; empty for a benchmark without load.
    """
    if not {"model", "batch", "context"} <= {*table.columns}:
        return pd.DataFrame()
    rows = table[table["site"] == "server"]
    named = rows.assign(name=rows["measure"].astype(str) + " " + rows["statistic"].astype(str))
    cells = named.pivot_table(
        index=["model", "context", "batch"], columns="name", values="value", sort=False, observed=True
    )
    return cells.reset_index()


def load_figures(benchmarks: Sequence[tuple[str, pd.DataFrame]]) -> list[tuple[str, go.Figure]]:
    """Tokens per second over the original's by number of clients: a line per export, a figure per length of prompt.

    Args:
        benchmarks: name (empty for a single one) and `served_cells` of each.
    """
    compared = [(name, cells) for name, cells in benchmarks if "rate_ratio median" in cells.columns]
    figures: list[tuple[str, go.Figure]] = []
    for context in sorted({int(context) for _, cells in compared for context in cells["context"]}):
        traces: list[go.Scatter] = []
        for name, cells in compared:
            known = cells[(cells["context"] == context) & cells["rate_ratio median"].notna()]
            for model, line in known.groupby("model", sort=False):
                title = f"{name}: {model}" if name else str(model)
                traces.append(_line(label(title, 40), line, str(categorical(len(traces))["color"])))
        if not traces:
            continue
        ticks = sorted({clients for trace in traces for clients in trace.x})
        drawn = figure(
            traces,
            xaxis=axis(
                "Clients at once",
                type="log",
                tickvals=ticks,
                ticktext=[*map(str, ticks)],
                unifiedhovertitle={"text": "%{x} client(s)"},
            ),
            yaxis=axis("Tokens per second over the original’s", tickformat=".2f"),
            variant=f"Prompts of {context} tokens",
            height=400,
            hovermode="closest",
            showlegend=True,
        )
        figures.append((str(context) if figures else "", add_level(drawn, 1.0, "dot")))
    return figures


def _line(name: str, cells: pd.DataFrame, color: str) -> go.Scatter:
    """The line of a model, with its 95 % intervals where they are known."""
    middle = cells["rate_ratio median"]
    low, high = (cells.get(f"rate_ratio {end}", middle).fillna(middle) for end in ("low", "high"))
    lengths = {"array": [*(high - middle)], "arrayminus": [*(middle - low)], "symmetric": False}
    return points(
        name,
        [int(clients) for clients in cells["batch"]],
        [*middle],
        color,
        "%{x} clients: <b>%{y:.3f}</b> (%{customdata[0]:.3f} to %{customdata[1]:.3f})",
        lines=True,
        customdata=[*zip(low, high, strict=True)],
        error_y={"color": color, "thickness": 1.2, "width": 4, **lengths},
    )


def load_table(cells: pd.DataFrame) -> Table | None:
    """Folded table of a benchmark under load: tokens per second and time to the first token; None for other benchmarks.

    Args:
        cells: as `served_cells` returns them.
    """
    rows = []
    for cell in cells.to_dict("records"):
        numbers: dict[str, Any] = {
            "clients": int(cell["batch"]),
            "context": int(cell["context"]),
            "rate": cell.get("output_rate median"),
            "first_median": 1000 * cell.get("first_token_time median", float("nan")),
            "first_p95": 1000 * cell.get("first_token_time p95", float("nan")),
        }
        for name in ("rate_ratio", "first_token_ratio"):
            middle = number(cell.get(f"{name} median"))
            if middle is not None:
                low, high = (number(cell.get(f"{name} {end}")) for end in ("low", "high"))
                numbers[name] = ratio_text(Spread(middle, low or middle, high or middle))
        rows.append((short(str(cell["model"]), 60), numbers))
    return replace(of_record("load", rows), folded=True) if rows else None
