"""Folders of `fulldepth skip` on a page: what was removed, at what loss, and the models that were timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fulldepth.core.number_format import plus_minus
from fulldepth.core.uncertainty import reach
from fulldepth.reporting import measured
from fulldepth.reporting.charts import Figure, readings
from fulldepth.reporting.draw import Drawn, chart, legend_entry, points, value_axis
from fulldepth.reporting.kinds import TOGETHER
from fulldepth.reporting.measured import PageFinding
from fulldepth.reporting.phrases import (
    PARTS,
    blocks_in_words,
    dotted,
    figure_of,
    places_of,
    quantity,
    sentences_of,
    short,
    size,
)
from fulldepth.reporting.serving import Spread, load_figures, load_table, ratio_text, served_cells
from fulldepth.reporting.source import PageSource, PlottedCurve, curve_of, num_layers, number, select
from fulldepth.reporting.style import CATEGORICAL, INK, Figures, axis, categorical, figure, label, minus, translucent
from fulldepth.reporting.tables import Meta, Table, of_record, settings_table
from fulldepth.reporting.task_changes import task_change_tables, task_sentences

BRANCHES = [part for part in PARTS if part != "layer"]
"""The parts of a layer."""
PHASES = ("prefill", "decode")
CARDS = {
    "target_speedup": "Speed-up by the times of the parts",
    "max_loss": "Speed-up by the times of the parts",
    "target_bytes": "Bytes of the weights that are left",
    "target_cache": "Bytes of the cache that are left",
    "loss_added": "Loss added",
    "net_cost": "Net cost of removal",
    "healing": "Change by healing",
    "loss_healed": "Held-out loss, healed",
    "break_point": "Break point",
    "gguf_size": "Size of the GGUF file",
}
"""Name in `results.json` (in a healing, followed by the model) -> title of the card."""
SIZES = ("parameter_bytes", "kv_bytes_per_token", "peak_memory")


@dataclass(frozen=True)
class SkipPart:
    """One result folder."""

    label: str
    """Name of the folder on a page of several folders; empty for a single folder."""
    kind: str
    table: pd.DataFrame
    meta: Meta

    def value(
        self, measure: str, statistic: str, site: str = "model", model: str = "", column: str = "value"
    ) -> float | None:
        """A number of the folder, or of one of its models; with `column` `count`, that of its samples.

        The row without batch size is the number of the whole grid; if there is none, the median of all rows is
        returned. None if no row has a finite value.
        """
        rows = select(self.table[self.table["model"] == model] if model else self.table, measure, statistic, site)
        whole = rows[rows["batch"].isna()] if "batch" in rows else rows
        finite = [real for real in map(number, (whole if len(whole) else rows)[column]) if real is not None]
        return median(finite) if finite else None


def parts(source: PageSource) -> list[SkipPart]:
    """The folders behind a table and its document."""
    table = source.table
    meta = source.meta
    if meta.get("kind") != TOGETHER:
        return [SkipPart("", str(meta.get("kind")), table, meta)]
    return [
        SkipPart(str(entry["label"]), str(entry["kind"]), table[table["folder"] == entry["label"]], entry)
        for entry in meta["parts"]
    ]


def label_among(part: SkipPart, folders: Iterable[SkipPart]) -> str:
    """The label of a folder if several folders are of its kind; empty for the only one."""
    return part.label if sum(other.kind == part.kind for other in folders) > 1 else ""


@dataclass
class Removal:
    """Removed blocks in the order of removal."""

    names: dict[str, None]
    """Names of the folders and models with this removal, as keys; may be empty."""
    granularity: str
    blocks: tuple[int | str, ...]
    """Blocks as a plan states them: layer numbers, or texts such as `mlp 12` for granularity `any`."""
    losses: tuple[float, ...]
    """Held-out loss of the unmodified model, then after each removal, without healing; empty if unknown."""
    healed: float | None = None
    scalars_only: float | None = None
    curve: SkipPart | None = None
    """Folder of the removal curve that measured it, which has intervals."""
    modules: tuple[str, ...] = ()
    """Names of the removed modules in transformers; empty if unknown."""

    @property
    def name(self) -> str:
        """The names of its folders and models, joined."""
        return ", ".join(self.names)

    @property
    def places(self) -> list[tuple[int, str]]:
        """1-based layer and part of every block."""
        return places_of(self.blocks, self.granularity)

    @property
    def counts(self) -> list[int]:
        """How many blocks are removed before the first removal, 0, and after each: a layer of `any` counts twice."""
        sizes = [1 + (self.granularity == "any" and part == "layer") for _, part in self.places]
        return list(accumulate(sizes, initial=0))

    def begins(self, other: Removal) -> bool:
        """Return True if `other` is longer and starts with the same blocks at the same losses."""
        size = len(self.blocks)
        same = (other.granularity, other.blocks[:size]) == (self.granularity, self.blocks)
        return same and len(other.blocks) > size and bool(np.allclose(other.losses[: size + 1], self.losses, 1e-4, 0))


def removals(folders: Iterable[SkipPart]) -> list[Removal]:
    """The distinct sequences of removed blocks in the folders."""
    merged: dict[object, Removal] = {}
    for part, name, plan in ((folder, *named) for folder in folders for named in plans(folder)):
        blocks = tuple(block if isinstance(block, str) else int(block) for block in plan.get("blocks") or [])
        losses = tuple(loss for loss in map(number, plan.get("losses") or []) if loss is not None)
        losses *= len(losses) == len(blocks) + 1
        granularity = str(plan.get("granularity") or "attention")
        scalars_only = number((plan.get("control_loss") or {}).get("scalars_only"))
        modules = tuple(part.meta.get("removed_modules") or []) if part.kind != "bench" else ()
        new = Removal({}, granularity, blocks, losses, number(plan.get("healed_loss")), scalars_only, modules=modules)
        if blocks:
            removal = merged.setdefault((granularity, blocks, tuple(round(loss, 4) for loss in losses)), new)
            removal.names |= dict.fromkeys([name] if name else [])
            removal.curve = removal.curve or (part if part.kind == "curve" else None)
            removal.modules = removal.modules or modules
    return list(merged.values())


def plans(part: SkipPart) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, plan) for every plan in a folder's document. Entries of a plan may be missing."""
    meta = part.meta
    if part.kind == "bench":
        return [(str(entry.get("label", "?")), entry) for entry in meta.get("models") or []]
    return [(part.label, meta["plan"])] if isinstance(meta.get("plan"), Mapping) else []


