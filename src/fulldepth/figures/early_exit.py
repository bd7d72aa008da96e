"""Early exit: quality against speed-up, and the layers after which samples or tokens leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fulldepth.figures import lens
from fulldepth.figures.comparison import overlays
from fulldepth.figures.curves import number
from fulldepth.figures.draw import legend_entry
from fulldepth.figures.exit_methods import RULES, SPEEDUP
from fulldepth.figures.exit_points import ERROR, Point, by_series, points
from fulldepth.figures.record import EXIT, EXITS, GENERATION, SINGLE, Figure, Source, readings
from fulldepth.figures.style import (
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

LABELLED = 8
"""Number of points up to which each is labelled with its threshold."""
MOST_BARS = 4
"""Maximum number of thresholds in one histogram."""
WIDE = 4.0
"""Speed-up from which the axis is logarithmic."""
TICKS = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Ticks of a logarithmic axis."""


@dataclass(frozen=True)
class Group:
    """Points that one line connects."""

    name: str
    color: str
    points: Sequence[Point]
    full: Mapping[str, Any]
    """Numbers of the model without early exit."""


@dataclass(frozen=True)
class Scale:
    """A number on the vertical axis of quality against speed-up."""

    key: str
    title: str
    form: str
    """d3 number format."""
    words: str
    """Python number format."""

    def settings(self) -> dict[str, Any]:
        """Of the axis."""
        return {"tickformat": ".1~%"} if self.form.endswith("%") else {}


ACCURACY = Scale("accuracy", "Accuracy", ".1%", ".1%")
LOSS = Scale("loss", "Loss (nats)", ".4f", ".3f")
AGREEMENT = Scale("agreement", "Agreement with the full model", ".1%", ".1%")
SCALES = (ACCURACY, LOSS, AGREEMENT)


def groups_of(source: Source) -> list[Group]:
    """One group for each rule and policy, or for each model and those that it has."""
    models = source.meta.get("models") if source.kind == EXITS else None
    entries = [("", source.meta)] if models is None else [(label(one.get("label", "?"), 40), one) for one in models]
    groups: list[Group] = []
    for name, entry in entries:
        series = by_series(points(entry.get("exits")))
        for rule, its_points in series.items():
            named = ", ".join(filter(None, (name, rule if len(series) > 1 or not name else "")))
            color = categorical(len(groups))["color"]
            groups.append(Group(named, color, its_points, entry.get("full") or {}))
    return groups


def _tradeoffs(source: Source) -> Figures:
    several = source.kind == EXITS
    return readings((scale.key, tradeoff(groups_of(source), scale, several=several)) for scale in SCALES)


def _of_generation(source: Source) -> Figures:
    series = by_series(points(source.meta.get("generation") if source.kind == EXIT else None))
    groups = [
        Group(name, categorical(index)["color"], its_points, {"agreement": 1.0})
        for index, (name, its_points) in enumerate(series.items())
    ]
    return readings([("", tradeoff(groups, AGREEMENT, title="Agreement against speed-up while generating"))])


def tradeoff(groups: Sequence[Group], scale: Scale, title: str = "", *, several: bool = False) -> go.Figure | None:
    """Quality against speed-up: a line of thresholds for each group, measured and in theory; None without points.

    Of several models that were timed, only what was measured is drawn.
    """
    drawn = [(group, _drawable(group, scale)) for group in groups]
    drawn = [(group, its_points) for group, its_points in drawn if its_points]
    if not drawn:
        return None
    labelled = sum(len(its_points) for _, its_points in drawn) <= LABELLED
    timed = any(point.measured is not None for _, its_points in drawn for point in its_points)
    traces: list[Any] = []
    for group, its_points in drawn:
        lines = _lines(group, its_points, scale, timed, labelled)
        traces += lines[1:] if several and timed else lines
    if timed and not several:
        traces.append(legend_entry("in theory", marker={"symbol": "circle-open", "color": MUTED, "size": 8}))
    traces += _chosen([point for _, its_points in drawn for point in its_points], scale)
    traces += _full(drawn, scale)
    how = "Filled: measured; open: if layers were all that takes time" if timed else "In theory: nothing was timed"
    how = "Measured beside each full model (square)" if several and timed else how
    shown = figure(
        traces,
        title=title or f"{scale.title.removesuffix(' (nats)')} against speed-up",
        subtitle=f"{'Lower' if scale.key == 'loss' else 'Higher'} right is better. {how}",
        alt=_in_words(drawn, scale),
        xaxis=_across([point for _, its_points in drawn for point in its_points]),
        yaxis=axis(scale.title, **scale.settings()),
        variant=scale.title.removesuffix(" (nats)"),
        hovermode="closest",
        height=380,
        showlegend=True,
    )
    return shown.add_vline(1, line={"color": MUTED, "width": 1, "dash": "dot"})


