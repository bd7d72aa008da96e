"""Quality against time: held-out loss over prefill and decode time, and time saved over predicted time saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures.benchmark import BenchmarkedModel, Cell, Spread, agree, frontier
from fulldepth.figures.draw import error_bars
from fulldepth.figures.record import SKIP, Figure, Method, Source, readings
from fulldepth.figures.style import AXIS, INK, MUTED, Figures, axis, categorical, figure, label, minus

SYMBOLS = {"bench": "circle", "quantise": "diamond"}
MARKS = ("circle", "diamond", "square", "cross", "triangle-up", "x")
"""Marker symbols of exports; different so that overlapping marks can be told apart."""
PREDICTED = {"toggled": "By skipping in place", "flops": "By operations"}
"""Method of prediction -> name of the variant."""


def _planes(source: Source, phase: str) -> Figures:
    """Figures relative to the original over the grid, then of each cell of each folder's grid."""
    if (relative := _plane(source.benchmarked, phase, None)) is None:
        return {}
    drawings = {"": relative}
    for part in source.parts:
        models = [model for model in source.benchmarked if model.part is part]
        for cell in dict.fromkeys(cell for model in models for cell in model.cells):
            if (drawn := _plane(models, phase, cell)) is not None:
                drawings[f"{part.label}:{cell.batch}:{cell.context}"] = drawn
    return drawings


def _time_saved(source: Source, phase: str) -> Figures:
    return readings((how, _saved(source.benchmarked, phase, how)) for how in PREDICTED)


def placed(
    models: Sequence[BenchmarkedModel], phase: str, cell: Cell | None
) -> list[tuple[BenchmarkedModel, Spread, float]]:
    """(model, time, loss) of all models that have both.

    Times are multiples of the original's, or seconds in one cell. If the originals' losses differ, losses are relative
    to the original's. Of multiples, only one original is included.
    """
    same_data, points = agree(models), []
    originals = 0
    for model in models:
        time = model.relative(phase) if cell is None else model.time(phase, cell)
        if time is None or model.loss is None or (not same_data and model.base is None):
            continue
        loss = model.loss if same_data else model.loss - (model.base or 0.0)
        originals += model.baseline
        if cell is None and model.baseline and originals > 1:
            continue
        points.append((model, time, loss))
    return points


def _plane(models: Sequence[BenchmarkedModel], phase: str, cell: Cell | None) -> go.Figure | None:
    points = placed(models, phase, cell)
    if sum(not model.baseline for model, *_ in points) == 0:
        return None
    scale, unit = (1.0, "") if cell is None else _unit([time.value for _, time, _ in points])
    best = frontier([(time.value, loss) for _, time, loss in points])
    across = _range([edge * scale for _, time, _ in points for edge in time])
    up = _range([loss for *_, loss in points])
    traces: list[Any] = [
        go.Scatter(
            # The staircase bounds the attainable region above and to the right; it extends to the edges.
            x=[points[best[0]][1].value * scale, *(points[at][1].value * scale for at in best), across[1]],
            y=[up[1], *(points[at][2] for at in best), points[best[-1]][2]],
            name="Frontier",
            mode="lines",
            line={"color": AXIS, "width": 1.5, "shape": "hv"},
            hoverinfo="skip",
        )
    ]
    colors = iter(categorical(turn)["color"] for turn in range(len(points)))
    for index, (model, time, loss) in enumerate(points):
        color = INK if model.baseline else next(colors)
        at = Spread(*(edge * scale for edge in time))
        traces.append(_mark(model, at, loss, color, index in best, ".1%" if cell is None else ".4~g", unit))
    shown = "; ".join(model_name(points[at][0]) for at in best)
    span = "over the rounds" if cell is not None or all(len(model.cells) == 1 for model in models) else "over the grid"
    return figure(
        traces,
        title=f"Quality against {phase} time",
        subtitle=f"Lower left is better; bars: least to most {span}. Filled marks are on the frontier",
        alt=f"On the frontier: {shown}.",
        xaxis={**_time_axis(phase, cell, unit), "range": across},
        yaxis=axis("Held-out loss (nats)" if agree(models) else "Loss added to the original’s (nats)", range=up),
        variant=_all_places(models) if cell is None else _reading(models, cell),
        hovermode="closest",
        height=440,
        showlegend=True,
    )


def _mark(
    model: BenchmarkedModel, time: Spread, loss: float, color: str, filled: bool, form: str, unit: str
) -> go.Scatter:
    """The mark of a model, with a bar from its minimum to its maximum time."""
    symbol = "square" if model.baseline else SYMBOLS[model.part.kind]
    mark: dict[str, Any] = {"color": color, "size": 11, "symbol": symbol if filled else f"{symbol}-open"}
    if not filled:
        mark["line"] = {"width": 2}
    return go.Scatter(
        x=[time.value],
        y=[loss],
        customdata=[[time.low, time.high]],
        name=model_name(model),
        mode="markers",
        marker=mark,
        error_x=error_bars([time], color),
        hovertemplate=f"%{{fullData.name}}<br>%{{x:{form}}}{unit} (%{{customdata[0]:{form}}} to "
        f"%{{customdata[1]:{form}}})<br><b>%{{y:.4f}}</b> nats<extra></extra>",
    )


def _range(values: Sequence[float]) -> list[float]:
    """Axis range of all values with a margin."""
    low, high = min(values), max(values)
    margin = 0.08 * ((high - low) or abs(high) or 1.0)
    return [low - margin, high + margin]


