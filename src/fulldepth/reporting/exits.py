"""Early exit and generation: quality against speed-up, where samples or tokens leave, tables of thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import unescape
from itertools import zip_longest
from typing import Any

import plotly.graph_objects as go

from fulldepth.core.errors import shortened
from fulldepth.reporting.charts import Figure, readings
from fulldepth.reporting.draw import Drawn, chart, points, value_axis
from fulldepth.reporting.kinds import EXIT
from fulldepth.reporting.phrases import place_of, short, visible
from fulldepth.reporting.source import PageSource, PlottedCurve, number
from fulldepth.reporting.style import (
    CATEGORICAL,
    INK,
    MUTED,
    SEQUENTIAL,
    Figures,
    axis,
    categorical,
    figure,
    label,
    layer_axis,
    minus,
)
from fulldepth.reporting.tables import Meta, Table, flatten, of_record

MOST_BARS = 4
"""Number of thresholds drawn in one histogram, in addition to calibrated ones."""
MOST_TEXTS = 40
MOST_CHARACTERS = 6000
"""Largest number of texts on a page, and of characters of each."""
NO_VERDICT = {"busy": "the machine was busy when it was timed", "few-rounds": "it was timed in too few rounds"}
"""Timings after which times are not compared -> the reason, for a subtitle."""
SCALES = {
    "accuracy": ("Accuracy", ".1%"),
    "loss": ("Loss (nats)", ".4f"),
    "agreement": ("Agreement with the full model", ".1%"),
}
"""Number of a point -> its axis title and d3 number format."""


def points_of(entries: object) -> dict[str, list[dict[str, Any]]]:
    """Rule -> its points by ascending threshold, without those on the part of the data that chose a threshold.

    A point is an entry of the document with four more fields: `name` (rule and threshold: `confidence 0.9`), `early`
    (share of samples or tokens that leave before the last layer), `mean_layer` (mean exit layer) and `speed` (measured
    speed-up, or the theoretical one if none was measured). `measured_speedup` is None without a verdict on it.
    """
    points: dict[str, list[dict[str, Any]]] = {}
    for entry in entries if isinstance(entries, list) else []:
        if entry.get("split") == "calibration":
            continue
        exits = entry.get("exits") or []
        threshold = number(entry.get("threshold"))
        total = sum(exits)
        rule = label(entry.get("rule") or "", 24)
        measured = None if entry.get("timing") in NO_VERDICT else number(entry.get("measured_speedup"))
        point = {
            **entry,
            "measured_speedup": measured,
            "exits": exits,
            "name": (rule or "threshold") + ("" if threshold is None else f" {threshold:.4g}"),
            "early": 1 - exits[-1] / total if total else None,
            "mean_layer": sum(at * count for at, count in enumerate(exits, start=1)) / total if total else None,
            "speed": number(entry.get("theoretical_speedup")) if measured is None else measured,
        }
        points.setdefault(rule, []).append(point)
    return {rule: sorted(points[rule], key=lambda point: point.get("threshold") or 0.0) for rule in sorted(points)}


def tradeoff(record: Figure, source: PageSource) -> Figures:
    """Accuracy, loss and agreement against speed-up: one figure each, with a line for each model and rule."""
    entries = [source.meta] if source.kind == EXIT else source.meta.get("models") or []
    groups = {
        ", ".join(filter(None, (label(entry.get("label", ""), 40), rule))): every
        for entry in entries
        for rule, every in points_of(entry.get("generation" if record.section == "generating" else "exits")).items()
    }
    full = [{"agreement": 1.0, **(entry.get("full") or {})} for entry in entries]
    return readings((key, _tradeoff(groups, full, key)) for key in SCALES)


def _tradeoff(groups: Mapping[str, list[dict[str, Any]]], full: Sequence[Meta], key: str) -> go.Figure | None:
    """One figure: a line over thresholds for each group, and a mark for each full model; None without points."""
    title, form = SCALES[key]
    traces = []
    chosen_points = []
    for index, (name, every) in enumerate(groups.items()):
        drawn = [point for point in every if None not in (point["speed"], number(point.get(key)))]
        if not drawn:
            continue
        chosen_points += [(point["speed"], point[key]) for point in drawn if point.get("calibrated")]
        color = categorical(index)["color"]
        how = {None: "in theory"}
        hover_values = [
            [point["name"], how.get(point.get("measured_speedup"), "measured"), point["early"] or 0] for point in drawn
        ]
        hover = f"%{{customdata[0]}}: {title.lower()} <b>%{{y:{form}}}</b><br>%{{x:.2f}}× %{{customdata[1]}}<br>"
        hover += "%{customdata[2]:.1%} leave early"
        errors = {"array": [point.get(f"{key}_stderr") or 0 for point in drawn], "color": color}
        across, up = zip(*((point["speed"], point[key]) for point in drawn), strict=True)
        traces.append(points(name, across, up, color, hover, lines=True, error_y=errors, customdata=hover_values))
    if not traces:
        return None
    whole = [(1.0, value) for point in full if (value := number(point.get(key))) is not None]
    for name, at, symbol, size in (
        ("full model", whole, "square", 10),
        ("chosen on the other part", chosen_points, "circle-open", 17),
    ):
        if at:
            across, up = zip(*at, strict=True)
            traces.append(points(name, across, up, INK, marker={"symbol": symbol, "size": size}))
    variant = title.removesuffix(" (nats)")
    drawn_figure = figure(
        traces,
        xaxis=axis("Speed-up over the full model", ticksuffix="×"),
        yaxis=axis(title, **({"tickformat": ".1~%"} if form.endswith("%") else {"rangemode": "tozero"})),
        title=f"{variant} against speed-up",
        subtitle=f"{'Lower' if key == 'loss' else 'Higher'} right is better. "
        f"{_timing_note([point for every in groups.values() for point in every])}",
        variant=variant,
        height=380,
        hovermode="closest",
        showlegend=True,
    )
    return drawn_figure.add_vline(1, line={"color": MUTED, "width": 1, "dash": "dot"})


def _timing_note(points: Sequence[Mapping[str, Any]]) -> str:
    """Say that the speed-ups of a figure are measured, or why they are not."""
    is_timed = any(point.get("measured_speedup") is not None for point in points)
    without_verdict = {point.get("timing") for point in points}
    reasons = " or ".join(reason for timing, reason in NO_VERDICT.items() if timing in without_verdict)
    if is_timed:
        return "Measured in time" + (f"; in theory where {reasons}" if reasons else "")
    return f"In theory, by layers: {reasons or 'nothing was timed'}"


def histogram(record: Figure, source: PageSource) -> Figures:
    """Exit layers of samples, or of generated tokens: one figure for each rule."""
    entries = source.meta.get("generation" if record.section == "generating" else "exits")
    if isinstance(entries, Mapping):
        entries = [{**(source.meta.get("settings") or {}), "exits": (entries.get("stats") or {}).get("exits")}]
    return readings((rule, _histogram(rule, every)) for rule, every in points_of(entries).items())


def _histogram(rule: str, every: list[dict[str, Any]]) -> go.Figure | None:
    """Share of samples or tokens that leave after each layer, one colour per threshold."""
    drawn = [point for point in every if point["early"] is not None]
    drawn = [
        point for point in drawn if point["early"]
    ] or drawn  # a threshold at which nothing leaves would hide the others
    last = len(drawn) - 1
    spread_out = {round(at * last / (MOST_BARS - 1)) for at in range(MOST_BARS)}
    drawn = [point for index, point in enumerate(drawn) if index in spread_out or point.get("calibrated")]
    bars = []
    last = len(drawn) - 1
    layers = 0
    for index, point in enumerate(drawn):
        counts = point["exits"]
        color = SEQUENTIAL[3 + round(7 * index / last)] if last else CATEGORICAL[0]
        total = sum(counts)
        layers = len(counts)
        counts_in_words = [f"{count:,} of {total:,}" for count in counts]
        left = PlottedCurve([*range(1, layers + 1)], [count / total for count in counts], counts_in_words)
        bars.append(Drawn(left, point["name"], color, form=".1%", plot="bars"))
    settings: dict[str, Any] = {"variant": rule, "barmode": "group", "bargap": 0.25, "showlegend": True}
    return chart(bars, xaxis=layer_axis(layers), yaxis=value_axis("Share", "percent"), **settings)


def exit_story(source: PageSource) -> dict[str, Any] | None:
    """The opening paragraph: the sentences of the findings, and the command that exports the layers that suffice."""
    meta = source.meta
    headline = meta.get("headline") or {}
    stated = [str(entry["sentence"]) for entry in headline.values() if entry.get("sentence")]
    sentences = [
        sentence for sentence in stated if not any(sentence != other and sentence in other for other in stated)
    ]
    depth = number((headline.get("effective_depth") or {}).get("value"))
    enough = int(depth) if depth is not None and depth < source.layers else 0
    return {"sentences": sentences, "next": export_of(meta, enough)} if sentences else None


def export_of(meta: Mapping[str, Any], layers: int) -> dict[str, str] | None:
    """The command that exports the first layers, with its reason.

    None if `layers` is 0, for a model without a place (`place_of`), and where a plan's blocks were skipped: the export
    would be of the unskipped model.
    """
    place = place_of(meta)
    if not place or not layers or meta.get("skipped"):
        return None
    command = f"fulldepth exit export {place} --layers {layers} --output first-{layers}/"
    return {"why": f"export the first {layers} layers as a checkpoint:", "command": command}


def threshold_tables(source: PageSource) -> dict[str, list[Table]]:
    """Id of a section -> its table, with one row per threshold."""
    by_section = {}
    for section, title, entries in (
        ("thresholds", "Every threshold", source.meta.get("exits")),
        ("generating", "Every run", source.meta.get("generation")),
    ):
        named = []
        for point in (point for every in points_of(entries).values() for point in every):
            timing = point.get("timing")
            factor = point.get("measured_speedup")
            drop = point.get("drop")
            if timing in NO_VERDICT:
                point["timed"] = timing.replace("-", " ")
            elif factor is not None:
                point["timed"] = f"{'≈ ' * (timing == 'no-difference')}{factor:.2f}×"
            if drop is not None:
                change, *ends = (minus(-100 * end, "+.1f") for end in (drop, *(point.get("drop_interval") or ())[::-1]))
                point["change"] = change + f" ({' to '.join(ends)})" * bool(ends)
            named.append((unescape(point["name"]) + " · chosen" * bool(point.get("calibrated")), point))
        by_section[section] = [of_record("thresholds", named, title)]
    return by_section


def generation_tables(source: PageSource) -> dict[str, list[Any]]:
    """Id of a section -> generated texts, and a table of counts and times."""
    meta = source.meta
    generation = meta.get("generation") or {}
    stats = {
        name: value for name, value in (generation.get("stats") or {}).items() if not isinstance(value, list | Mapping)
    }
    rows = [[short(name, 60).replace("_", " ").capitalize(), short(text, 200)] for name, text in flatten(stats).items()]
    prompts = generation.get("prompts") or []
    texts = generation.get("texts") or []
    items = []
    first_texts = texts[:MOST_TEXTS]
    for prompt, text in zip_longest(prompts[: len(first_texts)], first_texts):
        pair = (prompt or "", (text or "").removeprefix(prompt or ""))
        items.append([visible(shortened(part, MOST_CHARACTERS), keep=" \n\t") for part in pair])
    cut = f"The first {MOST_TEXTS} of {len(texts):,}; results.json has all." if len(texts) > MOST_TEXTS else ""
    return {
        "texts": [{"template": "texts", "items": items, "note": cut}] if items else [],
        "statistics": [Table("Counts and times", [""], rows, text=True)],
    }