def _across(every: Sequence[Point]) -> dict[str, Any]:
    """The axis of speed-ups; logarithmic where some are so large that those near 1 would fall together."""
    title, values = (
        "Speed-up over the full model",
        [one for point in every for one in (point.theory, point.measured) if one],
    )
    if max(values) < WIDE or min(values) < TICKS[0]:
        return axis(title, ticksuffix="×")
    return axis(title, type="log", tickvals=list(TICKS), ticktext=[f"{tick:g}×" for tick in TICKS])


def _drawable(group: Group, scale: Scale) -> list[Point]:
    return [point for point in group.points if point.values.get(scale.key) is not None and point.speedup is not None]


def _lines(group: Group, its_points: Sequence[Point], scale: Scale, timed: bool, labelled: bool) -> list[go.Scatter]:
    """The thresholds of a group: a line through the measured points, and the same in theory."""
    heights = [point.values[scale.key] for point in its_points]
    errors = [point.values.get(scale.key + ERROR) for point in its_points]
    shared: dict[str, Any] = {
        "customdata": [[point.name, *_layers(point)] for point in its_points],
        "legendgroup": group.name,
        "name": group.name,
    }
    hover = (
        f"%{{customdata[0]}}: {scale.title.lower()} <b>%{{y:{scale.form}}}</b><br>%{{x:.2f}}× {{how}}"
        "<br>%{customdata[1]}<extra>%{fullData.name}</extra>"
    )
    theory = go.Scatter(
        x=[point.theory for point in its_points],
        y=heights,
        mode="lines+markers",
        line={"color": group.color, "width": 1, "dash": "dot"},
        marker={"color": group.color, "size": 8, "symbol": "circle-open", "line": {"width": 1.5}},
        hovertemplate=hover.replace("{how}", "in theory"),
        showlegend=not timed,
        **shared,
    )
    if not timed:
        return [theory]
    bars = {"array": [error or 0 for error in errors], "color": group.color, "thickness": 1.2, "width": 4}
    measured = go.Scatter(
        x=[point.measured for point in its_points],
        y=heights,
        mode="lines+markers+text" if labelled else "lines+markers",
        text=["" if point.threshold is None else f"{point.threshold:.4g}" for point in its_points],
        textposition="bottom left",
        textfont={"size": 11, "color": MUTED},
        line={"color": group.color, "width": 2},
        marker={"color": group.color, "size": 8},
        hovertemplate=hover.replace("{how}", "measured"),
        **({"error_y": bars} if any(errors) else {}),
        **shared,
    )
    return [theory, measured]


def _layers(point: Point) -> list[str]:
    """The layers that were run, in words."""
    mean, early = point.mean_layer, point.early
    if mean is None or early is None:
        return ["layers unknown"]
    return [f"{mean:.1f} of {len(point.counts)} layers on average, {early:.1%} leave early"]


def _chosen(every: Sequence[Point], scale: Scale) -> list[go.Scatter]:
    """A ring around the calibrated threshold."""
    chosen = [point for point in every if point.calibrated]
    if not chosen:
        return []
    return [
        go.Scatter(
            x=[point.speedup for point in chosen],
            y=[point.values[scale.key] for point in chosen],
            name="chosen on other data",
            mode="markers",
            marker={"color": INK, "size": 17, "symbol": "circle-open", "line": {"width": 1.5}},
            hoverinfo="skip",
        )
    ]


def _full(drawn: Sequence[tuple[Group, Sequence[Point]]], scale: Scale) -> list[go.Scatter]:
    """The models without early exit."""
    heights = {
        group.name: value
        for group, _ in drawn
        if (value := number(group.full.get(scale.key, _perfect(scale)))) is not None
    }
    if not heights:
        return []
    one = len(set(heights.values())) == 1
    shades = {group.name: INK if one else group.color for group, _ in drawn}
    values = dict.fromkeys((height, shades[name]) for name, height in heights.items())
    return [
        go.Scatter(
            x=[1.0] * len(values),
            y=[height for height, _ in values],
            name="full model",
            mode="markers",
            marker={"color": [shade for _, shade in values], "size": 10, "symbol": "square"},
            hovertemplate=f"full model: <b>%{{y:{scale.form}}}</b><extra></extra>",
        )
    ]


def _perfect(scale: Scale) -> float | None:
    """Agreement of a model with itself."""
    return 1.0 if scale is AGREEMENT else None


def _in_words(drawn: Sequence[tuple[Group, Sequence[Point]]], scale: Scale) -> str:
    """The point of the lowest threshold of each group."""
    texts = []
    for group, its_points in drawn:
        point = min(its_points, key=lambda one: one.threshold or 0.0)
        value = minus(point.values[scale.key] or 0.0, scale.words)
        how = "" if point.measured is not None else " in theory"
        texts.append(
            f"{group.name}: at {point.threshold:.4g}, the lowest, {point.speedup:.2f}×{how}, {value}."
            if point.threshold is not None
            else f"{group.name}: {point.speedup:.2f}×{how}, {value}."
        )
    return " ".join(texts)


