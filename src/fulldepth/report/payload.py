"""Everything that the page's script reads, as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from fulldepth import figures
from fulldepth.figures.record import SKIP, Source
from fulldepth.figures.steps import thin
from fulldepth.figures.style import DARK, TEMPLATE
from fulldepth.report import lens, routers, skipping, tables, training, verdict
from fulldepth.report.sections import arrange
from fulldepth.results import Results

MAX_STEPS = 60
"""Positions of the step slider; the curves over training always have all checkpoints."""
MAX_STEP_NUMBERS = 4_000_000
"""Numbers that the figures of all those positions may hold together (about 25 MB)."""

Packed = dict[str, dict[str, Any]]


def payload(results: Results, where: str = "") -> dict[str, Any]:
    """The document embedded in the page; `where` says where its rows are on disk, if not beside it.

    `figures` holds the figures as first shown, `views` what changes with the step slider (a single view without a
    series): verdict, lens grids, and per figure only the parts of its traces that differ from `figures`.
    """
    meta, table = results.meta, results.table
    vocabulary = lens.Vocabulary()
    shown: Packed = {name: pack(drawn) for name, drawn in figures.build(table, meta).items()}
    kind = kind_of(results)
    ours = kind in skipping.PAGES
    return {
        "kind": kind,
        **(skipping.head(table, meta, shown) if ours else _head(kind, table, meta, shown, vocabulary)),
        "figures": shown,
        "checkpoints": int(table["step"].nunique()) if kind == "series" else 0,
        "words": list(vocabulary.index),
        "measures": sorted({str(name) for name in table["measure"].unique()}),
        "table": {**tables.pack(table), "where": where},
        "template": compact(TEMPLATE.to_plotly_json()),
        "dark": DARK,
    }


def _head(
    kind: str, table: pd.DataFrame, meta: Mapping[str, Any], shown: Packed, vocabulary: lens.Vocabulary
) -> dict[str, Any]:
    """What stands around the figures of a measurement, a comparison or training runs."""
    views = _steps(table, meta, shown, vocabulary) if kind == "series" else [_view(meta, meta, vocabulary)]
    runs = kind in ("training", "trainings")
    return {
        "title": verdict.title(meta),
        "byline": verdict.byline(meta),
        "models": training.side_by_side(meta) if kind == "trainings" else verdict.side_by_side(meta),
        "about": verdict.about(meta),
        "remarks": verdict.remarks(meta),
        "sections": arrange(shown, kind, training.tables(table, meta) if runs else routers.tables(meta)),
        "views": views,
    }


def kind_of(results: Results) -> str:
    """What the page is of: `single`, `series`, `comparison`, one `training` run, several `trainings`, or one of
    `skipping.PAGES`.
    """
    source = Source(results.table, results.meta)
    return str(results.meta["kind"]) if source.kind == SKIP else source.kind


def _view(entry: Mapping[str, Any], meta: Mapping[str, Any], vocabulary: lens.Vocabulary) -> dict[str, Any]:
    """Verdict and lens grids of one step, or of the whole run."""
    headline = entry.get("headline") or {}
    if meta.get("of") == "training":
        said, more = training.sentences(headline)
    elif meta.get("models"):
        said, more = verdict.sentences_of_comparison(headline)
    else:
        said, more = verdict.sentences(headline), []
    grids = [{"label": "", "samples": lens.pack(entry.get("lens_grid"), vocabulary)}]
    if meta.get("models"):
        grids = [
            {
                "label": verdict.short(model.get("label", "?"), 60),
                "samples": lens.pack(model.get("lens_grid"), vocabulary),
            }
            for model in meta["models"]
        ]
    return {
        "step": entry.get("step"),
        "cards": []
        if meta.get("models")
        else verdict.cards(headline, (entry.get("model") or meta.get("model") or {}).get("num_layers")),
        "sentences": said,
        "more_sentences": more,
        "left_out": verdict.left_out(entry) if entry is not meta else [],
        "lens": [grid for grid in grids if grid["samples"]],
        "patches": {},
    }


def _steps(
    table: pd.DataFrame, meta: Mapping[str, Any], shown: Packed, vocabulary: lens.Vocabulary
) -> list[dict[str, Any]]:
    """One view a step, ascending. Adds to `shown` what the last step lacks and fixes the ranges over all steps."""
    entries = {int(entry["step"]): entry for entry in meta.get("steps") or []}
    steps = thin(sorted({int(step) for step in table["step"]}), _affordable(shown))
    drawn: list[Packed] = []
    views = []
    for step in steps:
        entry = {**entries.get(step, {}), "step": step}
        model = entry.get("model") or meta.get("model")
        rows = table[table["step"] == step].drop(columns="step")
        drawn.append({name: pack(made) for name, made in figures.build(rows, {**meta, "model": model}).items()})
        views.append(_view(entry, meta, vocabulary))
    for made in drawn:
        for name, packed in made.items():
            shown.setdefault(name, packed)
    for name in {name for made in drawn for name in made}:
        fix_range(shown[name], [made[name] for made in drawn if name in made])
    for view, made in zip(views, drawn, strict=True):
        view["patches"] = {name: difference(made[name], shown[name]) if name in made else None
                           for name in shown if not name.startswith("steps_")}  # fmt: skip
    return views


def _affordable(shown: Packed) -> int:
    """How many steps the page can hold."""
    numbers = sum(_numbers(trace) for packed in shown.values() for trace in packed["data"])
    return max(2, min(MAX_STEPS, MAX_STEP_NUMBERS // max(numbers, 1)))


def _numbers(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_numbers(part) for part in value.values())
    return sum(_numbers(part) for part in value) if isinstance(value, list) else 1


def pack(drawn: go.Figure) -> dict[str, Any]:
    """`data`, `layout` and `about` (title, subtitle, alt, variant, beside) of a figure, without what all share."""
    raw = drawn.to_plotly_json()
    layout = {key: value for key, value in raw["layout"].items() if key not in ("template", "title", "meta")}
    about = dict(raw["layout"]["meta"])
    return {"data": compact(list(raw["data"])), "layout": compact(layout), "about": about}


def compact(value: Any) -> Any:
    """The value as JSON: floats to six significant digits, NaN as null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): compact(part) for key, part in value.items()}
    return [compact(part) for part in value] if isinstance(value, list | tuple) else value


def difference(packed: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """What turns `base` into `packed`: changed entries of each trace (null = gone), or all of it if traces differ."""
    about = packed["about"]["alt"]
    names = [[trace.get("name") for trace in figure["data"]] for figure in (packed, base)]
    if names[0] != names[1]:
        return {"data": packed["data"], "alt": about}
    patches = []
    for trace, old in zip(packed["data"], base["data"], strict=True):
        changed = {key: value for key, value in trace.items() if old.get(key) != value}
        patches.append({**changed, **{key: None for key in old if key not in trace}})
    return {"patch": patches, "alt": about}


def fix_range(base: dict[str, Any], every: list[dict[str, Any]]) -> None:
    """Give `base` one value range that holds at all steps, so that the slider moves the curves and not the axis."""
    axis = base["layout"].get("yaxis", {})
    if axis.get("range") or axis.get("type") == "category" or any("z" in trace for trace in base["data"]):
        return
    values = [
        value for packed in every for trace in packed["data"] for value in trace.get("y", []) if value is not None
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
