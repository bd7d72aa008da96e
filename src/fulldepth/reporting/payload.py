"""The JSON document that the page's script reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go

from fulldepth import figures
from fulldepth.figures.draw import scale_without
from fulldepth.figures.record import SERIES, SINGLE, Source
from fulldepth.figures.steps import thin
from fulldepth.figures.style import DARK, TEMPLATE
from fulldepth.reporting import lens, rows
from fulldepth.reporting.findings import cards, sentences
from fulldepth.reporting.kinds import PAGES, PageKind, kind_of
from fulldepth.reporting.measured import left_out
from fulldepth.reporting.phrases import short
from fulldepth.reporting.profile import profile
from fulldepth.reporting.sections import arrange
from fulldepth.reporting.story import by_stack, opening
from fulldepth.results import Results

MAX_STEPS = 60
"""Maximum number of slider positions; curves over training always show all checkpoints."""
MAX_STEP_NUMBERS = 4_000_000
"""Maximum number of values in the figures of all slider positions (about 25 MB)."""

Packed = dict[str, dict[str, Any]]


def payload(results: Results, where: str = "") -> dict[str, Any]:
    """The document embedded in the page; `where` states where its rows are on disk, if not beside it.

    `figures` holds the figures as first shown. `views` holds what changes with the step slider (one view if the results
    are not a series): verdict, lens grids, and per figure only the parts of its traces that differ from `figures`.
    """
    source = Source(results.table, results.meta)
    meta, table, kind = source.meta, source.table, kind_of(source)
    page, vocabulary = PAGES[kind], lens.Vocabulary()
    shown: Packed = {name: pack(drawn) for name, drawn in figures.build(table, meta).items()}
    views = _steps(page, source, shown, vocabulary) if kind == SERIES else [_view(page, meta, source, vocabulary)]
    models = page.models(source)
    return {
        "kind": kind,
        "kind_name": page.name,
        "title": page.title(source),
        "byline": page.byline(source),
        "models": models and asdict(models),
        "in_words": page.in_words,
        "about": [[what, text] for what, text in page.about(source) if text],
        "about_title": page.about_title,
        "remarks": {"left_out": page.left_out(source), "warnings": page.warnings(source)},
        "sections": arrange(shown, source.kind, page.sections, page.tables(source)),
        "views": views,
        "figures": shown,
        "checkpoints": int(table["step"].nunique()) if kind == SERIES else 0,
        "words": list(vocabulary.index),
        "pictures": list(vocabulary.pictures),
        "lens_texts": {
            lens.TOKENS: asdict(page.lens),
            lens.SAMPLES: asdict(lens.OF_SAMPLES),
            lens.BOXES: asdict(lens.OF_BOXES),
        },
        "measures": sorted({str(name) for name in table["measure"].unique()}),
        "table": {**rows.pack(table), "where": where},
        "template": compact(TEMPLATE.to_plotly_json()),
        "dark": DARK,
    }


def _view(page: PageKind, entry: Mapping[str, Any], source: Source, vocabulary: lens.Vocabulary) -> dict[str, Any]:
    """Verdict and lens grids of one step (its `entry`) or of the whole document."""
    findings = page.findings(entry, source)
    first, more = sentences(findings, page.lead)
    models = entry.get("models") or [{"label": "", "lens_grid": entry.get("lens_grid")}]
    grids = [
        {
            "label": short(model.get("label", "?"), 60),
            "of": lens.kind_of(model.get("lens_grid")),
            "samples": lens.pack(model.get("lens_grid"), vocabulary),
        }
        for model in models
    ]
    top = _top(source, entry) if source.kind in (SINGLE, SERIES) else {"story": page.opening(source)}
    if top["story"]:
        first, more = [], [*first, *more]
    return {
        "step": entry.get("step"),
        "profiles": [],
        **top,
        "cards": cards(findings),
        "sentences": first,
        "more_sentences": more,
        "left_out": left_out(entry) if source.kind == SERIES else [],
        "lens": [grid for grid in grids if grid["samples"]],
        "patches": {},
    }


def _top(source: Source, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The paragraph and the strips of layers, one for each stack, of one step or of the only measurement."""
    step, model = entry.get("step"), entry.get("model") or source.meta.get("model") or {}
    table = source.table if step is None else source.steps[int(step)]
    meta = {**source.meta, "model": model}
    strips = {stack: profile(facts) for stack, facts in by_stack(table, meta).items()}
    return {
        "story": opening(table, meta),
        "profiles": [{"stack": stack, **strip} for stack, strip in strips.items() if strip],
    }


