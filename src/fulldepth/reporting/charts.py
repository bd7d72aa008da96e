"""Draws the figures of `figures.yaml`: one list of records, lines and maps of one model or of several."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pydantic.dataclasses import dataclass

from fulldepth.core.uncertainty import quantile
from fulldepth.reporting.draw import (
    NO_CURVE,
    Drawn,
    add_level,
    chart,
    grid,
    heat,
    points,
    scale_without,
    set_first_apart,
    shade_key,
    value_axis,
)
from fulldepth.reporting.kinds import GROUPS, SINGLE
from fulldepth.reporting.phrases import TERMS
from fulldepth.reporting.source import PageSource, PlottedCurve, curve_of, select
from fulldepth.reporting.style import (
    CATEGORICAL,
    DASHES,
    MUTED,
    SEQUENTIAL,
    Figures,
    axis,
    by_depth,
    categorical,
    figure,
    label,
    layer_axis,
    read_yaml,
)

STEP_AXIS = axis("Training step", tickformat=",d", nticks=7, unifiedhovertitle={"text": "Step %{x:,}"})
PROFILES = 7
"""Maximum number of steps whose displacement is drawn over layers."""
SAME = 0.1
"""If the means with and without first tokens differ by at most this share, only one of them is drawn."""
SMALLEST = 0.05
"""Smallest range of the colours of differences, so that noise stays pale."""
DIFFERENCES = {"percent": "percent", "share": "percent", "rate": "rate"}
"""Scale of values -> scale of their differences."""


@dataclass(frozen=True, config={"extra": "forbid"})
class Line:
    """A curve of a figure.

    `statistic` and `site` may be regular expressions; their named groups fill `name`, `variant` and `key`.
    """

    measure: str
    statistic: str = "mean|value"
    site: str | None = "residual"
    name: str = ""
    variant: str = ""
    """The variant of the figure that has this line; empty = all lines are in one."""
    key: str = ""
    """Suffix of the name of the figure that compares the line: `figure:key`."""
    color: int = 0
    dash: str = ""
    form: str = ".4f"
    """d3 number format of hover boxes."""
    plot: str = "line"
    """See `draw.Drawn`."""
    errors: str = ""
    """Statistic of the half lengths of error bars."""
    layers_back: int | None = None
    """For lines over steps: distance of the layer from the last one. None = rows without a layer."""
    to_last: bool = False
    """True for a measure of pairs of layers: the curve is that of each layer and layer L."""
    compared: bool = False
    """True if the line is compared between models and followed over training."""

    def expanded(self, table: pd.DataFrame) -> Iterator[Line]:
        """Yield one line for each statistic and site in the table that match the patterns.

        Lines differ in dash if the pattern is in `statistic`, else in colour.
        """
        pattern = f"({self.statistic})@({self.site or '.*'})"
        if "(?P" not in pattern:
            yield self
            return
        pairs = select(table, self.measure)[["statistic", "site"]].dropna().drop_duplicates().to_numpy()
        matches = [match for pair in pairs if (match := re.fullmatch(pattern, "@".join(pair)))]
        for index, match in enumerate(matches):
            groups = match.groupdict()
            statistic, site = match.string.split("@")
            labels = {name: TERMS.get(text) or label(text) for name, text in groups.items()}
            style = {"dash": DASHES[index % 4]} if "(?P" in self.statistic else {"color": self.color + index}
            yield replace(
                self, statistic=statistic, site=site, name=self.name.format(**labels), key=self.key.format(**groups),
                variant=self.variant.format(**labels), **style,
            )  # fmt: skip


@dataclass(frozen=True, config={"extra": "forbid"})
class Reading:
    """A map: one statistic over pairs of layers.

    `site` may be a regular expression, whose named groups fill `variant`: one map for each site that matches.
    """

    measure: str
    statistic: str
    variant: str
    reading: str = ""
    site: str | None = "residual"
    low: float | None = None

    def expanded(self, table: pd.DataFrame) -> Iterator[Reading]:
        """Yield one map for each site in the table that matches."""
        if "(?P" not in (self.site or ""):
            yield self
            return
        for site in select(table, self.measure, self.statistic)["site"].dropna().unique():
            if match := re.fullmatch(str(self.site), site):
                yield replace(self, site=site, variant=self.variant.format(**match.groupdict()))


@dataclass(frozen=True, config={"extra": "forbid"})
class Note:
    """A note under “How to read the numbers”; shown if the table has one of its measures, or if it names none."""

    title: str
    text: str
    """HTML, inside a paragraph."""
    measures: tuple[str, ...] = ()
    """Measures of the table to which the note belongs; empty = all."""
    formula: str = ""
    """HTML."""
    source: str = ""
    """HTML: the source of the formula."""


@dataclass(frozen=True, config={"extra": "forbid"})
class Figure:
    """A figure. Records of other kinds of results may have the same name."""

    name: str
    section: str
    """Id of the section of the page, see `page.yaml`; unknown ids go under “Further figures”."""
    kinds: tuple[str, ...] = (SINGLE,)
    """Kinds of results that have this figure, see `PageSource.kind`."""
    draw: str = ""
    """Name of a function in `DRAWINGS`; empty = lines or maps."""
    title: str = ""
    quantity: str = ""
    """Name of the plotted number, for generated titles: `QUANTITY per layer`."""
    reading: str = ""
    """One line on how to read the figure."""
    axis: str = ""
    """Title of the value axis, with the unit."""
    scale: str = ""
    """See `draw.SCALES`."""
    over: str = "layer"
    """Column of the x axis: `layer` or `step`."""
    column: str = "value"
    """Column of the values; `difference` in figures of differences from the baseline."""
    first: int = 1
    """First layer of the axis."""
    level: float | None = None
    """Value of a horizontal line."""
    height: int = 350
    lines: tuple[Line, ...] = ()
    band: tuple[str, str] | None = None
    """Percentiles at the ends of the band around the first line, as statistics: `p05`, `p95`."""
    previous: str = ""
    """Name of the dotted line that marks the previous layer, l - 1; empty = no such line."""
    maps: tuple[Reading, ...] = ()
    axes: tuple[str, str] = ("Layer", "Layer")
    rows: str = "{}"
    """Label of row number `{}` of numbered maps."""
    low: float | None = None
    """Value of the first colour; None = zero, or symmetric if values are negative."""
    turned: bool = False
    """True if the second layer of a pair is on the vertical axis."""
    followed: bool = False
    """True if compared lines are also drawn over training, one line per layer, in the figure `steps_NAME`."""
    secondary: bool = False
    """True if the page folds the figure under its title."""
    beside: bool = False
    """True if variants stand side by side; otherwise a switch selects one."""
    notes: tuple[Note, ...] = ()

    def values(
        self, line: Line, table: pd.DataFrame, layers: int, statistic: str = "", column: str = ""
    ) -> PlottedCurve:
        """The curve of a line in the rows of one model."""
        return curve_of(
            table, line.measure, statistic or line.statistic, line.site, by=self.over,
            layer=None if line.layers_back is None else layers - line.layers_back,
            other=layers if line.to_last else None, column=column or self.column,
        )  # fmt: skip

    def expanded(self, table: pd.DataFrame) -> list[Line]:
        """The lines of this figure, with patterns replaced by what the table has."""
        return [concrete for line in self.lines for concrete in line.expanded(table)]

    def compared(self, table: pd.DataFrame) -> list[Line]:
        """The lines that are compared between models and followed over training, of measures that the table has."""
        return [line for line in self.expanded(table) if line.compared and len(select(table, line.measure))]

    def finished(self, drawn: Mapping[str, go.Figure]) -> Figures:
        """Name -> figure, with the record's title and reading where the drawing has none."""
        for drawing in drawn.values():
            about = drawing.layout.meta
            about["title"] = about["title"] or self.title or f"{self.quantity} per layer"
            about["subtitle"] = about["subtitle"] or self.reading
            about["beside"] = about["beside"] or self.beside
            drawing.update_layout(title={"text": about["title"], "subtitle": {"text": about["subtitle"]}})
        return {f"{self.name}:{key}" if key else self.name: drawing for key, drawing in drawn.items()}


