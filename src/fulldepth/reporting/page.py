"""Fills the template of the page with a table and its document: texts, tables, figures, the lens grid."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import unescape
from importlib.resources import files
from typing import Any

import jinja2
import pandas as pd
import plotly.graph_objects as go
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from fulldepth.reporting import evaluation, exits, figures, groups, measured, skip, story, training
from fulldepth.reporting.charts import Note
from fulldepth.reporting.kinds import (
    COMPARISON,
    EVALUATION,
    EVALUATIONS,
    EXIT,
    EXITS,
    GENERATION,
    GROUPS,
    SERIES,
    SINGLE,
    SKIP,
    TRAINING,
    Kind,
)
from fulldepth.reporting.measured import Shown
from fulldepth.reporting.phrases import (
    amount_of_text,
    dotted,
    percent,
    plain,
    plus_minus,
    scaled,
    seconds,
    short,
    size,
    visible,
)
from fulldepth.reporting.source import PageSource
from fulldepth.reporting.style import DARK, INK, PAPER, SEQUENTIAL, TEMPLATE
from fulldepth.reporting.tables import Meta, Table, settings_table, texts

TOKEN_LIMIT = 40
"""Maximum number of characters of a token of the lens grid."""


@dataclass(frozen=True)
class Content:
    """What a kind of page says around its figures; `PageSource` is its table and document."""

    findings: Callable[[Meta, PageSource], Sequence[Shown]] = measured.findings
    """The findings of the document or of the entry of one step."""
    story: Callable[[PageSource], dict[str, Any] | None] = lambda _: None
    """The opening paragraph: `sentences`, and the command to run `next` with its reason `why`; None = the first one."""
    models: Callable[[PageSource], Table | None] = lambda _: None
    """Table of several models side by side."""
    tables: Callable[[PageSource], Mapping[str, Sequence[Any]]] = lambda _: {}
    """Id of a section -> tables, block maps and texts before its figures."""
    title: Callable[[PageSource], str] = lambda source: measured.title(source.meta)
    warnings: Callable[[PageSource], list[str]] = lambda source: measured.warnings(source.meta)


_measurement = Content(story=story.opening, tables=measured.routers)
_comparison = Content(measured.differences, models=measured.side_by_side)
CONTENTS = {
    SINGLE: _measurement,
    SERIES: _measurement,
    COMPARISON: _comparison,
    TRAINING: Content(tables=training.tables),
    GROUPS: Content(groups.findings, models=groups.side_by_side, tables=groups.tables),
    SKIP: Content(
        skip.findings, skip.story, skip.side_by_side, skip.tables,
        lambda source: measured.title({"model": skip.model(source)}), skip.warnings,
    ),
    EXIT: Content(story=exits.story, tables=exits.tables),
    EXITS: _comparison,
    GENERATION: Content(story=exits.story, tables=exits.tables_of_generation),
    EVALUATION: Content(story=evaluation.story, tables=evaluation.tables),
    EVALUATIONS: replace(_comparison, models=evaluation.side_by_side),
}  # fmt: skip
"""Kind that a page is drawn as -> what it says."""


def payload(table: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows.

    Of a series, verdict, lens grids and figures are those of the last checkpoint, beside curves over training.
    """
    source = now = PageSource(table, meta)
    content = CONTENTS[source.kind]
    entry = meta
    left_out = measured.left_out(meta)
    if source.kind == SERIES:
        step = max(source.steps)
        entry = {"step": step, **next((one for one in meta.get("steps") or [] if int(one["step"]) == step), {})}
        now = PageSource(source.steps[step], {**meta, "model": entry.get("model") or meta.get("model")})
        left_out += measured.left_out(entry)
    found = content.findings(entry, source)
    said = measured.sentences(found)
    told = content.story(now) or ({"sentences": said[:1]} if said else None)
    if told and (following := meta.get("next")):
        told = {**told, "next": {name: short(following.get(name) or "", 900) for name in ("why", "command")}}
    strips = story.by_stack(now.table, now.meta) if source.kind in (SINGLE, SERIES) else {}
    drawn = figures.build(table, meta)
    settings = [] if meta.get("models") else [settings_table("All settings", meta.get("settings"))]
    words: dict[str, int] = {}
    grids = [
        {"label": short(model.get("label", "?"), 60), "samples": pack(model.get("lens_grid"), words)}
        for model in entry.get("models") or [entry]
    ]
    return {
        "kind": source.page,
        "meta": meta,
        "title": content.title(source),
        "step": entry.get("step"),
        "story": told,
        "profiles": [
            {"stack": stack, **strip} for stack, facts in strips.items() if (strip := story.profile(facts))
        ],
        "cards": [
            dict(zip(("name", "symbol", "digits", "unit", "error"), (*one.card, plus_minus(one.entry)), strict=True))
            for one in found
            if one.card
        ],
        "models": content.models(source),
        "more_sentences": said,
        "warnings": content.warnings(source),
        "left_out": list(dict.fromkeys(left_out)),
        "sections": arrange(drawn, source.page, {"settings": settings, **content.tables(source)}),
        "figures": {name: packed(figure) for name, figure in drawn.items()},
        "lens": [grid for grid in grids if grid["samples"]],
        "words": list(words),
        "intro": texts()["intros"][source.page.sections],
        "notes": notes(source),
        **(skip.for_template(source) if source.kind == SKIP else {}),
    }  # fmt: skip