def num_layers_of(folders: Sequence[SkipPart]) -> int:
    """Number of layers of the model: as the documents state it, or else the deepest layer in the tables."""
    return max(num_layers(part.table, part.meta.get("model")) for part in folders)


@dataclass(frozen=True)
class TimedModel:
    """A model of a benchmark."""

    name: str
    part: SkipPart
    program: str
    base: str
    """Name of the model that its times and sizes are compared with: the first one that the same program ran."""
    original: bool
    baseline: bool
    """True if this is that first model of its program."""
    loss: float | None
    """Held-out loss in nats: measured, or else as the plan of the export states it."""
    added: float | None
    """Loss minus the original's loss, on the same data."""
    error: float | None
    """Standard error of the added loss."""
    groups: float | None
    """Groups by which it is measurable (Student's t)."""
    stated: bool
    """True if the loss comes from the plan and was not measured together with the times."""
    times: Mapping[str, Spread]
    """Phase -> time divided by that of `base`, over the whole grid."""
    decoding: float | None
    """Milliseconds per token when decoding one sequence; the median over context lengths."""
    bytes: Mapping[str, float]
    """Measure -> bytes, the median over the grid."""


def timed_models(folders: Sequence[SkipPart]) -> list[TimedModel]:
    """The models of all benchmarks, in the order of each benchmark's table, whose first model is the original."""
    timed = []
    for part in folders:
        if part.kind != "bench" or "model" not in part.table.columns:
            continue
        entries = {str(entry.get("label", "?")): entry for entry in part.meta.get("models") or []}
        names = [str(name) for name in part.table["model"].dropna().unique()]
        programs = {name: str(entries.get(name, {}).get("program") or "transformers") for name in names}
        folder = label_among(part, folders)
        for name in names:
            entry = entries.get(name, {})
            of_plan = False
            base_name = next(other for other in names if programs[other] == programs[name])
            single = part.table[(part.table["model"] == name) & (part.table["batch"] == 1)]
            decoding = select(single, "decode_time", "median", "decode")["value"].median()
            loss, base = (part.value("loss", "mean", model=model_name) for model_name in (name, names[0]))
            losses = [number(value) for value in entry.get("losses") or []]
            if loss is None:
                loss = number(entry.get("healed_loss")) or (losses or [None])[-1]
                base = (losses or [None])[0]
                of_plan = loss is not None
            times = {}
            for phase in PHASES:
                time, low, high = (part.value("time_ratio", end, phase, name) for end in ("median", "low", "high"))
                if name == base_name and part.value(f"{phase}_time", "median", phase, name) is not None:
                    time = low = high = 1.0
                if time is not None:
                    times[phase] = Spread(time, low or time, high or time)
            timed.append(
                TimedModel(
                    f"{folder}: {name}" if folder else name,
                    part,
                    programs[name],
                    base_name,
                    name == names[0],
                    name == base_name,
                    loss,
                    None if loss is None or base is None else loss - base,
                    part.value("loss", "difference_stderr", model=name),
                    _groups_of_difference(part, name),
                    of_plan,
                    times,
                    None if pd.isna(decoding) else 1000 * float(decoding),
                    {size: value for size in SIZES if (value := part.value(size, "value", model=name)) is not None},
                )
            )
    return timed


