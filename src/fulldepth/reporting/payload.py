"""The JSON document that the page's script reads."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import plotly.graph_objects as go

from fulldepth import figures
from fulldepth.figures.record import SERIES, SINGLE, Source
from fulldepth.figures.style import DARK, TEMPLATE
from fulldepth.reporting import lens
from fulldepth.reporting.findings import cards, sentences
from fulldepth.reporting.kinds import PAGES, kind_of
from fulldepth.reporting.phrases import short
from fulldepth.reporting.sections import arrange
from fulldepth.reporting.story import by_stack, profile
from fulldepth.results import Results


def payload(results: Results, where: str = "") -> dict[str, Any]:
    """The document embedded in the page; `where` states where its rows are on disk, if not beside it.

    Of a series, verdict, lens grids and figures are those of the last checkpoint, beside curves over training.
    """
    source = now = Source(results.table, results.meta)
    meta, table, kind = source.meta, source.table, kind_of(source)
    page, vocabulary = PAGES[kind], lens.Vocabulary()
    entry, left_out = meta, page.left_out(source)
    if kind == SERIES:
        step = max(source.steps)
        entry = {"step": step, **next((one for one in meta.get("steps") or [] if int(one["step"]) == step), {})}
        now = Source(source.steps[step], {**meta, "model": entry.get("model") or meta.get("model")})
        left_out += page.left_out(Source(table, entry))
    findings, story = page.findings(entry, source), page.opening(now)
    first, more = sentences(findings)
    strips = by_stack(now.table, now.meta) if source.kind in (SINGLE, SERIES) else {}
    profiles = {stack: profile(facts) for stack, facts in strips.items()}
    shown = {name: pack(drawn) for name, drawn in figures.build(table, meta).items()}
    models = page.models(source)
    grids = [
        {
            "label": short(model.get("label", "?"), 60),
            **lens.pack(model.get("lens_grid"), vocabulary),
        }
        for model in entry.get("models") or [entry]
    ]
    return {
        "kind": kind,
        "kind_name": page.name,
        "title": page.title(source),
        "byline": page.byline(source),
        "models": models and asdict(models),
        "in_words": page.in_words,
        "about": [[what, text] for what, text in page.about(source) if text],
        "about_title": page.about_title,
        "left_out": left_out,
        "warnings": page.warnings(source),
        "sections": arrange(shown, source.kind, page.sections, page.tables(source)),
        "step": entry.get("step"),
        "story": story,
        "profiles": [{"stack": stack, **strip} for stack, strip in profiles.items() if strip],
        "cards": cards(findings),
        "sentences": [] if story else first,
        "more_sentences": [*first, *more] if story else more,
        "lens": [grid for grid in grids if grid["samples"]],
        "lens_texts": lens.TEXTS,
        "figures": shown,
        "words": list(vocabulary.index),
        "pictures": list(vocabulary.pictures),
        "measures": sorted({str(name) for name in table["measure"].unique()}),
        "where": where or "The file results.parquet beside this page holds all rows.",
        "template": compact(TEMPLATE.to_plotly_json()),
        "dark": DARK,
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