def _steps(page: PageKind, source: Source, shown: Packed, vocabulary: lens.Vocabulary) -> list[dict[str, Any]]:
    """One view per step, ascending. Adds to `shown` the figures missing at the last step, and fixes all axis ranges."""
    entries = {int(entry["step"]): entry for entry in source.meta.get("steps") or []}
    drawn: list[Packed] = []
    views = []
    for step in thin(list(source.steps), _affordable(shown)):
        entry = {**entries.get(step, {}), "step": step}
        meta = {**source.meta, "model": entry.get("model") or source.meta.get("model")}
        at_step = figures.build(source.steps[step].drop(columns="step"), meta)
        drawn.append({name: pack(figure) for name, figure in at_step.items()})
        views.append(_view(page, entry, source, vocabulary))
    for packed in drawn:
        for name in packed:
            shown.setdefault(name, packed[name])
    for name in {name for packed in drawn for name in packed}:
        fix_range(shown[name], [packed[name] for packed in drawn if name in packed])
    for view, packed in zip(views, drawn, strict=True):
        view["patches"] = {name: difference(packed[name], shown[name]) if name in packed else None
                           for name in shown if not name.startswith("steps_")}  # fmt: skip
    return views


def _affordable(shown: Packed) -> int:
    """Number of steps that fit on the page."""
    numbers = sum(_numbers(trace) for packed in shown.values() for trace in packed["data"])
    return max(2, min(MAX_STEPS, MAX_STEP_NUMBERS // max(numbers, 1)))


def _numbers(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_numbers(part) for part in value.values())
    return sum(_numbers(part) for part in value) if isinstance(value, list) else 1


def pack(drawn: go.Figure) -> dict[str, Any]:
    """`data`, `layout` and `about` (title, subtitle, alt, variant, beside) of a figure, without the shared layout."""
    raw = drawn.to_plotly_json()
    layout = {key: value for key, value in raw["layout"].items() if key not in ("template", "title", "meta")}
    return {"data": compact(list(raw["data"])), "layout": compact(layout), "about": dict(raw["layout"]["meta"])}


def compact(value: Any) -> Any:
    """The value as JSON: floats to six significant digits, NaN as null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): compact(part) for key, part in value.items()}
    return [compact(part) for part in value] if isinstance(value, list | tuple) else value


def difference(packed: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Changes from `base` to `packed`: changed entries per trace (null = removed), or all if the traces differ."""
    alt = packed["about"]["alt"]
    names = [[trace.get("name") for trace in figure["data"]] for figure in (packed, base)]
    if names[0] != names[1]:
        return {"data": packed["data"], "alt": alt}
    patches = []
    for trace, old in zip(packed["data"], base["data"], strict=True):
        changed = {key: value for key, value in trace.items() if old.get(key) != value}
        patches.append({**changed, **{key: None for key in old if key not in trace}})
    return {"patch": patches, "alt": alt}


def fix_range(base: dict[str, Any], at_steps: list[dict[str, Any]]) -> None:
    """Set one value range in `base` that covers all steps, so that the slider moves the curves, not the axis."""
    axis = base["layout"].get("yaxis", {})
    if base.get("about", {}).get("apart"):
        _fix_range_without_first(base, at_steps)
        return
    if axis.get("range") or axis.get("type") == "category" or any("z" in trace for trace in base["data"]):
        return
    values = [
        value for packed in at_steps for trace in packed["data"] for value in trace.get("y", []) if value is not None
    ]
    values += [shape["y0"] for shape in base["layout"].get("shapes", []) if shape.get("yref", "y") == "y"]
    if not values:
        return
    low, high = min(values), max(values)
    if axis.get("type") == "log":
        low, high = math.log10(low), math.log10(high)
    elif axis.get("rangemode") == "tozero":
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * ((high - low) or abs(high) or 1.0)
    bottom = low if axis.get("rangemode") == "tozero" and low == 0 else low - margin
    base["layout"]["yaxis"] = {**axis, "range": compact([bottom, high + margin])}


def _fix_range_without_first(base: dict[str, Any], at_steps: list[dict[str, Any]]) -> None:
    """As `fix_range`, for a figure whose first layer is beyond the scale."""
    apart = base["about"]["apart"]
    values = [
        value
        for packed in at_steps
        for trace in packed["data"]
        if trace.get("name") in apart["lines"]
        for layer, value in zip(trace.get("x", []), trace.get("y", []), strict=False)
        if layer != apart["layer"] and value is not None
    ]
    if values:
        base["layout"]["yaxis"]["range"] = list(scale_without(values))