def arrange(names: Iterable[str], kind: Kind, tables: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Sections with their slots; a slot is a figure with all its variants. Secondary slots are folded.

    Curves over steps whose section is not on the page get a section of their own, and so do other figures.

    Args:
        names: of the figures.
        kind: of the page.
        tables: id of a section -> tables before its figures; empty ones are left out.
    """
    records = {record.name: record for record, _ in figures.records(kind.drawn_as or kind.name)}
    every = [*texts()["sections"][kind.sections], *({**one, "after": True} for one in texts()["after"])]
    placed: dict[str, dict[str, list[str]]] = {section["id"]: {} for section in every}
    for name in names:
        base = name.partition(":")[0]
        home = records[base].section
        if home not in placed:
            home = "training" if base.startswith("steps_") else "further"
        placed[home].setdefault(base, []).append(name)
    arranged = []
    for section in every:
        slots = placed[section["id"]]
        shown = [one for one in tables.get(section["id"], []) if not isinstance(one, Table) or one.rows]
        if slots or shown:
            primary, folded = (
                [slots[base] for base in slots if records[base].secondary == way] for way in (False, True)
            )
            parts = {"slots": primary, "folded": folded, "tables": shown, "first": section["id"] == kind.first}
            arranged.append({"intro": "", "after": False, **section, **parts})
    return arranged


def notes(source: PageSource) -> list[Note]:
    """The notes on how to read the figures of these results: those on one of its measures, or that name none."""
    measures = {str(name) for name in source.table["measure"].unique()}
    general = [Note(**texts()["standard_errors"])] if source.page.sections in ("models", "training") else []
    every = [*general, *(note for record, _ in figures.records(source.kind) for note in record.notes)]
    return [note for note in dict.fromkeys(every) if not note.measures or measures & {*note.measures}]


def pack(grid: Mapping[str, Any] | None, words: dict[str, int]) -> list[dict[str, Any]]:
    """The samples of a lens grid for the page; distinct tokens are added to `words`.

    Each sample has `title`, `tokens` and `targets` (indices of words), `saturation` (layers; null if unknown), and by
    layer 0..L the rows `top` (indices) and `probability` (thousandths; null where unknown).
    """

    def index(token: object) -> int:
        raw = "" if token is None else str(token)
        shown = visible(raw if len(raw) <= TOKEN_LIMIT else raw[: TOKEN_LIMIT - 1] + "…")
        return words.setdefault(shown, len(words))

    return [
        {
            "title": short(sample.get("title") or f"Sample {number}", 80),
            "tokens": [index(token) for token in sample["tokens"]],
            "targets": [index(token) for token in sample["targets"]],
            "saturation": list(sample["saturation"]),
            "top": [[index(token) for token, _ in row] for row in sample["grid"]],
            "probability": [
                [None if value is None else round(1000 * min(max(value, 0.0), 1.0)) for _, value in row]
                for row in sample["grid"]
            ],
        }
        for number, sample in enumerate((grid or {}).get("samples") or [], start=1)
    ]


def packed(drawn: go.Figure) -> dict[str, Any]:
    """`data`, `layout` and `about` (title, subtitle, alt, variant, beside) of a figure, without the shared layout.

    The texts of `about` are not escaped, unlike plotly's labels.
    """
    raw = drawn.to_plotly_json()
    layout = {key: value for key, value in raw["layout"].items() if key not in ("template", "title", "meta")}
    about = dict(raw["layout"]["meta"])
    about |= {name: unescape(text.replace("<br>", " ")) for name, text in about.items() if isinstance(text, str)}
    return {"data": compact(list(raw["data"])), "layout": compact(layout), "about": about}


def compact(value: Any) -> Any:
    """The value as JSON: floats to six significant digits, NaN as null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): compact(part) for key, part in value.items()}
    return [compact(part) for part in value] if isinstance(value, list | tuple) else value