def _groups_of_difference(part: SkipPart, name: str) -> float | None:
    """The number of groups by which the loss added is measurable; of older tables, its number of documents."""
    stated = part.value("loss", "difference_groups", model=name)
    return part.value("loss", "difference_stderr", model=name, column="count") if stated is None else stated


def _removed(part: SkipPart, measure: str, name: str, index: int, form: str = ".4f") -> Drawn:
    """A measure of a curve by number of removed blocks, with its interval."""
    mean, low, high = (
        curve_of(part.table, measure, statistic, "model", by="removed") for statistic in ("mean", "low", "high")
    )
    return Drawn(mean, name, **categorical(index), form=form, low=low, high=high)


def _over_removed(drawn: Sequence[Drawn], subtitle: str, **settings: Any) -> go.Figure | None:
    """Curves over the number of removed blocks."""
    largest = max([1, *(at for line in drawn for at in line.curve.at)])
    margin = max(0.4, largest * 0.03)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if largest / s <= 13)
    across = axis("Blocks removed", unifiedhovertitle={"text": "%{x} removed"}, dtick=step, tick0=0)
    subtitle += ". Band: 95 % interval over documents" * any(line.low for line in drawn)
    settings |= {"xaxis": {**across, "range": [-margin, largest + margin]}, "legend": {"traceorder": "normal"}}
    return chart(drawn, subtitle=subtitle, height=420, **settings)


def removal_loss(_: Figure, source: PageSource) -> Figures:
    """Loss added by the first k removals, as a curve over k, with marks (healed model, control) and the break point."""
    known = [removal for removal in removals(parts(source)) if removal.losses]
    drawn_removals = [
        removal for removal in known if removal.healed is not None or not any(removal.begins(other) for other in known)
    ]
    drawn: list[Drawn] = []
    marks: list[Drawn] = []
    lines: list[go.Scatter] = []
    shapes: list[dict[str, Any]] = []
    for index, removal in enumerate(drawn_removals):
        several = f" ({label(removal.name, 40)})" if len(drawn_removals) > 1 and removal.name else ""
        base = removal.losses[0]
        part = removal.curve

        def added(losses: Sequence[float], at: Sequence[int], base: float = base) -> PlottedCurve:
            return PlottedCurve([*at], [loss - base for loss in losses], ["?"] * len(losses))

        if not any(removal.begins(other) for other in known):  # else a longer line contains the same points
            measured_curve = _removed(part, "loss_added", f"Not healed{several}", index) if part else None
            plain = added(removal.losses, removal.counts)
            drawn.append(measured_curve or Drawn(plain, f"Not healed{several}", **categorical(index)))
        color = categorical(index)["color"] if several else CATEGORICAL[2]
        for name, loss, at, mark in (
            ("Healed", removal.healed, removal.counts[-1], {"symbol": "diamond"}),
            ("Control: scalars only", removal.scalars_only, 0, {"symbol": "circle-open", "line": {"width": 2}}),
        ):
            if loss is not None:
                marker = {"marker": {"size": 11, "color": color, **mark}}
                marks.append(Drawn(added([loss], [at]), name + several, color, plot="marks", extra=marker))
        middle, low, high = (part and part.value("break_point", end) for end in ("value", "low", "high"))
        if middle is not None:
            across = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
            stroke = {"color": INK, "width": 1.5, "dash": "dot"}
            box = {"fillcolor": translucent(CATEGORICAL[4]), "line": {"width": 0}}
            shapes += [{"type": "rect", "x0": low, "x1": high, **box, **across}] if low != high else []
            shapes.append({"type": "line", "x0": middle, "x1": middle, "line": stroke, **across})
            interval = "" if low is None else f" (95 %: {low:.0f} to {high:.0f})"
            lines.append(legend_entry(f"Break point: {middle:.0f}{interval}{several}", "lines", line=stroke))
    reading = "Above the unmodified model’s, on the same sequences"
    yaxis = axis("Loss added (nats)")
    result = _over_removed([*drawn, *marks], reading, yaxis=yaxis, shapes=shapes, showlegend=True)
    return readings([("", result and result.add_traces(lines))])


