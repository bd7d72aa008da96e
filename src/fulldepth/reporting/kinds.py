"""The kinds of results: one record each, with what documents, comparisons and pages have to know of a kind."""

from __future__ import annotations

from dataclasses import dataclass

SINGLE = "measure"
SERIES = "series"
COMPARISON = "comparison"
TRAINING = "training"
GROUPS = "groups"
SKIP = "skip"
EXIT = "exit"
GENERATION = "generation"
EVALUATION = "evaluation"
EXITS = "exits"
EVALUATIONS = "evaluations"
TOGETHER = "skips"
"""Several folders of `fulldepth skip` on one page: `meta["parts"]` holds their documents with a `label`, the column
`folder` the label of each row."""


@dataclass(frozen=True)
class Kind:
    """A kind of results, or of pages."""

    name: str
    """The entry `kind` of the document. Pages of series, of several folders and of certain comparisons have names of
    their own."""
    title: str
    """Title of the page."""
    sections: str
    """Sections of the page and its introduction, by their name in `page.yaml`."""
    first: str = ""
    """Section that follows the first screen."""
    verb: str = "measured"
    """What was done to the model."""
    drawn_as: str = ""
    """Kind whose figures and texts the page has; empty = this one."""
    opening: tuple[str, ...] = ()
    """Findings of a folder of `fulldepth skip` that open its page; empty = the first one."""
    called: str = ""
    """What one such result is called in a sentence; only kinds with such a name can be compared."""
    held: tuple[str, ...] = ()
    """Entries of the document that a comparison holds for each model."""
    is_grouped: bool = False
    """Whether groups of such results over seeds can be compared."""
    compares: str = ""
    """The entry `of` of a comparison that has this page."""
    columns: tuple[str, ...] = ()
    """Columns of the table beside those of every table."""
    holds_models: bool = False
    """Whether the document has the entry `models`."""
    is_layered: bool = False
    """Whether the table is of one model, with no layer beyond its depth."""
    stops: bool = False
    """Whether the model stops early, and the document counts by layer where."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            SINGLE,
            title="Layer report",
            sections="models",
            first="displacement",
            called="a measurement",
            is_grouped=True,
            is_layered=True,
        ),
        Kind(SERIES, title="Layer report over training", sections="models", first="displacement"),
        Kind(
            COMPARISON,
            title="Comparison of models",
            sections="models",
            first="displacement",
            columns=("model", "difference"),
            holds_models=True,
        ),
        Kind(
            TRAINING,
            title="Training run",
            sections="training",
            first="loss",
            verb="trained",
            called="a training run",
            is_grouped=True,
            columns=("step",),
            is_layered=True,
        ),
        Kind(GROUPS, title="Comparison over seeds", sections="groups", first="seeds", compares=GROUPS),
        Kind(
            SKIP,
            title="Removed blocks",
            sections="skipping",
            first="blocks",
            opening=("target_speedup", "target_bytes", "target_cache", "max_loss", "loss_added", "sure_rounds"),
        ),
        Kind(
            "heal",
            title="Healed model",
            sections="skipping",
            first="healing",
            drawn_as=SKIP,
            opening=("net_cost", "loss_added trained", "gguf_size"),
        ),
        Kind("curve", title="Removal curve", sections="skipping", first="removal", drawn_as=SKIP),
        Kind("bench", title="Benchmark of exports", sections="skipping", drawn_as=SKIP, holds_models=True),
        Kind(TOGETHER, title="Skipping report", sections="skipping", first="removal", drawn_as=SKIP),
        Kind(
            EXIT,
            title="Early exit",
            sections="exit",
            first="exits",
            verb="judged",
            called="an early-exit sweep",
            held=("exits", "full", "generation"),
            is_layered=True,
            stops=True,
        ),
        Kind(EXITS, title="Early exit of several models", sections="exit", first="exits", compares=EXIT),
        Kind(
            GENERATION,
            title="Generation",
            sections="generation",
            first="texts",
            verb="generated",
            is_layered=True,
            stops=True,
        ),
        Kind(
            EVALUATION,
            title="Evaluation by layer",
            sections="evaluation",
            first="scores",
            verb="evaluated",
            called="an evaluation",
            held=("tasks", "exits", "full", "quality_data", "skipped"),
            is_layered=True,
            stops=True,
        ),
        Kind(
            EVALUATIONS,
            title="Evaluation of several models",
            sections="evaluation",
            first="scores",
            compares=EVALUATION,
        ),
    )
}
"""Name -> kind."""
SKIPS = [kind.name for kind in KINDS.values() if SKIP in (kind.name, kind.drawn_as) and kind.name != TOGETHER]
"""Kinds of result folders that one page can show together, in reading order."""