def render(table: pd.DataFrame, meta: Mapping[str, Any]) -> str:
    """The page as one HTML document with style, script, plotly.js and data embedded; it makes no requests.

    Markup in names of models or tokens is shown literally.

    Args:
        table: the rows.
        meta: their document.
    """
    page = payload(table, meta)
    data = {name: page[name] for name in ("figures", "lens", "words")}
    data |= {"template": compact(TEMPLATE.to_plotly_json()), "dark": DARK}
    return _environment().get_template("page.html").render(page, data=embed(data), plotly=plotly())


def index(title: str, chapters: Sequence[Mapping[str, Any]]) -> str:
    """The page of a measurement and what was removed after it: the strip of layers, three sentences, and commands.

    Args:
        title: of the page.
        chapters: with `href`, `title`, `table`, `meta`, and the `command` that made them; the measurement first.
    """
    measurement, *others = [PageSource(one["table"], one["meta"]) for one in chapters]
    facts = story.Facts(measurement.table, measurement.layers)
    folders = [part for source in others for part in skip.parts(source)]
    removed = [layer for removal in skip.removals(folders)[:1] for layer, _ in removal.places]
    strip = story.profile(facts, removed)
    told = story.story(facts, measurement.meta) or {"sentences": []}
    return _environment().get_template("index.html").render(
        title=title, chapters=chapters, profiles=[strip] if strip else [], meta=measurement.meta,
        sentences=[*told["sentences"][:1], *skip.cost_and_saving(folders)],
    )  # fmt: skip


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("fulldepth.reporting", "parts")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    shades = [(shade, INK if at < 6 else PAPER) for at, shade in enumerate(SEQUENTIAL)]
    night = [(DARK[shade], DARK[INK if at < 5 else PAPER]) for at, shade in enumerate(SEQUENTIAL)]
    part = {"part": lambda name: Markup(loader.get_source(environment, name)[0])}
    environment.globals |= {**part, "ramp": {"light": shades, "dark": night}, "names": texts()}
    own = (amount_of_text, dotted, percent, plain, scaled, seconds, short, size, training.objective_line)
    environment.filters |= {one.__name__: one for one in own}
    environment.tests["table"] = lambda one: isinstance(one, Table)
    return environment


@cache
def plotly() -> str:
    """plotly.js with the cartesian trace types, gzip-compressed, as base64; the page unpacks it.

    The bundle is the file `plotly-cartesian.min.js` of the npm package `plotly.js-cartesian-dist-min` (MIT licence,
    beside it), compressed. It is a third of the full bundle that the Python package of plotly carries.
    """
    bundle = files("fulldepth.reporting").joinpath("parts", "plotly", "plotly-cartesian.min.js.gz")
    return base64.b64encode(bundle.read_bytes()).decode("ascii")


def embed(document: Any) -> str:
    """JSON that is safe inside a script element: ASCII only, without characters that are special in HTML."""
    return htmlsafe_json_dumps(document, allow_nan=False, separators=(",", ":"))
