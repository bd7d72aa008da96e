"""Quality against time: held-out loss over prefill and decode time as multiples of the original's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from fulldepth.figures.benchmark import WHOLE, BenchmarkedModel, Cell, Spread, agree
from fulldepth.figures.draw import error_bars
from fulldepth.figures.record import SKIP, Figure, Method, Source
from fulldepth.figures.style import INK, Figures, axis, categorical, figure, label

PHASES = {"prefill": "Prefill time", "decode": "Decode time of a token"}
SYMBOLS = {"bench": "circle", "quantise": "diamond"}


def _planes(source: Source, phase: str) -> Figures:
    """The figure of the whole grid, then of each cell of each folder's grid."""
    if (whole := _plane(source.benchmarked, phase, WHOLE)) is None:
        return {}
    drawings = {"": whole}
    for part in source.parts:
        models = [model for model in source.benchmarked if model.part is part]
        cells = dict.fromkeys(cell for model in models for cell in model.cells)
        for cell in cells if len(cells) > 1 else ():
            if (drawn := _plane(models, phase, cell)) is not None:
                drawings[f"{part.label}:{cell.batch}:{cell.context}"] = drawn
    return drawings


def placed(models: Sequence[BenchmarkedModel], phase: str, cell: Cell) -> list[tuple[BenchmarkedModel, Spread, float]]:
    """(model, time over the original's, loss) of all models that have both.

    If the originals' losses differ, losses are relative to the original's. Only one original is included.
    """
    same_data, points = agree(models), []
    originals = 0
    for model in models:
        time = model.relative(phase, cell)
        if time is None or model.loss is None or (not same_data and model.base is None):
            continue
        originals += model.baseline
        if model.baseline and originals > 1:
            continue
        points.append((model, time, model.loss if same_data else model.loss - (model.base or 0.0)))
    return points


def _plane(models: Sequence[BenchmarkedModel], phase: str, cell: Cell) -> go.Figure | None:
    points = placed(models, phase, cell)
    if sum(not model.baseline for model, *_ in points) == 0:
        return None
    across = _range([edge for _, time, _ in points for edge in time])
    up = _range([loss for *_, loss in points])
    colors = iter(categorical(turn)["color"] for turn in range(len(points)))
    traces = [_mark(model, time, loss, INK if model.baseline else next(colors)) for model, time, loss in points]
    return figure(
        traces,
        title=f"Quality against {phase} time",
        subtitle="Lower left is better; bars: 95 % interval of the ratio",
        alt="; ".join(f"{model_name(model)}: {time.value:.2f} times, {loss:.3f} nats" for model, time, loss in points),
        xaxis=axis(f"{PHASES[phase]} over the original’s", tickformat=".2f", range=across),
        yaxis=axis("Held-out loss (nats)" if agree(models) else "Loss added to the original’s (nats)", range=up),
        variant="Whole grid" if cell == WHOLE else label(models[0].part.named(cell.name), 48),
        hovermode="closest",
        height=440,
        showlegend=True,
    )


def _mark(model: BenchmarkedModel, time: Spread, loss: float, color: str) -> go.Scatter:
    """The mark of a model, with a bar over the interval of its time."""
    symbol = "square" if model.baseline else SYMBOLS[model.part.kind]
    return go.Scatter(
        x=[time.value],
        y=[loss],
        customdata=[[time.low, time.high]],
        name=model_name(model),
        mode="markers",
        marker={"color": color, "size": 11, "symbol": symbol},
        error_x=error_bars([time], color),
        hovertemplate="%{fullData.name}<br>%{x:.3f} (%{customdata[0]:.3f} to %{customdata[1]:.3f})<br>"
        "<b>%{y:.4f}</b> nats<extra></extra>",
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


TIME = Method(
    "Time over the original’s",
    ("time_ratio", "prefill_time", "decode_time"),
    (
        "Prefill is the pass over the prompt, decode that of one token with a cache. All models run in the same "
        "rounds, in changing order. The ratio is the median of the rounds’ ratios, its 95 % interval that of the order "
        "statistics, from 9 rounds on. An interval that holds 1 is no measurable difference. Over the whole grid, a "
        "round’s time is the geometric mean over batches and contexts. Times are not compared if other programs used "
        "more than 10 % of the processor."
    ),
    formula=r'r = median \thin \frac{t_"export"}{t_"original"}',
)
SIZE = Method(
    "Memory and size",
    ("peak_memory", "parameter_bytes", "kv_bytes_per_token"),
    (
        "Peak memory counts weights and all tensors that live at once during a prompt and the tokens after it. Weights "
        "count tied tensors once. The cache’s bytes are read off the cache itself after the last token, per token and "
        "sequence."
    ),
)
FIGURES = (
    Figure(
        "pareto_prefill",
        "pareto",
        lambda source: _planes(source, "prefill"),
        kinds=(SKIP,),
        methods=(TIME, SIZE),
    ),
    Figure("pareto_decode", "pareto", lambda source: _planes(source, "decode"), (SKIP,)),
)