def by_removed(record: Figure, source: PageSource) -> Figures:
    """A measure of a removal curve's predictions over the number of removed blocks, one line per curve."""
    (line,) = record.lines
    curves = [part for part in parts(source) if part.kind == "curve"]
    drawn = [
        _removed(part, line.measure, "Mean" if len(curves) == 1 else label(part.label, 40), index, line.form)
        for index, part in enumerate(curves)
    ]
    yaxis = value_axis(record.axis, record.scale)
    return readings([("", _over_removed(drawn, record.reading, yaxis=yaxis, showlegend=len(curves) > 1))])


def pareto(_: Figure, source: PageSource) -> Figures:
    """Loss added against time (as a multiple of the original's): one figure for decoding, one for prefill."""
    return readings((phase, _plane(source, phase)) for phase in reversed(PHASES))


def _plane(source: PageSource, phase: str) -> go.Figure | None:
    known = [model for model in timed_models(parts(source)) if phase in model.times and model.added is not None]
    originals = [model for model in known if model.original][:1]
    models = [*originals, *(model for model in known if not model.original)]
    if all(model.baseline for model in models):
        return None
    traces = []
    for index, model in enumerate(models):
        color = INK if model.original else categorical(index - len(originals))["color"]
        (time, low, high) = model.times[phase]
        added = model.added or 0.0
        error = model.error
        name = label(model.name, 40) + " (original)" * (model.original and model.name != "original")
        bars: dict[str, Any] = {"color": color, "thickness": 1.2}
        across = {"array": [high - time], "arrayminus": [time - low], "symmetric": False, "width": 4, **bars}
        traces.append(
            points(
                name, [time], [added], color, "%{x:.3f} (%{customdata[0]:.3f} to %{customdata[1]:.3f})<br>"
                "<b>%{y:+.4f}</b> nats", customdata=[[low, high]], error_x=across,
                marker={"size": 11, "symbol": "square" if model.baseline else "circle"},
                error_y=None if error is None else {"array": [2 * error], **bars},
            )
        )  # fmt: skip
    return figure(
        traces,
        xaxis=axis(f"{phase.capitalize()} time over the original’s", tickformat=".2f"),
        yaxis=axis("Loss added to the original’s (nats)", rangemode="tozero"),
        variant=phase.capitalize(),
        height=400,
        hovermode="closest",
        showlegend=True,
    )


def under_load(_: Figure, source: PageSource) -> Figures:
    """Tokens per second over the original's by number of clients, of all benchmarks under load."""
    folders = [part for part in parts(source) if part.kind == "bench"]
    return readings(load_figures([(label_among(part, folders), served_cells(part.table)) for part in folders]))


def model(source: PageSource) -> dict[str, Any]:
    """The entry `model`, merged from all folders; the first folder that states a field wins."""
    merged: dict[str, Any] = {}
    for part in parts(source):
        for described in (part.meta.get("model"), *(plan.get("model") for _, plan in plans(part))):
            merged = {**{key: value for key, value in (described or {}).items() if value is not None}, **merged}
    return merged


def for_template(source: PageSource) -> dict[str, Any]:
    """Values for the template: the folders, their model, and the names of the held-out data."""
    folders = parts(source)
    data = [(part.meta.get("data") or {}).get("heldout") or {} for part in folders]
    names = dict.fromkeys(short(heldout["name"], 60) for heldout in data if heldout.get("name"))
    return {"parts": folders, "model": model(source), "heldout": list(names)}


