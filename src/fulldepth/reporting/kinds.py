"""Kinds of pages: title, content around the figures, and sections.

A new kind of results needs one `PageKind` here, built from functions of its own file, and a line in `VERBS` of
`figures/record.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulldepth.figures.record import (
    COMPARISON,
    EVALUATION,
    EVALUATIONS,
    EXIT,
    EXITS,
    GENERATION,
    SERIES,
    SINGLE,
    TRAINING,
    TRAININGS,
    VERBS,
    Source,
)
from fulldepth.figures.skip_results import TOGETHER
from fulldepth.reporting import evaluated, exits, measured, skipping, story, training
from fulldepth.reporting.findings import Shown
from fulldepth.reporting.measured import Meta, Pairs
from fulldepth.reporting.sections import (
    OF_EVALUATION,
    OF_EXIT,
    OF_GENERATION,
    OF_MODELS,
    OF_SKIPPING,
    OF_TRAINING,
    Section,
)
from fulldepth.reporting.tables import Table


@dataclass(frozen=True)
class PageKind:
    """How results of one kind are shown on a page; `Source` is their table and document."""

    name: str
    """Shown beside the name of the program: `Layer report`."""
    byline: Callable[[Source], str]
    """One line under the title."""
    about: Callable[[Source], Pairs]
    """(name, text) pairs on the model, the data and the run; an empty text is not shown."""
    findings: Callable[[Meta, Source], Sequence[Shown]] = measured.findings
    """The findings of the document or of the entry of one step."""
    title: Callable[[Source], str] = lambda source: measured.title(source.meta)
    models: Callable[[Source], Table | None] = lambda _: None
    """Table of several models side by side."""
    tables: Callable[[Source], Mapping[str, Sequence[Table | Mapping[str, Any]]]] = lambda _: {}
    """Id of a section -> tables (or strips of layers) before its figures."""
    warnings: Callable[[Source], list[str]] = lambda source: measured.warnings(source.meta)
    left_out: Callable[[Source], list[list[str]]] = lambda source: measured.left_out(source.meta)
    about_title: str = "What was measured"
    in_words: str = "The table in words"
    """Title of the folded sentences."""
    sections: Sequence[Section] = OF_MODELS
    opening: Callable[[Source], dict[str, Any] | None] = lambda _: None
    """The opening paragraph: `sentences`, and the command to run `next` with the reason `why`; None without one."""


def _skip(name: str) -> PageKind:
    return PageKind(
        name,
        skipping.byline,
        skipping.about,
        skipping.findings,
        lambda source: measured.title({"model": skipping.model(source)}),
        skipping.side_by_side,
        skipping.tables,
        skipping.warnings,
        opening=skipping.opening,
        in_words="The findings in words",
        sections=OF_SKIPPING,
    )


def _measurement(name: str) -> PageKind:
    return PageKind(
        name,
        lambda source: measured.byline(source.meta),
        lambda source: measured.about(source.meta),
        tables=measured.routers,
        opening=lambda source: story.opening(source.table, source.meta),
    )


PAGES = {
    SINGLE: _measurement("Layer report"),
    SERIES: _measurement("Layer report over training"),
    COMPARISON: PageKind(
        "Comparison of models",
        lambda source: measured.compared(source.meta, "models"),
        lambda source: measured.about_models(source.meta),
        measured.differences,
        models=measured.side_by_side,
    ),
    TRAINING: PageKind(
        "Training run",
        lambda source: measured.byline(source.meta, "trained"),
        lambda source: training.about(source.meta),
        tables=training.tables,
        about_title="What was trained",
        sections=OF_TRAINING,
    ),
    TRAININGS: PageKind(
        "Comparison of training runs",
        training.byline_of_runs,
        lambda source: training.about_runs(source.meta),
        training.differences,
        models=training.side_by_side,
        tables=training.tables_of_runs,
        about_title="What was trained",
        sections=OF_TRAINING,
    ),
    "skip": _skip("Removed blocks"),
    "curve": _skip("Removal curve"),
    "bench": _skip("Benchmark of exports"),
    "quantise": _skip("Skipping and quantisation"),
    TOGETHER: _skip("Skipping report"),
    EXIT: PageKind(
        "Early exit",
        lambda source: measured.byline(source.meta, "judged"),
        exits.about,
        opening=exits.story,
        tables=exits.tables,
        in_words="The findings in words",
        sections=OF_EXIT,
    ),
    EXITS: PageKind(
        "Early exit of several models",
        lambda source: measured.compared(source.meta, "models"),
        lambda source: measured.about_models(source.meta),
        measured.differences,
        models=measured.side_by_side,
        tables=exits.tables_of_models,
        sections=OF_EXIT,
    ),
    GENERATION: PageKind(
        "Generation",
        lambda source: measured.byline(source.meta),
        exits.about,
        opening=exits.story,
        tables=exits.tables_of_generation,
        about_title="What was generated",
        in_words="The findings in words",
        sections=OF_GENERATION,
    ),
    EVALUATION: PageKind(
        "Evaluation by layer",
        evaluated.byline,
        evaluated.about,
        opening=evaluated.story,
        tables=evaluated.tables,
        about_title="What was evaluated",
        in_words="The findings in words",
        sections=OF_EVALUATION,
    ),
    EVALUATIONS: PageKind(
        "Evaluation of several models",
        lambda source: measured.compared(source.meta, "models"),
        lambda source: measured.about_models(source.meta),
        measured.differences,
        models=evaluated.side_by_side,
        sections=OF_EVALUATION,
    ),
}
"""Kind of results -> kind of page."""


def kind_of(source: Source) -> str:
    """The key of `PAGES` for these results."""
    stated = source.meta.get("kind")
    return str(stated) if stated in VERBS else source.kind