@cache
def every_record() -> tuple[Figure, ...]:
    """The records of `figures.yaml`, in reading order."""
    return tuple(Figure(**entry) for entry in read_yaml("figures.yaml"))


def readings(drawings: Iterable[tuple[str, go.Figure | None]]) -> Figures:
    """Key -> figure, for the drawings that have data; the first key becomes "", so that its name has no suffix."""
    drawn = [(key, drawing) for key, drawing in drawings if drawing is not None]
    return {key if index else "": drawing for index, (key, drawing) in enumerate(drawn)}


def lines(record: Figure, source: PageSource) -> Figures:
    """The lines of one model, or the compared ones of several."""
    if "model" not in source.table.columns:
        every = record.expanded(source.table)
        variants = list(dict.fromkeys(line.variant for line in every))
        groups = [[line for line in every if line.variant == variant] for variant in variants]
        return readings((group[0].key or group[0].variant, alone(record, source, group)) for group in groups)
    every = record.compared(source.table)
    return readings((line.key, overlay(record, line, source, len(every) > 1)) for line in every)


def alone(record: Figure, source: PageSource, group: list[Line], **about: Any) -> go.Figure | None:
    """Lines of one model in one figure."""
    table = source.table
    layers = source.layers
    low, high = record.band or ("", "")
    drawn = [
        Drawn(
            record.values(line, table, layers), line.name, categorical(line.color)["color"],
            line.dash or categorical(line.color)["dash"], line.form, line.plot,
            errors=record.values(line, table, layers, line.errors) if line.errors else NO_CURVE,
        )
        for line in group
    ]  # fmt: skip
    if not any(drawn):
        return None
    if record.band:
        below, above = (record.values(group[0], table, layers, end) for end in (low, high))
        drawn[0] = replace(drawn[0], band=f"{int(low[1:])}th to {int(high[1:])}th percentile", low=below, high=above)
    if record.previous:
        before = PlottedCurve(drawn[0].curve.at, [at - 1.0 for at in drawn[0].curve.at], ["1"] * len(drawn[0].curve.at))
        drawn.append(Drawn(before, record.previous, MUTED, "dot", ".0f"))
    values = [value for track in drawn for part in (track.curve, track.low, track.high) for value in part.values]
    nats = " (nats)" if any(track.curve.unit == "nats" for track in drawn) and "nats" not in record.axis else ""
    about = {"variant": group[0].variant, "showlegend": record.over != "layer" or None, **about}
    result = chart(
        drawn, level=record.level, height=record.height,
        xaxis=layer_axis(layers, record.first) if record.over == "layer" else STEP_AXIS,
        yaxis=value_axis(record.axis + nats, record.scale, values), **about,
    )  # fmt: skip
    if result is None or record.scale != "zero" or record.over != "layer":
        return result
    return set_first_apart(result, [line.name for line in group if line.site == "residual"])