def findings_of_folders(_: Meta, source: PageSource) -> list[PageFinding]:
    """The findings of all folders."""
    findings = []
    folders = parts(source)
    for part in folders:
        folder = short(label_among(part, folders), 40)
        for key, entry in (part.meta.get("headline") or {}).items():
            name, of = str(key).partition(" ")[::2] if part.kind in ("bench", "heal") else (str(key), "")
            card = None
            if (
                name in CARDS and part.kind != "bench" and entry.get("value") is not None
            ):  # a benchmark's numbers are in a table
                card = (CARDS[name], dotted([of, folder]), *figure_of(entry, num_layers_of(folders)))
            findings.append(PageFinding(entry, card, prefix=f"{folder}: " if folder else ""))
    return findings


def skip_story(source: PageSource) -> dict[str, Any] | None:
    """The opening paragraph, or None if no finding has a sentence.

    A benchmark opens with speed and loss of each program's fastest model, other folders with the findings that
    `Kind.opening` names, or else with their first one.
    """
    headline = source.meta.get("headline") or {}
    if source.page.name == "bench":
        busy = headline.get("times") or {}
        served = [entry for name, entry in headline.items() if name.startswith(("most_tokens", "rate_ratio"))][:1]
        sentences = sentences_of([busy]) or sentences_of(served) or decoding(parts(source))
    else:
        names = source.page.opening
        opening = [headline[name] for name in names if name in headline]
        sentences = task_sentences(source.table, headline) + sentences_of(opening or [*headline.values()][:1])
    return {"sentences": sentences} if sentences else None


def decoding(folders: Sequence[SkipPart]) -> list[str]:
    """One sentence per program: decoding speed and loss of its fastest model."""
    timed = [model for model in timed_models(folders) if "decode" in model.times and not model.baseline]
    fastest: dict[str, TimedModel] = {}
    for model in sorted(timed, key=lambda model: model.times["decode"].value, reverse=True):
        fastest[model.program] = model
    sentences = []
    for program, best in sorted(fastest.items(), reverse=True):
        speed = best.times["decode"].speed_up
        name = short(best.name, 60)
        base = short(best.base, 60)
        speed_text = f"In {program}, {name} decodes {speed.value:.2f} times as fast as {base}"
        if speed.contains_one:
            speed_text = f"In {program}, no model decodes measurably faster than {base}; {name} comes closest"
        cost = "" if best.added is None else f"; loss added: {with_error(best.added, best.error, best.groups)}"
        sentences.append(f"{speed_text} {speed.interval}{cost}.")
    return sentences


def signed_loss(added: float, error: float | None) -> str:
    """A difference of losses as text, with its standard error if known."""
    return f"{minus(added, '+.4f')} {plus_minus(error)}".rstrip()


def with_error(added: float, error: float | None, groups: float | None) -> str:
    """The text of `signed_loss` with its unit, and a remark if the difference is not measurable.

    Args:
        added: the difference.
        error: its standard error.
        groups: number of groups for Student's t; None = very many.
    """
    is_within = error and abs(added) <= reach(groups or math.inf) * error
    return f"{signed_loss(added, error)} nats{' (no measurable difference)' * bool(is_within)}"


def cost_and_saving(folders: Sequence[SkipPart]) -> list[str]:
    """Sentences for the index page: the removed blocks with the loss they add, then the decoding speed."""
    sentences = []
    timed = next((model for model in timed_models(folders) if not model.baseline), None)
    for removal in removals(folders)[:1]:
        what = blocks_in_words(removal.places)
        added = removal.losses[-1] - removal.losses[0] if removal.losses else None
        error = groups = None
        if timed and timed.added is not None:
            added = timed.added
            error = timed.error
            groups = timed.groups
        if added is None:
            continue
        healed = "healed" if any(part.kind == "heal" for part in folders) and timed else "not healed"
        change = f"changes the held-out loss by {with_error(added, error, groups)}, {healed}"
        unread = "Other text and tasks were not read, and can lose much more."
        sentences.append(f"Removing {what} of {num_layers_of(folders)} {change}. {unread}")
    busy = [(part.meta.get("headline") or {}).get("times") or {} for part in folders]
    return sentences + (decoding(folders) or sentences_of(busy))


def folder_warnings(source: PageSource) -> list[str]:
    """Distinct warnings of the folders, and one more if they measured their losses on different data."""
    folders = parts(source)
    texts = list(
        dict.fromkeys(text for part in folders for text in measured.document_warnings({**part.meta, "models": None}))
    )
    data = {short(part.label, 40): part.meta.get("data") or {} for part in folders}
    hashes = {name: digest for name, entry in data.items() if (digest := entry.get("hash"))}
    if len(set(hashes.values())) > 1:
        texts.append(
            f"{', '.join(hashes)} measured their losses on different data: compare each with its own original."
        )
    return texts


