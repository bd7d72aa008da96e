"""Early exit and generation: quality against speed-up, where samples or tokens leave, tables of thresholds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from itertools import groupby
from typing import Any

import plotly.graph_objects as go

from fulldepth.reporting import measured
from fulldepth.reporting.charts import Figure, readings
from fulldepth.reporting.draw import plane, points
from fulldepth.reporting.phrases import NOTHING, percent, short, visible
from fulldepth.reporting.source import EXIT, PageSource, number
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
from fulldepth.reporting.tables import Table, by_subject, flatten, settings_table

MOST_BARS = 4
"""Number of thresholds in one histogram, besides those that were chosen."""
MOST_TEXTS, MOST_CHARACTERS = 40, 6000
"""Largest number of texts on a page, and of characters of each."""
SCALES = {
    "accuracy": ("Accuracy", ".1%"),
    "loss": ("Loss (nats)", ".4f"),
    "agreement": ("Agreement with the full model", ".1%"),
}
"""Number of a point -> its axis title and d3 number format."""


@dataclass(frozen=True)
class ExitPoint:
    """Early exit at one threshold: when it stops, what that costs, and the time that it saves."""

    entry: Mapping[str, Any]
    """The entry in the document."""

    def value(self, name: str) -> float | None:
        """A finite number of the entry."""
        return number(self.entry.get(name))

    @property
    def series(self) -> str:
        """Rule, and policy of the cache where there is one."""
        return ", ".join(label(self.entry.get(name) or "", 24) for name in ("rule", "policy") if self.entry.get(name))

    @property
    def name(self) -> str:
        """Rule and threshold: `confidence 0.9`."""
        rule, threshold = label(self.entry.get("rule") or "threshold", 24), self.value("threshold")
        return rule if threshold is None else f"{rule} {threshold:.4g}"

    @property
    def counts(self) -> list[int]:
        """Number of samples or tokens that leave after each of the layers 1..L; empty if unknown."""
        return [int(count) for count in self.entry.get("exits") or ()]

    @property
    def speedup(self) -> float | None:
        """The measured speed-up, in theory where it was not measured."""
        measured = self.value("measured_speedup")
        return self.value("theoretical_speedup") if measured is None else measured

    @property
    def early(self) -> float | None:
        """Share that leaves before the last layer."""
        return 1 - self.counts[-1] / sum(self.counts) if sum(self.counts) else None

    @property
    def mean_layer(self) -> float | None:
        """Mean layer after which samples or tokens leave."""
        total = sum(self.counts)
        return sum(at * count for at, count in enumerate(self.counts, start=1)) / total if total else None


def points_of(entries: object) -> dict[str, list[ExitPoint]]:
    """Rule and policy -> points by threshold, on the reported part of the data, not on which a threshold was chosen."""
    listed = entries if isinstance(entries, list) else []
    made = [ExitPoint(entry) for entry in listed if entry.get("split") != "calibration"]
    made.sort(key=lambda point: (point.series, point.value("threshold") or 0.0))
    return {name: list(group) for name, group in groupby(made, key=lambda point: point.series)}


def tradeoff(record: Figure, source: PageSource) -> Figures:
    """A number against speed-up of each rule and policy; of several models, of each model and rule."""
    if record.section == "generating":
        groups = points_of(source.meta.get("generation"))
        return readings([("", _tradeoff(groups, [{"agreement": 1.0}], "agreement"))])
    models = [("", source.meta)] if source.kind == EXIT else []
    models += [(label(one.get("label", "?"), 40), one) for one in source.meta.get("models") or []]
    groups = {
        ", ".join(filter(None, (name, series))): every
        for name, entry in models
        for series, every in points_of(entry.get("exits")).items()
    }
    full = [{"agreement": 1.0, **(entry.get("full") or {})} for _, entry in models]
    return readings((key, _tradeoff(groups, full, key)) for key in SCALES)


def _tradeoff(groups: Mapping[str, list[ExitPoint]], full: Sequence[Mapping[str, Any]], key: str) -> go.Figure | None:
    """A line of thresholds for each group, and the full models; None without points."""
    title, form = SCALES[key]
    traces, chosen = [], []
    for index, (name, every) in enumerate(groups.items()):
        places = [(one, one.speedup, one.value(key)) for one in every]
        drawn = [(one, x, y) for one, x, y in places if x is not None and y is not None]
        if not drawn:
            continue
        chosen += [(x, y) for one, x, y in drawn if one.entry.get("calibrated")]
        color = categorical(index)["color"]
        traces.append(
            points(
                name, [x for _, x, _ in drawn], [y for *_, y in drawn], color,
                f"%{{customdata[0]}}: {title.lower()} <b>%{{y:{form}}}</b><br>%{{x:.2f}}× %{{customdata[1]}}<br>"
                "%{customdata[2]:.1%} leave early",
                lines=True,
                error_y={"array": [one.value(f"{key}_stderr") or 0 for one, *_ in drawn], "color": color},
                customdata=[
                    [one.name, "in theory" if one.value("measured_speedup") is None else "measured", one.early or 0]
                    for one, *_ in drawn
                ],
            )
        )  # fmt: skip
    if not traces:
        return None
    whole = [(1.0, value) for one in full if (value := number(one.get(key))) is not None]
    for name, at, symbol, size in (
        ("full model", whole, "square", 10),
        ("chosen on the other half", chosen, "circle-open", 17),
    ):
        marker = {"symbol": symbol, "size": size}
        traces += [points(name, [x for x, _ in at], [y for _, y in at], INK, marker=marker)] if at else []
    timed = any(one.value("measured_speedup") is not None for every in groups.values() for one in every)
    variant = title.removesuffix(" (nats)")
    drawn_figure = plane(
        traces,
        "Speed-up over the full model",
        title,
        form=".1~%" if form.endswith("%") else "",
        suffix="×",
        title=f"{variant} against speed-up",
        subtitle=f"{'Lower' if key == 'loss' else 'Higher'} right is better. "
        f"{'Measured in time' if timed else 'In theory, by layers: nothing was timed'}",
        variant=variant,
        height=380,
    )
    return drawn_figure.add_vline(1, line={"color": MUTED, "width": 1, "dash": "dot"})


def histogram(record: Figure, source: PageSource) -> Figures:
    """Where samples, or the tokens of the runs of a sweep or of one generation, leave."""
    entries = source.meta.get("generation" if record.section == "generating" else "exits")
    if isinstance(entries, Mapping):
        settings = source.meta.get("settings") or {}
        named = {name: settings.get(name) for name in ("rule", "policy", "threshold")}
        entries = [{**named, "exits": (entries.get("stats") or {}).get("exits")}]
    return readings((name, _histogram(name, every)) for name, every in points_of(entries).items())


def _histogram(name: str, every: Iterable[ExitPoint]) -> go.Figure | None:
    """Share that leaves after each layer, one colour for each threshold."""
    drawn = [point for point in every if sum(point.counts)]
    drawn = [point for point in drawn if point.early] or drawn  # one at which nothing leaves hides the others
    if not drawn:
        return None
    kept = {round(at * (len(drawn) - 1) / (MOST_BARS - 1)) for at in range(MOST_BARS)}
    drawn = [point for index, point in enumerate(drawn) if index in kept or point.entry.get("calibrated")]
    layers, last = len(drawn[0].counts), len(drawn) - 1
    traces = [
        go.Bar(
            x=list(range(1, layers + 1)),
            y=[count / sum(point.counts) for count in point.counts],
            customdata=[f"{count:,} of {sum(point.counts):,}" for count in point.counts],
            name=point.name,
            marker={"color": SEQUENTIAL[3 + round(7 * index / last)] if last else CATEGORICAL[0], "line": {"width": 0}},
            hovertemplate="%{y:.1%}  (%{customdata})",
        )
        for index, point in enumerate(drawn)
    ]
    return figure(
        traces,
        xaxis=layer_axis(layers),
        yaxis=axis("Share", tickformat=".0%", rangemode="tozero"),
        variant=name,
        barmode="group",
        bargap=0.25,
        showlegend=True,
    )


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
    command = f"fulldepth exit export {shlex.quote(short(name, 160))} --layers {layers} --output first-{layers}/"
    return {"why": f"export the first {layers} layers as a checkpoint:", "command": command}


def tables(source: PageSource) -> dict[str, list[Table]]:
    """Id of a section -> its tables."""
    return {
        "thresholds": [thresholds("Every threshold", source.meta.get("exits"))],
        "generating": [thresholds("Every run", source.meta.get("generation"))],
        "settings": [settings_table("All settings", source.meta.get("settings"))],
    }


def thresholds(title: str, entries: object) -> Table:
    """One row for each threshold."""

    def cell(key: str, form: Callable[[float], str]) -> Callable[[ExitPoint], str]:
        return lambda point: NOTHING if (value := point.value(key)) is None else form(value)

    columns: dict[str, Callable[[ExitPoint], str]] = {
        "Leave early": lambda point: percent(point.early),
        "Exit layer, mean": lambda point: NOTHING if point.mean_layer is None else f"{point.mean_layer:.1f}",
        "Layers computed": cell("layers_computed", "{:.1f}".format),
        "Accuracy": cell("accuracy", percent),
        "Change": _changed,
        "Loss": cell("loss", "{:.3f}".format),
        "Same as full": cell("agreement", percent),
        "Speed-up": _timed,
        "In theory": cell("theoretical_speedup", "{:.2f}×".format),
    }
    named = []
    for one in (one for every in points_of(entries).values() for one in every):
        words = [one.name, *one.series.split(", ")[1:], "chosen" if one.entry.get("calibrated") else ""]
        named.append((unescape(" · ".join(filter(None, words))), one))
    note = (
        "Change: of accuracy in points, with its 95 % interval where it is known. Speed-up: measured beside the full "
        "model in interleaved rounds; ≈ where its 95 % interval holds 1. In theory, only layers take time. Layers "
        "computed: for a position of a generated text on average, prompts included. Chosen: on one half of the data, "
        "and reported on the other."
    )
    return by_subject(title, "Threshold", named, columns, note)


def _timed(point: ExitPoint) -> str:
    """The measured speed-up, or why there is none."""
    timing, factor = str(point.entry.get("timing") or ""), point.value("measured_speedup")
    if timing in ("busy", "few-rounds"):
        return timing.replace("-", " ")
    return NOTHING if factor is None else f"{'≈ ' * (timing == 'no-difference')}{factor:.2f}×"


def _changed(point: ExitPoint) -> str:
    """Points of accuracy gained, with the 95 % interval of the difference."""
    drop, ends = point.value("drop"), point.entry.get("drop_interval")
    if drop is None:
        return NOTHING
    interval = "" if not ends else f" ({minus(-100 * ends[1], '+.1f')} to {minus(-100 * ends[0], '+.1f')})"
    return minus(-100 * drop, "+.1f") + interval


def tables_of_models(source: PageSource) -> dict[str, list[Table]]:
    """Accuracy at equal speed, and speed at equal accuracy; empty where nothing was timed."""
    speeds = source.meta.get("speedups") or {}
    entries = [(entry, str(entry.get("label"))) for entry in source.meta.get("models") or []]
    rows = [(measured.labelled(entry), speeds[label]) for entry, label in entries if label in speeds]

    def times(row: Mapping[str, Any], key: str) -> str:
        return NOTHING if (factor := number(row.get(key))) is None else f"{factor:.2f}×"

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "Full accuracy": lambda row: percent(number(row.get("full"))),
        "Equal accuracy": lambda row: times(row, "speedup"),
        "As the baseline": lambda row: times(row, "speedup_at_baseline"),
    }
    for one in dict.fromkeys(speedup for _, row in rows for speedup in row.get("at") or {}):
        columns[f"At {one}×"] = lambda row, at=one: percent(number((row.get("at") or {}).get(at)))  # type: ignore[misc]
    note = (
        "Equal accuracy: the measured speed-up of the threshold that was chosen for no loss of accuracy on the "
        "calibration part, on the other part. As the baseline: the same for at least the full baseline’s accuracy. "
        "At a speed-up: the accuracy there, on the straight line, by time, between two thresholds. 1.36× is the "
        "speed-up of the paper’s aligned DeiT. A model that was read without --target-accuracy-drop has one part: no "
        "threshold is chosen for it."
    )
    table = by_subject("Equal accuracy, and equal speed", "Model", rows, columns, note)
    return {"thresholds": [table]} if rows else {}


def tables_of_generation(source: PageSource) -> dict[str, list[Any]]:
    """Id of a section -> texts and tables."""
    meta = source.meta
    generation = meta.get("generation") or {}
    stats = {name: one for name, one in (generation.get("stats") or {}).items() if not isinstance(one, list | Mapping)}
    rows = [[short(name, 60).replace("_", " ").capitalize(), short(text, 200)] for name, text in flatten(stats).items()]
    prompts, texts = generation.get("prompts") or [], generation.get("texts") or []
    items = []
    for index, text in enumerate(texts[:MOST_TEXTS]):
        prompt = str(prompts[index] or "") if index < len(prompts) else ""
        items.append([_shown(prompt), _shown(str(text or "").removeprefix(prompt))])
    cut = f"The first {MOST_TEXTS} of {len(texts):,}; results.json has all." if len(texts) > MOST_TEXTS else ""
    return {
        "texts": [{"template": "texts", "items": items, "note": cut}] if items else [],
        "statistics": [Table("Counts and times", [""], rows, text=True)],
        "settings": [settings_table("All settings", meta.get("settings"))],
    }


def _shown(text: str) -> str:
    cut = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    return visible(cut, keep=" \n\t")
