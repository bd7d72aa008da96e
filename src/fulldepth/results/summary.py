"""`Results` in one line, and as HTML for a notebook: findings and one figure, without scripts and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import pandas as pd

from fulldepth.errors import one_line
from fulldepth.figures.style import CATEGORICAL

WIDTH, HEIGHT, MARGIN = 520, 150, 26
"""Size of the figure and the space for its labels, in CSS pixels."""
MOST_LINES = len(CATEGORICAL)
MOST_FINDINGS = 8
FIRST_TOWERS = 2.0
"""The first layer's displacement is cut where it is more than this many times as large as all others'."""

Meta = Mapping[str, Any]


class Plot(NamedTuple):
    """What the figure shows: lines of (x, y) by name."""

    title: str
    across: str
    """Name of the x axis."""
    lines: dict[str, list[tuple[int, float]]]


def describe(table: pd.DataFrame, meta: Meta) -> str:
    """One line: kind, model, data, number of rows, and the first number of the headline."""
    model, data = (one_line((meta.get(key) or {}).get("name") or "", 60) for key in ("model", "data"))
    models = [one_line(entry.get("label") or "?", 30) for entry in meta.get("models") or []]
    if models:
        model = one_line(", ".join(models), 100)
    about = " on ".join(part for part in (model, data) if part)
    parts = [one_line(meta.get("kind") or "results", 30) + (f" of {about}" if about else "")]
    if "step" in table.columns:
        parts.append(f"{table['step'].nunique():,} steps")
    parts.append(f"{len(table):,} rows")
    for name, entry in (meta.get("headline") or {}).items():
        if entry.get("value") is not None:
            unit = one_line(entry.get("unit") or "1", 20)
            parts.append(f"{one_line(name, 40)} = {entry['value']:.4g}{'' if unit == '1' else f' {unit}'}")
            break
    return f"<Results: {', '.join(parts)}>"


def html(table: pd.DataFrame, meta: Meta) -> str:
    """A fragment of HTML: the findings as a list, and a figure as inline SVG."""
    findings = (meta.get("headline") or {}).values()
    sentences = [one_line(entry["sentence"], 600) for entry in findings if entry.get("sentence")]
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences[:MOST_FINDINGS])
    plot = _plot(table, meta)
    drawn = "" if plot is None else _svg(plot)
    heading = escape(describe(table, meta).removeprefix("<Results: ").removesuffix(">"))
    return f"<div><p><b>{heading}</b></p><ul>{items}</ul>{drawn}<p><code>.show()</code> opens the page.</p></div>"


def _plot(table: pd.DataFrame, meta: Meta) -> Plot | None:
    """The displacement by layer, or what the results are about: a loss by step or removed blocks, scores by layer."""
    column, title = "layer", "Displacement per layer"
    rows = table[(table["measure"] == "displacement") & (table["statistic"] == "mean") & (table["site"] == "residual")]
    kind = meta.get("of") or meta.get("kind")
    if kind == "training":
        rows = table[(table["measure"] == "validation_loss") & (table["statistic"] == "mean")]
        column, title = "step", "Validation loss in nats"
    elif kind == "curve" and "removed" in table.columns:
        rows = table[(table["measure"] == "loss") & (table["statistic"] == "mean")]
        column, title = "removed", "Held-out loss in nats"
    elif kind == "exit":
        rows = table[(table["measure"] == "lens_accuracy") & (table["statistic"] == "mean")]
        title = "Accuracy if the model stops at a layer"
    elif kind == "evaluation":
        rows, title = _scores(table, meta), "Score if the model stops at a layer"
    elif kind == "generation":
        return _positions(meta)
    elif "step" in table.columns:
        rows = rows[rows["step"] == rows["step"].max()]
    rows = rows.dropna(subset=[column, "value"])
    several = "model" if "model" in rows.columns else "site" if kind == "evaluation" else None
    groups = [("", rows)] if several is None else rows.groupby(several, sort=False)
    lines = {
        one_line(name, 30): sorted((int(x), float(y)) for x, y in zip(part[column], part["value"], strict=True))
        for name, part in groups
    }
    drawable = {name: points for name, points in list(lines.items())[:MOST_LINES] if len(points) > 1}
    axis = {"layer": "Layer", "step": "Step", "removed": "Removed blocks"}[column]
    return Plot(title, axis, drawable) if drawable else None


def _scores(table: pd.DataFrame, meta: Meta) -> pd.DataFrame:
    """The main metric of each task by layer; of several models, that of the first task."""
    rows = table[table["measure"] == "task_score"]
    models = meta.get("models") or [meta]
    tasks = {name: entry for model in models for name, entry in (model.get("tasks") or {}).items()}
    metrics = {name: (entry or {}).get("metric") for name, entry in tasks.items()}
    rows = rows[rows["statistic"] == rows["site"].map(metrics)]
    return rows[rows["site"] == rows["site"].iloc[0]] if "model" in rows.columns and len(rows) else rows


def _positions(meta: Meta) -> Plot | None:
    """The positions that each layer ran in a generation."""
    generation = meta.get("generation") or {}
    stats = generation.get("stats") if isinstance(generation, Mapping) else None
    counts = (meta.get("speculation") or {}).get("layer_positions") or (stats or {}).get("layer_positions") or []
    line = [(layer, float(count)) for layer, count in enumerate(counts, start=1)]
    return Plot("Positions that each layer ran", "Layer", {"": line}) if len(line) > 1 else None


def _svg(plot: Plot) -> str:
    """The lines with the first and last value of each axis; every point has a tooltip."""
    points = [point for line in plot.lines.values() for point in line]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top, note = _top(plot)
    bottom = 0.0 if plot.across == "Layer" else min(y for _, y in points)

    def place(x: int, y: float) -> tuple[float, float]:
        share = (min(y, top) - bottom) / ((top - bottom) or 1.0)
        across = (x - left) / ((right - left) or 1)
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    drawn = "".join(
        _line(name, line, place, colour, plot.across)
        for (name, line), colour in zip(plot.lines.items(), CATEGORICAL, strict=False)
    )
    texts = [
        (MARGIN, 14, "start", f"{plot.title}{note}"),
        (MARGIN, HEIGHT - 8, "start", f"{plot.across} {left:,}"),
        (WIDTH - MARGIN, HEIGHT - 8, "end", f"{right:,}"),
        (WIDTH - MARGIN, 14, "end", f"{bottom:.3g} to {top:.3g}"),
    ]
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'
        for x, y, anchor, text in texts
    )
    frame = f'<path d="M{MARGIN} {HEIGHT - MARGIN}H{WIDTH - MARGIN}" stroke="currentColor" opacity="0.4"/>'
    alt = escape(f"{plot.title}, {bottom:.3g} to {top:.3g}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{alt}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">{frame}{drawn}{labels}</svg>'
        f"{_legend(plot) if len(plot.lines) > 1 else ''}"
    )


def _top(plot: Plot) -> tuple[float, str]:
    """The largest value on the axis, and a note if the first layer's is cut."""
    values = [y for line in plot.lines.values() for _, y in line]
    if plot.across == "Layer":
        first = max(line[0][1] for line in plot.lines.values())
        others = max((y for line in plot.lines.values() for _, y in line[1:]), default=first)
        if others > 0 and first > FIRST_TOWERS * others:
            return others, f" (layer 1, {first:.3g}, is cut)"
    return max(values), ""


def _line(name: str, line: Sequence[tuple[int, float]], place: Any, colour: str, across: str) -> str:
    """One line with a dot and a tooltip for each of its points."""
    spots = [(*place(x, y), x, y) for x, y in line]
    segments = "".join(f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" for (a, b, _, _), (c, d, _, _) in pairwise(spots))
    dots = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}">'
        f"<title>{escape(f'{name} ' if name else '')}{across} {x:,}: {y:.4g}</title></circle>"
        for a, b, x, y in spots
    )
    return f'<path d="{segments}" fill="none" stroke="{colour}" stroke-width="1.5"/>{dots}'


def _legend(plot: Plot) -> str:
    names = zip(plot.lines, CATEGORICAL, strict=False)
    return "<p>" + " ".join(f'<span style="color:{colour}">&#9632;</span> {escape(n)}' for n, colour in names) + "</p>"