def overlay(record: Figure, line: Line, source: PageSource, several: bool = False) -> go.Figure | None:
    """One line per model: its values, or its differences from the baseline if `record.column` is `difference`."""
    difference = record.column == "difference"
    groups = source.kind == GROUPS
    relative = source.meta.get("depth") == "relative"
    drawn = []
    for run in source.with_column(record.column):
        errors = NO_CURVE
        if difference:
            errors = record.values(line, run.table, run.layers, column="difference_error")
            pairs = min(len(entry.get("seeds") or ()) for entry in source.meta["models"]) if groups else 0
            reach = quantile(pairs) if groups else 2.0
            errors = replace(errors, values=[None if error is None else reach * error for error in errors.values])
        elif line.errors and line.errors != "std":
            errors = record.values(line, run.table, run.layers, line.errors)
        run_curve = record.values(line, run.table, run.layers)
        across = [at / run.layers for at in run_curve.at] if relative else []
        form = f"+{line.form}" if difference else line.form
        hover = "%{customdata[0]}: " * relative
        drawn.append(Drawn(run_curve, run.name, **run.style, form=form, errors=errors, across=across, hover=hover))
    at_first = any(0 in track.curve.at for track in drawn)
    values = [value for track in drawn for value in track.curve.values]
    scale = DIFFERENCES.get(record.scale, "") if difference else record.scale
    bars = f"; bars: {'two standard errors of the difference' if difference else 'one standard error'}"
    bars = "; bars: 95 % interval over seeds" if groups else bars
    reading = "Value minus the baseline’s at the same depth" if difference else "One line per model"
    result = chart(
        drawn,
        title=f"{record.quantity}: difference from {source.baseline}" if difference
        else f"{record.quantity or 'Value'} per layer",
        subtitle=reading + bars * any(track.errors for track in drawn),
        xaxis=layer_axis(max(run.layers for run in source.runs), 1 - at_first, relative),
        yaxis=value_axis(f"Δ {record.axis}" if difference else record.axis, scale, values),
        variant=", ".join(filter(None, dict.fromkeys((line.name, line.variant)))) if several else "",
        showlegend=True,
        height=record.height,
        hovermode="closest" if relative else "x unified",
    )  # fmt: skip
    if result is not None and not (relative or groups):
        set_first_apart(result)
    return add_level(result, 0) if result is not None and difference else result


