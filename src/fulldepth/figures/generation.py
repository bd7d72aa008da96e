"""Generation: acceptance of drafts by draft layers and length, and the positions that each layer ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from fulldepth.figures.curves import number
from fulldepth.figures.draw import add_level
from fulldepth.figures.record import GENERATION, Figure, Method, Source, readings
from fulldepth.figures.style import CATEGORICAL, INK, SEQUENTIAL, SHARE, ZERO, Figures, axis, figure, layer_axis

Entry = Mapping[str, Any]


class Scale(NamedTuple):
    """A number of each pair of draft layers and draft length."""

    key: str
    title: str
    axis: str
    form: str
    """d3 number format."""
    words: str
    """Python number format."""
    settings: dict[str, Any]
    level: float | None = None
    """Where a line is drawn."""


SCALES = (
    Scale("acceptance", "Accepted drafts", "Share of drafted tokens", ".1%", ".0%", SHARE),
    Scale("tokens_per_round", "Tokens per round", "Tokens", ".2f", ".2f", ZERO, 1.0),
    Scale("predicted_speedup", "Predicted speed-up", "Times plain decoding", ".2f", ".2f", ZERO, 1.0),
)


def speculation(meta: Entry) -> Entry:
    """The entry on self-speculative decoding; empty if there is none."""
    return meta.get("speculation") or {}


def chosen(meta: Entry) -> Entry | None:
    """The entry of the draft layers and length that were used, or else of those predicted to be fastest."""
    stated = speculation(meta)
    entries = stated.get("acceptance") or []
    used = [entry for entry in entries if _is_used(entry, stated)]
    fastest = [entry for entry in entries if entry.get("predicted_speedup") is not None]
    fastest = fastest or [entry for entry in entries if entry.get("acceptance") is not None]
    key = "predicted_speedup" if any(entry.get("predicted_speedup") is not None for entry in fastest) else "acceptance"
    return next(iter(used), max(fastest, key=lambda entry: entry[key], default=None))


def _is_used(entry: Entry, stated: Entry) -> bool:
    same_length = entry.get("draft_length") in (None, stated.get("draft_length"))
    return bool(stated.get("paid") is not False and entry.get("layer") == stated.get("speculate_from") and same_length)


def _acceptance(source: Source) -> Figures:
    entries = speculation(source.meta).get("acceptance") or []
    if len(entries) < 2:
        return {}  # nothing was compared
    return readings((scale.key, _curves(source, entries, scale)) for scale in SCALES)


def _curves(source: Source, entries: Sequence[Entry], scale: Scale) -> go.Figure | None:
    """One number by draft layers, one line for each draft length."""
    lengths = sorted({entry.get("draft_length") or 0 for entry in entries})
    traces: list[Any] = []
    for turn, length in enumerate(lengths):
        values = {
            int(entry["layer"]): value
            for entry in entries
            if (entry.get("draft_length") or 0) == length and (value := number(entry.get(scale.key))) is not None
        }
        if not values:
            continue
        shade = SEQUENTIAL[3 + round(7 * turn / max(len(lengths) - 1, 1))] if len(lengths) > 1 else CATEGORICAL[0]
        layers = sorted(values)
        traces.append(
            go.Scatter(
                x=layers,
                y=[values[layer] for layer in layers],
                name=f"{length} drafted token{'' if length == 1 else 's'}" if length else scale.title,
                mode="lines+markers",
                line={"color": shade, "width": 2},
                marker={"color": shade, "size": 6},
                hovertemplate=f"%{{y:{scale.form}}}",
            )
        )
    if not traces:
        return None
    heights = [(value, layer, trace.name) for trace in traces for layer, value in zip(trace.x, trace.y, strict=True)]
    best, layer, name = max(heights)
    used = chosen(source.meta)
    if used is not None and speculation(source.meta).get("paid") and used.get(scale.key) is not None:
        traces.append(_ring(used["layer"], used[scale.key]))
    drawn = figure(
        traces,
        alt=f"{scale.title}: highest {best:{scale.words}} at {layer} draft layers, {name}.",
        xaxis={
            **layer_axis(source.layers),
            "title": {"text": "Draft layers"},
            "unifiedhovertitle": {"text": "%{x} draft layers"},
        },
        yaxis=axis(scale.axis, **scale.settings),
        variant=scale.title,
        showlegend=True,
    )
    return drawn if scale.level is None else add_level(drawn, scale.level, "dot")


def _ring(layer: int, value: float) -> go.Scatter:
    return go.Scatter(
        x=[layer],
        y=[value],
        name="used",
        mode="markers",
        marker={"color": INK, "size": 15, "symbol": "circle-open", "line": {"width": 1.5}},
        hoverinfo="skip",
    )


def _positions(source: Source) -> go.Figure | None:
    """Bars: positions that each layer ran."""
    stats = (source.meta.get("generation") or {}).get("stats") or {}
    counts = speculation(source.meta).get("layer_positions") or stats.get("layer_positions") or []
    if not sum(counts):
        return None
    first, last = counts[0], counts[-1]
    ratio = f" Layer 1 ran {first / last:.2f} times as many as the last layer." if last else ""
    bars = go.Bar(
        x=list(range(1, len(counts) + 1)),
        y=counts,
        name="Positions",
        marker={"color": CATEGORICAL[0], "line": {"width": 0}},
        hovertemplate="%{y:,} positions",
    )
    return figure(
        [bars],
        alt=f"Between {min(counts):,} and {max(counts):,} positions.{ratio}",
        xaxis=layer_axis(len(counts)),
        yaxis=axis("Positions", **ZERO),
    )


ACCEPTANCE = Method(
    "Self-speculative decoding",
    (),
    (
        "The first E layers draft K tokens with the model’s own final norm and head, the other layers verify all of "
        "them at once, and the drafts up to the first wrong one are kept, with one more token of the whole model: a "
        "round gives between 1 and K + 1 tokens. Accepted is the share of drafted tokens that are kept. The predicted "
        "speed-up also takes the measured times of drafting and verifying; below 1, plain decoding is faster."
    ),
    source="Elhoushi et al., <cite>LayerSkip</cite>, Sec. 3.3 (arXiv 2404.16710).",
)
FIGURES = (
    Figure(
        "acceptance",
        "speculation",
        _acceptance,
        kinds=(GENERATION,),
        title="Drafts by depth and length",
        subtitle="Drafts of the first layers, judged by the whole model; a line for each draft length",
        methods=(ACCEPTANCE,),
    ),
    Figure(
        "layer_positions",
        "speculation",
        _positions,
        kinds=(GENERATION,),
        title="Work of each layer",
        subtitle="Positions that each layer ran after the pass of the prompts, also of drafts that were not kept",
    ),
)