def _histograms(source: Source) -> Figures:
    return _exits(points(source.meta.get("exits")))


def _histograms_of_generation(source: Source) -> Figures:
    """Of the runs of a sweep, or of the one generation."""
    generation = source.meta.get("generation")
    if isinstance(generation, Mapping):
        settings, stats = source.meta.get("settings") or {}, generation.get("stats") or {}
        threshold = settings.get("threshold")
        entry = {**{key: settings.get(key) for key in ("rule", "policy")}, "exits": stats.get("exits")}
        if isinstance(threshold, int | float) and not isinstance(threshold, bool):
            entry["threshold"] = threshold
        generation = [entry]
    return _exits(points(generation))


def _exits(every: Sequence[Point]) -> Figures:
    return readings((name, _histogram(name, its_points)) for name, its_points in by_series(every).items())


def _histogram(name: str, its_points: Sequence[Point]) -> go.Figure | None:
    """Share that leaves after each layer, one colour for each threshold."""
    drawn = [point for point in its_points if sum(point.counts)]
    drawn = [point for point in drawn if point.early] or drawn  # one at which nothing leaves hides the others
    if not drawn:
        return None
    drawn = _some(drawn)
    layers = len(drawn[0].counts)
    shades = [SEQUENTIAL[3 + round(7 * at / max(len(drawn) - 1, 1))] for at in range(len(drawn))]
    traces = []
    for point, shade in zip(drawn, [CATEGORICAL[0]] if len(drawn) == 1 else shades, strict=True):
        total = sum(point.counts)
        traces.append(
            go.Bar(
                x=list(range(1, layers + 1)),
                y=[count / total for count in point.counts],
                customdata=[f"{count:,} of {total:,}" for count in point.counts],
                name=point.name,
                marker={"color": shade, "line": {"width": 0}},
                hovertemplate="%{y:.1%}  (%{customdata})",
            )
        )
    words = [
        f"{point.name}: {point.early:.0%} leave early{_most(point)}." for point in drawn[-3:] if point.early is not None
    ]
    return figure(
        traces,
        alt=" ".join(words),
        xaxis=layer_axis(layers),
        yaxis=axis("Share", tickformat=".0%", rangemode="tozero"),
        variant=name,
        barmode="group",
        bargap=0.25,
        showlegend=True,
    )


def _some(every: list[Point]) -> list[Point]:
    """Up to `MOST_BARS` points, with the chosen one, from the lowest threshold to the highest."""
    if len(every) <= MOST_BARS:
        return every
    kept = {round(at * (len(every) - 1) / (MOST_BARS - 1)) for at in range(MOST_BARS)}
    chosen = {index for index, point in enumerate(every) if point.calibrated}
    middle = [index for index in sorted(kept - chosen) if 0 < index < len(every) - 1]
    kept = (kept - set(middle[: len(chosen - kept)])) | chosen
    return [every[index] for index in sorted(kept)[-MOST_BARS:]]


def _most(point: Point) -> str:
    early = point.counts[:-1]
    return f", most after layer {max(range(len(early)), key=early.__getitem__) + 1}" if sum(early) else ""


def _of_layers() -> tuple[Figure, ...]:
    """The figures of a model that stops all samples at one layer: of one model, and of several."""
    shared = {"section": "stopping", "secondary": False}
    every = lens.FIGURES
    names = ("lens_accuracy", "lens_loss")
    records = [one for one in every if one.name in names and SINGLE in one.kinds]
    alone = [one.beside(one.name, one.draw, EXIT, **shared) for one in records]
    return (*alone, *(one.beside(one.name, _overlaid(one), EXITS, **shared) for one in records))


def _overlaid(record: Figure) -> Callable[[Source], Figures]:
    return lambda source: overlays(source, record.quantities(source.table))


FIGURES = (
    Figure(
        "exit_tradeoff",
        "exits",
        _tradeoffs,
        kinds=(EXIT, EXITS),
        methods=(SPEEDUP, RULES),
    ),
    Figure(
        "exit_histogram",
        "exits",
        _histograms,
        kinds=(EXIT,),
        title="Where it stops",
        subtitle="Share that leaves after each layer; the rest runs through all of them",
    ),
    Figure("generation_tradeoff", "generating", _of_generation, kinds=(EXIT,)),
    Figure(
        "generation_histogram",
        "generating",
        _histograms_of_generation,
        kinds=(EXIT, GENERATION),
        title="Where tokens stop",
        subtitle="Share of the generated tokens that leave after each layer",
    ),
    *_of_layers(),
)