def model_name(model: BenchmarkedModel, written: Callable[[object, int], str] = label, limit: int = 40) -> str:
    """Name of a model, shortened to `limit` characters and made safe by `written`; the original is marked."""
    name = written(model.name, limit)
    return f"{name} (original)" if model.baseline and not name.startswith("original") else name


def _all_places(models: Sequence[BenchmarkedModel]) -> str:
    return "Whole grid" if any(len(model.cells) > 1 for model in models) else "Share of the original’s"


def _reading(models: Sequence[BenchmarkedModel], cell: Cell) -> str:
    part = models[0].part
    name = cell.name if part.kind == "bench" or cell.batch is not None else "quantisation, as measured"
    return label(part.named(name), 48) if part.label and part.kind != "bench" else name[:1].upper() + name[1:]


def _unit(seconds: Sequence[float]) -> tuple[float, str]:
    return (1.0, " s") if max(seconds, default=0.0) >= 1 else (1e3, " ms")


def _time_axis(phase: str, cell: Cell | None, unit: str) -> dict[str, Any]:
    step = "Prefill time" if phase == "prefill" else "Decode time of a token"
    if cell is None:
        return axis(f"{step}, share of the original’s", tickformat=".0%")
    return axis(f"{step} ({unit.strip()})")


def _saved(models: Sequence[BenchmarkedModel], phase: str, how: str) -> go.Figure | None:
    """Time saved over predicted time saved, one mark per cell."""
    traces: list[Any] = []
    values: list[float] = []
    for index, model in enumerate(model for model in models if not model.baseline and model.part.kind == "bench"):
        points = []
        for cell in model.cells:
            predicted = model.in_cell("predicted_time_saved", how, phase, cell)
            if predicted is not None and (saved := model.saved(phase, cell)) is not None:
                points.append((predicted, saved, cell.name))
        if not points or all(predicted == 0 for predicted, *_ in points):
            continue  # it skips no blocks, so nothing was predicted
        color = categorical(index)["color"]
        predicted_shares, saved_shares, names = zip(*points, strict=True)
        traces.append(
            go.Scatter(
                x=predicted_shares,
                y=[saved.value for saved in saved_shares],
                customdata=[[name, saved.low, saved.high] for saved, name in zip(saved_shares, names, strict=True)],
                name=label(model.name, 40),
                mode="markers",
                marker={"color": color, "size": 9, "symbol": MARKS[index % len(MARKS)]},
                error_y=error_bars(saved_shares, color),
                hovertemplate="%{fullData.name}, %{customdata[0]}<br>saved <b>%{y:.1%}</b> (%{customdata[1]:.1%} to "
                "%{customdata[2]:.1%})<br>predicted %{x:.1%}<extra></extra>",
            )
        )
        values += predicted_shares
    if not traces:
        return None
    low, high = min([0.0, *values]), max([0.02, *values])
    span = [low - 0.04 * (high - low), high + 0.08 * (high - low)]
    ratios = [y / x for trace in traces for x, y in zip(trace.x, trace.y, strict=True) if x > 0]
    return figure(
        [
            go.Scatter(
                x=span,
                y=span,
                name="As predicted",
                mode="lines",
                hoverinfo="skip",
                line={"color": MUTED, "width": 1, "dash": "dot"},
            ),
            *traces,
        ],
        title=f"Time saved in {phase}, measured and predicted",
        subtitle="A mark for each batch and context; on the line it saved what was predicted; bars: least to most",
        alt=f"Saved over predicted: {minus(min(ratios), '.2f')} to {minus(max(ratios), '.2f')}." if ratios else "",
        xaxis=axis("Predicted time saved", tickformat=".0%", range=span),
        yaxis=axis("Time saved", tickformat=".0%"),
        variant=PREDICTED[how],
        hovermode="closest",
        height=440,
        showlegend=True,
    )


FRONTIER = Method(
    "Pareto frontier",
    ("prefill_time", "decode_time"),
    (
        "A model is on the frontier if no other is at most as slow and at most as bad and better in one of the two. "
        "Time is the median; the bars show how far apart the places of the grid, or the rounds, are: models whose "
        "bars overlap are not told apart in time."
    ),
)
FIGURES = (
    Figure("pareto_prefill", "pareto", lambda source: _planes(source, "prefill"), kinds=(SKIP,), methods=(FRONTIER,)),
    Figure("pareto_decode", "pareto", lambda source: _planes(source, "decode"), (SKIP,)),
    Figure(
        "time_saved_prefill",
        "cost",
        lambda source: _time_saved(source, "prefill"),
        kinds=(SKIP,),
        methods=(
            Method(
                "Time saved",
                ("time_saved", "prefill_time", "decode_time"),
                (
                    "Prefill is the pass over the prompt, decode that of one token with a cache. All models run in "
                    "the same rounds, in changing order; a time is the median over rounds, the share saved the median "
                    "of the rounds’ shares. Two predictions stand beside it: the original timed with the same blocks "
                    "skipped in place, and the operations that are no longer done. Measured over predicted is 1 where "
                    "an export saves all that its blocks took."
                ),
                formula=r's = 1 − \frac{t_"export"}{t_"original"}',
            ),
            Method(
                "Memory and size",
                ("peak_memory", "parameter_bytes", "kv_bytes_per_token"),
                (
                    "Peak memory counts weights and all tensors that live at once during a prompt and the tokens "
                    "after it. Weights count tied tensors once. The cache’s bytes are read off the cache itself after "
                    "the last token, per token and sequence."
                ),
            ),
        ),
    ),
    Figure("time_saved_decode", "cost", lambda source: _time_saved(source, "decode"), (SKIP,)),
)