def folder_tables(source: PageSource) -> dict[str, Sequence[Any]]:
    """Id of a section -> its tables and block maps."""
    folders = parts(source)
    layers = num_layers_of(folders)
    return {
        "blocks": [_block_map(removal, layers) for removal in removals(folders)],
        "healing": [table for part in folders if part.kind == "heal" for table in _healing(part)],
        "load": [table for part in folders if part.kind == "bench" and (table := load_table(served_cells(part.table)))],
        "settings": [
            *(
                settings_table(f"Settings of {short(part.label, 60)}" if part.label else "All settings", settings)
                for part in folders
                if (settings := part.meta.get("settings"))
            ),
            *(
                of_record("refits", [(short(str(refit.get("branch")), 40), refit) for refit in refits])
                for part in folders
                if (refits := part.meta.get("refits"))
            ),
        ],
    }


def _healing(part: SkipPart) -> list[Table]:
    """Tables of the tasks, if they were read, and of the losses before and after healing."""
    rows = []
    base = part.value("loss", "mean", model="original")
    for name in map(str, part.table["model"].dropna().unique()):
        cells: dict[str, Any] = {key: part.value(key, "mean", model=name) for key in ("loss", "kl", "greedy_agreement")}
        loss = cells["loss"]
        error = part.value("loss", "difference_stderr", model=name)
        if name != "original" and base is not None and loss is not None:
            cells["added"] = signed_loss(loss - base, error)
        rows.append((short(name, 40), cells))
    return [*task_change_tables(part.table, part.meta.get("headline") or {}), of_record("healed", rows)]


def _block_map(removal: Removal, layers: int) -> dict[str, Any]:
    """Values for the block map: for every layer its removed blocks, their order, and the loss that each one added."""
    losses = removal.losses
    steps = [minus(after - before, "+.3f") for before, after in pairwise(losses)] or [""] * len(removal.blocks)
    order = enumerate(zip(removal.places, steps, strict=True), start=1)
    removed: dict[int, dict[str, tuple[int, str]]] = {}
    for at, ((layer, part), step) in order:
        whole = removal.granularity == "any" and part == "layer"
        removed.setdefault(layer, {}).update(dict.fromkeys(BRANCHES if whole else [part], (at, step)))
    number = removal.counts[-1]
    count = f"{number} {PARTS.get(removal.granularity, 'block')}{'s' * (number > 1)} removed"
    loss = ""
    if losses:
        healed = "" if removal.healed is None else f", {quantity(removal.healed, 'nats')} healed"
        before, after = (quantity(losses[at], "nats") for at in (0, -1))
        loss = f"held-out loss of the search: {before} before, {after} after{healed}"
    return {
        "template": "blocks",
        "title": f"{short(removal.name, 60)}: {count}" if removal.name else count,
        "note": dotted([f"of {layers} layers", loss]),
        "modules": ", ".join(short(name, 80) for name in removal.modules),
        "branches": [removal.granularity] if removal.granularity == "layer" else BRANCHES,
        "cells": [(layer, removed.get(layer, {})) for layer in range(1, layers + 1)],
    }


def timed_models_table(source: PageSource) -> Table:
    """Table of the timed models: speed, size and loss. Sizes are multiples of those of the program's first model."""
    timed = timed_models(parts(source))
    rows = []
    several = len({model.program for model in timed}) > 1
    bases: dict[tuple[int, str], Mapping[str, float]] = {}
    for model in timed:
        base = bases.setdefault((id(model.part), model.program), model.bytes)
        cells = {
            "program": model.program if several else None,
            "decoding": model.decoding,
            "loss": model.loss,
            "added": None if model.original or model.added is None else signed_loss(model.added, model.error),
            **{phase: "1×" if model.baseline else ratio_text(ratio.speed_up) for phase, ratio in model.times.items()},
            **{
                name: size(amount) if model.baseline else f"{amount / base[name]:.2f}×"
                for name, amount in model.bytes.items()
                if base.get(name)
            },
        }
        rows.append((f"{short(model.name, 60)}{' (original)' * model.original}", cells))
    table = of_record("timed", rows)
    from_plans = ", ".join(short(model.name, 40) for model in timed if model.stated and not model.original)
    note = f"The loss of {from_plans} comes from the plan and was not measured here. " if from_plans else ""
    return replace(table, note=note + table.note)