def maps(record: Figure, source: PageSource) -> Figures:
    """The maps of one model as variants, or the first map (or its difference) of several models side by side."""
    if "model" not in source.table.columns:
        every = [concrete for reading in record.maps for concrete in reading.expanded(source.table)]
        several_sites = len({reading.site for reading in every}) > 1
        return readings(
            (
                str(reading.site) if several_sites else reading.statistic,
                _heat(record, reading, cells, names, variant=reading.variant),
            )
            for reading in every
            for cells, names in [_cells(record, reading, source.table)]
            if len(cells)
        )
    difference = record.column == "difference"
    every = [*record.maps[0].expanded(source.table)]
    cells = {
        f"{run.name}, {reading.variant}" if len(every) > 1 else run.name: _cells(record, reading, run.table)[0]
        for reading in every
        for run in source.with_column(record.column)
    }
    settings: dict[str, Any] = {}
    if difference:  # one colour scale for all
        largest = max(
            (float(np.nanmax(np.abs(cells_of_model))) for cells_of_model in cells.values() if len(cells_of_model)),
            default=0.0,
        )
        extent = max(SMALLEST, math.ceil(100 * largest) / 100)
        reading = f"Value minus the baseline’s at the same depth; the colours end at ±{extent:.2f}"
        settings = {"low": -extent, "high": extent, "difference": True, "quantity": "difference", "subtitle": reading}
        settings["title"] = f"{record.title}: difference from the baseline"
    return {
        name: _heat(record, record.maps[0], cells_of_model, None, variant=name, beside=len(every) == 1, **settings)
        for name, cells_of_model in cells.items()
        if len(cells_of_model)
    }


def numbered(record: Figure, source: PageSource) -> Figures:
    """Maps over layers whose rows are numbered by the name of a statistic or a site, from the bottom up.

    The named group `row` of a reading's pattern is the number of the row.
    """
    drawings = []
    for reading in record.maps:
        rows = select(source.table, reading.measure).dropna(subset=["layer", "site"])
        names = rows["statistic"] + "@" + rows["site"]
        numbers = names.str.extract(f"^{reading.statistic}@{reading.site}$")["row"]
        cells = grid(rows[numbers.notna()], numbers.dropna(), rows.loc[numbers.notna(), "layer"])
        labels = [record.rows.format(row) for row in cells.index]
        drawn = None
        if len(cells):
            drawn = _heat(record, reading, cells, labels, variant=reading.variant)
            drawn.update_yaxes(title_text=record.axes[1])  # row 0 is no layer
        drawings.append((reading.site or "", drawn))
    return readings(drawings)


def _cells(record: Figure, reading: Reading, table: pd.DataFrame) -> tuple[pd.DataFrame, list[str] | None]:
    """The cells of a map, and the names of its rows (None if the rows are layers)."""
    rows = select(table, reading.measure, reading.statistic, reading.site).dropna(subset=["layer", "other"])
    if record.turned:
        cells = grid(rows, rows["other"], rows["layer"], record.column)
        return cells, [*map(str, cells.index)]
    if reading.site == "residual":  # the table may hold each pair once, in one order
        rows = pd.concat([rows.assign(layer=rows["other"], other=rows["layer"]), rows])
    return grid(rows, rows["layer"], rows["other"], record.column), None


def _heat(record: Figure, reading: Reading, cells: pd.DataFrame, names: list[str] | None, **about: Any) -> go.Figure:
    low = record.low if reading.low is None else reading.low
    settings = {"quantity": record.quantity or "weight", "low": low, "subtitle": reading.reading, **about}
    return heat(cells, names=names, axes=record.axes, **settings)


