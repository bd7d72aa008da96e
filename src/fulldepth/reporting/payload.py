"""The JSON document that the page's script reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go

from fulldepth import figures
from fulldepth.figures.record import SERIES, SINGLE, Source
from fulldepth.figures.style import DARK, TEMPLATE
from fulldepth.reporting import lens
from fulldepth.reporting.findings import cards, sentences
from fulldepth.reporting.kinds import PAGES, PageKind, kind_of
from fulldepth.reporting.measured import left_out
from fulldepth.reporting.phrases import short
from fulldepth.reporting.profile import profile
from fulldepth.reporting.sections import arrange
from fulldepth.reporting.story import by_stack, opening
from fulldepth.results import Results


def payload(results: Results, where: str = "") -> dict[str, Any]:
    """The document embedded in the page; `where` states where its rows are on disk, if not beside it.

    Of a series, verdict, lens grids and figures are those of the last checkpoint, beside curves over training.
    """
    source = Source(results.table, results.meta)
    meta, table, kind = source.meta, source.table, kind_of(source)
    page, vocabulary = PAGES[kind], lens.Vocabulary()
    shown = {name: pack(drawn) for name, drawn in figures.build(table, meta).items()}
    entry = _last(source) if kind == SERIES else meta
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
        "left_out": page.left_out(source) if entry is meta else [*page.left_out(source), *left_out(entry)],
        "warnings": page.warnings(source),
        "sections": arrange(shown, source.kind, page.sections, page.tables(source)),
        **_view(page, entry, source, vocabulary),
        "figures": shown,
        "words": list(vocabulary.index),
        "pictures": list(vocabulary.pictures),
        "lens_texts": {
            lens.TOKENS: asdict(lens.LensTexts()),
            lens.SAMPLES: asdict(lens.OF_SAMPLES),
        },
        "measures": sorted({str(name) for name in table["measure"].unique()}),
        "where": where or "The file results.parquet beside this page holds all rows.",
        "template": compact(TEMPLATE.to_plotly_json()),
        "dark": DARK,
    }


def _view(page: PageKind, entry: Mapping[str, Any], source: Source, vocabulary: lens.Vocabulary) -> dict[str, Any]:
    """Verdict and lens grids of the last checkpoint (its `entry`) or of the whole document."""
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
        "lens": [grid for grid in grids if grid["samples"]],
    }


def _last(source: Source) -> dict[str, Any]:
    """What the document says of the last checkpoint."""
    entries = {int(entry["step"]): entry for entry in source.meta.get("steps") or []}
    step = max(source.steps)
    return {**entries.get(step, {}), "step": step}


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
