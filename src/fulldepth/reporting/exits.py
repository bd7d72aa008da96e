"""Early exit and generation: quality against speed-up, where samples or tokens leave, tables of thresholds."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import unescape
from itertools import zip_longest
from typing import Any

import plotly.graph_objects as go

from fulldepth.reporting.charts import Figure, readings
from fulldepth.reporting.draw import Drawn, chart, points, value_axis
from fulldepth.reporting.kinds import EXIT
from fulldepth.reporting.phrases import short, visible
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
"""Number of thresholds in one histogram, besides those that were chosen."""
MOST_TEXTS = 40
MOST_CHARACTERS = 6000
"""Largest number of texts on a page, and of characters of each."""
SCALES = {
    "accuracy": ("Accuracy", ".1%"),
    "loss": ("Loss (nats)", ".4f"),
    "agreement": ("Agreement with the full model", ".1%"),
}
"""Number of a point -> its axis title and d3 number format."""


def points_of(entries: object) -> dict[str, list[dict[str, Any]]]:
    """Rule -> its points by threshold, on the reported part of the data, not on which a threshold was chosen.

    A point is an entry of the document with `name` (rule and threshold: `confidence 0.9`), `early` (the share that
    leaves before the last layer), `mean_layer` (after which samples or tokens leave) and `speed` (the measured one,
    in theory where it was not measured).
    """
    points: dict[str, list[dict[str, Any]]] = {}
    for entry in entries if isinstance(entries, list) else []:
        if entry.get("split") == "calibration":
            continue
        exits = entry.get("exits") or []
        threshold = number(entry.get("threshold"))
        total = sum(exits)
        rule = label(entry.get("rule") or "", 24)
        measured = number(entry.get("measured_speedup"))
        point = {
            **entry,
            "exits": exits,
            "name": (rule or "threshold") + ("" if threshold is None else f" {threshold:.4g}"),
            "early": 1 - exits[-1] / total if total else None,
            "mean_layer": sum(at * count for at, count in enumerate(exits, start=1)) / total if total else None,
            "speed": number(entry.get("theoretical_speedup")) if measured is None else measured,
        }
        points.setdefault(rule, []).append(point)
    return {rule: sorted(points[rule], key=lambda point: point.get("threshold") or 0.0) for rule in sorted(points)}


def tradeoff(record: Figure, source: PageSource) -> Figures:
    """A number against speed-up of each rule; of several models, of each model and rule."""
    entries = [source.meta] if source.kind == EXIT else source.meta.get("models") or []
    groups = {
        ", ".join(filter(None, (label(entry.get("label", ""), 40), rule))): every
        for entry in entries
        for rule, every in points_of(entry.get("generation" if record.section == "generating" else "exits")).items()
    }
    full = [{"agreement": 1.0, **(entry.get("full") or {})} for entry in entries]
    return readings((key, _tradeoff(groups, full, key)) for key in SCALES)


def _tradeoff(groups: Mapping[str, list[dict[str, Any]]], full: Sequence[Meta], key: str) -> go.Figure | None:
    """A line of thresholds for each group, and the full models; None without points."""
    title, form = SCALES[key]
    traces = []
    chosen = []
    for index, (name, every) in enumerate(groups.items()):
        drawn = [one for one in every if None not in (one["speed"], number(one.get(key)))]
        if not drawn:
            continue
        chosen += [(one["speed"], one[key]) for one in drawn if one.get("calibrated")]
        color = categorical(index)["color"]
        how = {None: "in theory"}
        told = [[one["name"], how.get(one.get("measured_speedup"), "measured"), one["early"] or 0] for one in drawn]
        hover = f"%{{customdata[0]}}: {title.lower()} <b>%{{y:{form}}}</b><br>%{{x:.2f}}× %{{customdata[1]}}<br>"
        hover += "%{customdata[2]:.1%} leave early"
        errors = {"array": [one.get(f"{key}_stderr") or 0 for one in drawn], "color": color}
        across, up = zip(*((one["speed"], one[key]) for one in drawn), strict=True)
        traces.append(points(name, across, up, color, hover, lines=True, error_y=errors, customdata=told))
    if not traces:
        return None
    whole = [(1.0, value) for one in full if (value := number(one.get(key))) is not None]
    for name, at, symbol, size in (
        ("full model", whole, "square", 10),
        ("chosen on the other half", chosen, "circle-open", 17),
    ):
        if at:
            across, up = zip(*at, strict=True)
            traces.append(points(name, across, up, INK, marker={"symbol": symbol, "size": size}))
    timed = any(one.get("measured_speedup") is not None for every in groups.values() for one in every)
    variant = title.removesuffix(" (nats)")
    drawn_figure = figure(
        traces,
        xaxis=axis("Speed-up over the full model", ticksuffix="×"),
        yaxis=axis(title, **({"tickformat": ".1~%"} if form.endswith("%") else {"rangemode": "tozero"})),
        title=f"{variant} against speed-up",
        subtitle=f"{'Lower' if key == 'loss' else 'Higher'} right is better. "
        f"{'Measured in time' if timed else 'In theory, by layers: nothing was timed'}",
        variant=variant,
        height=380,
        hovermode="closest",
        showlegend=True,
    )
    return drawn_figure.add_vline(1, line={"color": MUTED, "width": 1, "dash": "dot"})


def histogram(record: Figure, source: PageSource) -> Figures:
    """Where samples, or the tokens of the runs of a sweep or of one generation, leave."""
    entries = source.meta.get("generation" if record.section == "generating" else "exits")
    if isinstance(entries, Mapping):
        entries = [{**(source.meta.get("settings") or {}), "exits": (entries.get("stats") or {}).get("exits")}]
    return readings((rule, _histogram(rule, every)) for rule, every in points_of(entries).items())


def _histogram(rule: str, every: list[dict[str, Any]]) -> go.Figure | None:
    """Share that leaves after each layer, one colour for each threshold."""
    drawn = [one for one in every if one["early"] is not None]
    drawn = [one for one in drawn if one["early"]] or drawn  # bars of one at which nothing leaves hide the others
    last = len(drawn) - 1
    kept = {round(at * last / (MOST_BARS - 1)) for at in range(MOST_BARS)}
    drawn = [one for index, one in enumerate(drawn) if index in kept or one.get("calibrated")]
    bars = []
    last = len(drawn) - 1
    layers = 0
    for index, one in enumerate(drawn):
        counts = one["exits"]
        color = SEQUENTIAL[3 + round(7 * index / last)] if last else CATEGORICAL[0]
        total = sum(counts)
        layers = len(counts)
        told = [f"{count:,} of {total:,}" for count in counts]
        left = PlottedCurve([*range(1, layers + 1)], [count / total for count in counts], told)
        bars.append(Drawn(left, one["name"], color, form=".1%", plot="bars"))
    settings: dict[str, Any] = {"variant": rule, "barmode": "group", "bargap": 0.25, "showlegend": True}
    return chart(bars, xaxis=layer_axis(layers), yaxis=value_axis("Share", "percent"), **settings)


def story(source: PageSource) -> dict[str, Any] | None:
    """The opening paragraph: the sentences of the findings, and the export of the layers that are enough."""
    meta = source.meta
    headline = meta.get("headline") or {}
    told = [str(entry["sentence"]) for entry in headline.values() if entry.get("sentence")]
    sentences = [one for one in told if not any(one != other and one in other for other in told)]
    depth = number((headline.get("effective_depth") or {}).get("value"))
    enough = int(depth) if depth is not None and depth < source.layers else 0
    return {"sentences": sentences, "next": export_of(meta, enough)} if sentences else None


def export_of(meta: Mapping[str, Any], layers: int) -> dict[str, str] | None:
    """The export of the first layers that are enough; None for 0."""
    name = (meta.get("model") or {}).get("name")
    if not name or not layers:
        return None
    command = f"fulldepth exit export {shlex.quote(short(name, 400))} --layers {layers} --output first-{layers}/"
    return {"why": f"export the first {layers} layers as a checkpoint:", "command": command}


def tables(source: PageSource) -> dict[str, list[Table]]:
    """Id of a section -> its tables: one row for each threshold."""
    found = {}
    for section, title, entries in (
        ("thresholds", "Every threshold", source.meta.get("exits")),
        ("generating", "Every run", source.meta.get("generation")),
    ):
        named = []
        for one in (one for every in points_of(entries).values() for one in every):
            timing = one.get("timing")
            factor = one.get("measured_speedup")
            drop = one.get("drop")
            if timing in ("busy", "few-rounds"):
                one["timed"] = timing.replace("-", " ")
            elif factor is not None:
                one["timed"] = f"{'≈ ' * (timing == 'no-difference')}{factor:.2f}×"
            if drop is not None:
                change, *ends = (minus(-100 * end, "+.1f") for end in (drop, *(one.get("drop_interval") or ())[::-1]))
                one["change"] = change + f" ({' to '.join(ends)})" * bool(ends)
            named.append((unescape(one["name"]) + " · chosen" * bool(one.get("calibrated")), one))
        found[section] = [of_record("thresholds", named, title)]
    return found


def tables_of_generation(source: PageSource) -> dict[str, list[Any]]:
    """Id of a section -> texts and tables."""
    meta = source.meta
    generation = meta.get("generation") or {}
    stats = {name: one for name, one in (generation.get("stats") or {}).items() if not isinstance(one, list | Mapping)}
    rows = [[short(name, 60).replace("_", " ").capitalize(), short(text, 200)] for name, text in flatten(stats).items()]
    prompts = generation.get("prompts") or []
    texts = generation.get("texts") or []
    items = []
    shown = texts[:MOST_TEXTS]
    for prompt, text in zip_longest(prompts[: len(shown)], shown):
        pair = (prompt or "", (text or "").removeprefix(prompt or ""))
        cuts = (one if len(one) <= MOST_CHARACTERS else one[: MOST_CHARACTERS - 1] + "…" for one in pair)
        items.append([visible(one, keep=" \n\t") for one in cuts])
    cut = f"The first {MOST_TEXTS} of {len(texts):,}; results.json has all." if len(texts) > MOST_TEXTS else ""
    return {
        "texts": [{"template": "texts", "items": items, "note": cut}] if items else [],
        "statistics": [Table("Counts and times", [""], rows, text=True)],
    }