def followed(record: Figure, source: PageSource) -> Figures:
    """One figure for each compared line: its value over training steps, with a curve for every layer."""
    every = record.compared(source.table)
    steps = list(source.steps)
    layers = source.layers
    keyed_figures = []
    for line in every:
        by_layer = [record.values(line, rows, layers) for rows in source.steps.values()]
        depths = sorted({layer for values in by_layer for layer in values.at})
        tracks = [
            Drawn(
                PlottedCurve(steps, [values.points.get(layer) for values in by_layer], ["?"] * len(steps)),
                f"Layer {layer}", by_depth(layer, layers), form=line.form,
                hover="%{fullData.name}, step %{x:,}<br>", extra={"showlegend": False},
            )
            for layer in depths
        ]  # fmt: skip
        drawn = chart(
            tracks,
            title=f"{record.quantity} of every layer over training",
            subtitle="One line per layer; stronger colour = deeper",
            xaxis=STEP_AXIS,
            yaxis=value_axis(record.axis, record.scale, [value for track in tracks for value in track.curve.values]),
            variant=", ".join(filter(None, (line.name, line.variant))) * (len(every) > 1),
            hovermode="closest",
            showlegend=False,
        )
        if drawn is None:
            continue
        first, *deeper_layers = [list(track.curve.points.values()) for track in tracks if track]
        ends = scale_without(first, [value for values in deeper_layers for value in values])
        if ends is not None:
            drawn.layout.meta["subtitle"] += f"; {tracks[0].name.lower()} is beyond the scale"
            drawn.update_layout(yaxis_range=ends)
        keyed_figures.append((line.key, drawn.add_trace(shade_key("Layer", SEQUENTIAL[2:], depths[0], layers))))
    return readings(keyed_figures)


def displacement_figures(record: Figure, source: PageSource) -> Figures:
    """Displacement in two variants: linear (layers 2 to L if layer 1 would flatten them) and logarithmic."""
    every = list(record.lines)
    mean, other = (record.values(line, source.table, source.layers).points for line in every[:2])
    alike = mean.keys() == other.keys() and np.allclose([*other.values()], [*mean.values()], SAME, 0)
    linear = alone(record, source, every[: 1 if alike else 2])
    logarithm = replace(record, scale="log", axis=f"{record.axis} (log scale)")
    whole = alone(logarithm, source, every)
    if whole is None:
        return {}
    values = [value for trace in whole.data for value in trace.y if value is not None]
    if linear is None or min(values) <= 0:
        return {"": alone(record, source, every) or whole}
    apart = linear.layout.yaxis.range is not None
    linear.layout.meta["variant"] = f"Layers 2 to {source.layers}" if apart else "Linear"
    whole.layout.meta["variant"] = "All layers, log scale" if apart else "Log scale"
    return {"": linear, "log": whole}


def profiles(record: Figure, source: PageSource) -> Figures:
    """A number of every layer at a few steps, later steps in stronger colours; one variant for each line."""
    every = record.expanded(source.table)
    return readings((line.key, _profile(record, line, source)) for line in every)


def _profile(record: Figure, line: Line, source: PageSource) -> go.Figure | None:
    """A line over layers at up to `PROFILES` steps."""
    curves = {step: record.values(line, rows, source.layers) for step, rows in source.steps.items()}
    known = [step for step, profile in curves.items() if profile]
    drawn_steps = [known[round(at)] for at in np.linspace(0, len(known) - 1, min(PROFILES, len(known)))]
    every = [
        Drawn(curves[step], f"Step {step:,}", by_depth(index, len(drawn_steps)))
        for index, step in enumerate(drawn_steps, start=1)
    ]
    yaxis = value_axis(record.axis, record.scale)
    across = layer_axis(source.layers, record.first)
    drawn = chart(every, xaxis=across, yaxis=yaxis, variant=line.variant, showlegend=True)
    return set_first_apart(drawn) if drawn is not None and record.scale == "zero" else drawn


def word_maps(_: Figure, source: PageSource) -> Figures:
    """Occurrences of look-alike words in the plane, one variant for each site and layer."""
    drawn = []
    for entry in source.meta.get("word_maps") or []:
        site = "Value states" if entry["site"] == "value" else "Residual stream"
        marks = [
            points(
                label(str(place.get("word") or "?")), place["x"], place["y"], CATEGORICAL[index % len(CATEGORICAL)],
                "%{fullData.name}", marker={"size": 5},
            )
            for index, place in enumerate(entry["words"])
        ]  # fmt: skip
        hidden = {"showticklabels": False, "showgrid": False, "zeroline": False}
        scatter = figure(
            marks, xaxis=axis("", **hidden), yaxis=axis("", **hidden), height=380, hovermode="closest",
            showlegend=True, variant=f"{site}, layer {entry['layer']}",
        )  # fmt: skip
        drawn.append((f"{entry['site']}_{entry['layer']}", scatter))
    return readings(drawn)
