"""Early exit: accuracy against speed-up, and the layers after which samples or tokens leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import plotly.graph_objects as go

from fulldepth.figures import lens
from fulldepth.figures.comparison import overlays
from fulldepth.figures.curves import number
from fulldepth.figures.record import EXIT, EXITS, GENERATION, SINGLE, Figure, Method, Source, readings
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

MOST_BARS = 4
"""Number of thresholds in one histogram, besides those that were chosen."""
SPEEDUP = Method(
    "Speed-up of early exit",
    (),
    (
        "In theory, time is proportional to the layers that are run: m<sub>i</sub> samples or tokens leave after layer "
        "i of L. While a text is generated, later tokens need the layers that earlier ones left out, so there theory "
        "counts the layer positions that were computed, prompts included. What is measured is the time of the full "
        "model over the time with early exit, on the same data in interleaved rounds: the median of the rounds’ "
        "ratios, and a difference only where its 95 % interval does not hold 1. It includes what the rule itself "
        "costs: a final norm and a product with the head for each layer at which it decides."
    ),
    formula=r"\frac{∑_i L m_i}{∑_i i m_i}",
    source="Jiang et al., <cite>Tracing Representation Progression</cite>, Sec. 5.",
)
RULES = Method(
    "Rules and thresholds",
    (),
    (
        "Confidence: the probability of the top prediction exceeds the threshold. Margin: its lead over the second "
        "does. Entropy: one minus the entropy of the prediction over its maximum does. Patience: the number of layers "
        "in a row with the same top prediction, divided by L, does. At threshold 1 every sample takes all layers. A "
        "threshold for a target accuracy is chosen on one part of the data (divided by the hash of each document, row "
        "or image) and reported on the other."
    ),
)


@dataclass(frozen=True)
class Point:
    """Early exit at one threshold: when it stops, what that costs, and the time that it saves."""

    rule: str
    threshold: float | None
    policy: str
    """How the cache is filled; empty for models without one."""
    calibrated: bool
    counts: tuple[int, ...]
    """Number of samples or tokens that leave after each of the layers 1..L; empty if unknown."""
    values: Mapping[str, float | None]
    """Name -> number of the entry in the document."""
    theory: float | None
    """Speed-up if layers were all that takes time."""
    measured: float | None
    timing: str
    """What the times say: `differs`, `no-difference`, `few-rounds` or `busy`; empty if nothing was timed."""
    drop_interval: tuple[float, float] | None
    """95 % interval of the drop of accuracy."""

    @property
    def name(self) -> str:
        """Rule and threshold: `confidence 0.9`."""
        return self.rule if self.threshold is None else f"{self.rule} {self.threshold:.4g}"

    @property
    def speedup(self) -> float | None:
        """The measured speed-up, in theory where it was not measured."""
        return self.theory if self.measured is None else self.measured

    @property
    def early(self) -> float | None:
        """Share that leaves before the last layer."""
        return 1 - self.counts[-1] / sum(self.counts) if sum(self.counts) else None

    @property
    def mean_layer(self) -> float | None:
        """Mean layer after which samples or tokens leave."""
        total = sum(self.counts)
        return sum(at * count for at, count in enumerate(self.counts, start=1)) / total if total else None


def points(entries: Iterable[Mapping[str, Any]] | None) -> list[Point]:
    """The points on the reported part of the data, not those on which a threshold was chosen; in order."""
    made = [_point(entry) for entry in entries or () if entry.get("split") != "calibration"]
    return sorted(made, key=lambda point: (point.rule, point.policy, point.threshold or 0.0))


def _point(entry: Mapping[str, Any]) -> Point:
    low, high = (number(end) for end in entry.get("drop_interval") or (None, None))
    means = ("accuracy", "loss", "agreement", "drop")
    names = (*means, *(f"{name}_stderr" for name in means), "layers_computed")
    return Point(
        rule=label(entry.get("rule") or "threshold", 24),
        threshold=number(entry.get("threshold")),
        policy=label(entry.get("policy") or "", 24),
        calibrated=bool(entry.get("calibrated")),
        counts=tuple(int(count) for count in entry.get("exits") or ()),
        values={name: number(entry.get(name)) for name in names},
        theory=number(entry.get("theoretical_speedup")),
        measured=number(entry.get("measured_speedup")),
        timing=str(entry.get("timing") or ""),
        drop_interval=None if low is None or high is None else (low, high),
    )


def _by_series(every: Sequence[Point]) -> dict[str, list[Point]]:
    """Rule and policy -> points by threshold."""
    groups = groupby(every, key=lambda point: ", ".join(filter(None, (point.rule, point.policy))))
    return {name: list(group) for name, group in groups}


class Scale(NamedTuple):
    """A number on the vertical axis of a trade-off."""

    key: str
    title: str
    form: str
    """d3 number format."""


SCALES = (
    Scale("accuracy", "Accuracy", ".1%"),
    Scale("loss", "Loss (nats)", ".4f"),
    Scale("agreement", "Agreement with the full model", ".1%"),
)


def _tradeoffs(source: Source) -> Figures:
    """Of each rule and policy; of several models, of each model and rule."""
    models = [("", source.meta)] if source.kind == EXIT else []
    models += [(label(one.get("label", "?"), 40), one) for one in source.meta.get("models") or []]
    groups, full = {}, []
    for name, entry in models:
        full.append({"agreement": 1.0, **(entry.get("full") or {})})
        for rule, its_points in _by_series(points(entry.get("exits"))).items():
            groups[", ".join(filter(None, (name, rule)))] = its_points
    return readings((scale.key, tradeoff(groups, full, scale)) for scale in SCALES)


def _of_generation(source: Source) -> Figures:
    runs = source.meta.get("generation")
    groups = _by_series(points(runs if isinstance(runs, list) else None))
    title = "Agreement against speed-up while generating"
    return readings([("", tradeoff(groups, [{"agreement": 1.0}], SCALES[-1], title))])


def tradeoff(
    groups: Mapping[str, Sequence[Point]], full: Sequence[Mapping[str, Any]], scale: Scale, title: str = ""
) -> go.Figure | None:
    """A number against speed-up: a line of thresholds for each group, and the full models; None without points."""
    traces, chosen, words = [], [], []
    for index, (name, every) in enumerate(groups.items()):
        drawn = [one for one in every if one.values.get(scale.key) is not None and one.speedup is not None]
        if not drawn:
            continue
        color, heights = categorical(index)["color"], [point.values[scale.key] or 0.0 for point in drawn]
        chosen += [(point.speedup, point.values[scale.key]) for point in drawn if point.calibrated]
        low, height = drawn[0], minus(heights[0], scale.form.replace("4", "3"))
        words.append(f"{name}: {low.speedup:.2f}×, {height} at the lowest threshold.")
        traces.append(
            go.Scatter(
                x=[point.speedup for point in drawn],
                y=heights,
                name=name,
                mode="lines+markers",
                line={"color": color, "width": 2},
                marker={"color": color, "size": 8},
                error_y={
                    "array": [point.values.get(f"{scale.key}_stderr") or 0 for point in drawn],
                    "color": color,
                },
                customdata=[
                    [point.name, "in theory" if point.measured is None else "measured", point.early or 0]
                    for point in drawn
                ],
                hovertemplate=f"%{{customdata[0]}}: {scale.title.lower()} <b>%{{y:{scale.form}}}</b><br>%{{x:.2f}}× "
                "%{customdata[1]}<br>%{customdata[2]:.1%} leave early<extra>%{fullData.name}</extra>",
            )
        )
    if not traces:
        return None
    whole = [(1.0, value) for one in full if (value := number(one.get(scale.key))) is not None]
    for name, places, symbol, size in (
        ("full model", whole, "square", 10),
        ("chosen on other data", chosen, "circle-open", 17),
    ):
        marker = {"color": INK, "symbol": symbol, "size": size}
        x, y = [place for place, _ in places], [height for _, height in places]
        traces += [go.Scatter(x=x, y=y, name=name, mode="markers", marker=marker, hoverinfo="skip")] if places else []
    timed = any(point.measured is not None for every in groups.values() for point in every)
    variant = scale.title.removesuffix(" (nats)")
    drawn_figure = figure(
        traces,
        title=title or f"{variant} against speed-up",
        subtitle=f"{'Lower' if scale.key == 'loss' else 'Higher'} right is better. "
        f"{'Measured in time' if timed else 'In theory, by layers: nothing was timed'}",
        alt=" ".join(words),
        xaxis=axis("Speed-up over the full model", ticksuffix="×"),
        yaxis=axis(scale.title, **({"tickformat": ".1~%"} if scale.form.endswith("%") else {})),
        variant=variant,
        hovermode="closest",
        height=380,
        showlegend=True,
    )
    return drawn_figure.add_vline(1, line={"color": MUTED, "width": 1, "dash": "dot"})


def _histograms_of_generation(source: Source) -> Figures:
    """Of the runs of a sweep, or of the one generation."""
    generation = source.meta.get("generation")
    if isinstance(generation, Mapping):
        settings = source.meta.get("settings") or {}
        named = {name: settings.get(name) for name in ("rule", "policy", "threshold")}
        generation = [{**named, "exits": (generation.get("stats") or {}).get("exits")}]
    return _histograms(points(generation))


def _histograms(every: Sequence[Point]) -> Figures:
    return readings((name, _histogram(name, its_points)) for name, its_points in _by_series(every).items())


def _histogram(name: str, its_points: Sequence[Point]) -> go.Figure | None:
    """Share that leaves after each layer, one colour for each threshold."""
    drawn = [point for point in its_points if sum(point.counts)]
    drawn = [point for point in drawn if point.early] or drawn  # one at which nothing leaves hides the others
    if not drawn:
        return None
    kept = {round(at * (len(drawn) - 1) / (MOST_BARS - 1)) for at in range(MOST_BARS)}
    drawn = [point for index, point in enumerate(drawn) if index in kept or point.calibrated]
    layers = len(drawn[0].counts)
    traces = []
    for index, point in enumerate(drawn):
        total = sum(point.counts)
        shade = SEQUENTIAL[3 + round(7 * index / (len(drawn) - 1))] if len(drawn) > 1 else CATEGORICAL[0]
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
    return figure(
        traces,
        alt=" ".join(f"{point.name}: {point.early or 0:.0%} leave early." for point in drawn),
        xaxis=layer_axis(layers),
        yaxis=axis("Share", tickformat=".0%", rangemode="tozero"),
        variant=name,
        barmode="group",
        bargap=0.25,
        showlegend=True,
    )


def _stopping() -> tuple[Figure, ...]:
    """The figures of a model that stops all samples at one layer: of one model, and of several."""
    shared = {"section": "stopping", "secondary": False}
    records = [one for one in lens.FIGURES if one.name in ("lens_accuracy", "lens_loss") and SINGLE in one.kinds]
    alone = [one.beside(one.name, one.draw, EXIT, **shared) for one in records]
    return (*alone, *(one.beside(one.name, _overlaid(one), EXITS, **shared) for one in records))


def _overlaid(record: Figure) -> Callable[[Source], Figures]:
    return lambda source: overlays(source, record.quantities(source.table))


FIGURES = (
    Figure("exit_tradeoff", "exits", _tradeoffs, kinds=(EXIT, EXITS), methods=(SPEEDUP, RULES)),
    Figure(
        "exit_histogram",
        "exits",
        lambda source: _histograms(points(source.meta.get("exits"))),
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
    *_stopping(),
)
