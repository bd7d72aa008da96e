"""Sections of the pages: their introductions, figures and tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from fulldepth import figures
from fulldepth.figures.record import COMPARISON, SERIES, SINGLE, SKIP, TRAINING, TRAININGS, Method
from fulldepth.reporting.tables import Table


class Section(NamedTuple):
    """A section of a page; figures refer to it by `id`."""

    id: str
    title: str
    intro: str = ""
    first: bool = False
    """Whether it follows the opening paragraph, before everything else."""
    after: bool = False
    """Whether it follows the lens grid."""


OF_MODELS = (
    Section(
        "displacement",
        "Displacement and jump",
        "Displacement is how far a layer turns the residual stream. Layers near zero hand their input on; a last "
        "layer that stands out does work that the layers before it left undone.",
    ),
    Section(
        "similarity",
        "Similarity of layers",
        "Every pair of layers against each other. Large blocks of one shade are layers that hold nearly the same "
        "representation; a strong diagonal that fades slowly is steady progress.",
    ),
    Section(
        "predictions",
        "Predictions by depth",
        "Every layer read by the last layer’s classifier, in a multi-exit model by its own: how good the model would "
        "be if it stopped there, and from which layer on the prediction no longer changes.",
    ),
    Section(
        "coherence",
        "Coherence",
        "How far each channel’s output is a linear image of its input along the sequence. Near one the layer "
        "copies, near zero it is unrelated to its input; in between it works.",
    ),
    Section(
        "geometry",
        "Norms, entropy and weights",
        "The size of what each layer adds, how many directions the states fill, and how strongly the projections act.",
    ),
    Section(
        "memory",
        "Memory and streams",
        "What layers read besides the layer before them: the earlier states from which a memory takes keys and "
        "values, and the residual streams between which a model carries its state.",
    ),
)
OF_TRAINING = (
    Section(
        "loss",
        "Loss and penalties",
        "Cross-entropy in nats per token, on held-out text and on the text being learnt; penalties are not part of it.",
    ),
    Section(
        "displacement",
        "Displacement and jump",
        "Displacement is how far a layer turns the residual stream, here of the validation data as training goes "
        "on. Layers near zero hand their input on; a last layer that stands out does work that the layers before "
        "it left undone.",
    ),
    Section("cost", "Speed and memory"),
    Section("settings", "Settings"),
)
OF_SKIPPING = (
    Section(
        "blocks",
        "Removed blocks",
        "The model’s depth, layer by layer. A number gives the order of removal; below it stands the loss, in nats, "
        "that this removal added. Nothing is healed here.",
        first=True,
    ),
    Section("removal", "What removal costs", "Held-out data, read again after every removal."),
    Section("states", "Inside the model", "How far the states of each layer have moved from the original’s."),
    Section("pareto", "Quality against time", "Every model that was timed, by the held-out loss that it adds."),
    Section("settings", "Settings"),
)
OF_EXIT = (
    Section(
        "exits",
        "Early exit",
        "A sample leaves after the first layer whose prediction the rule accepts. A lower threshold saves more time "
        "and costs more quality.",
        first=True,
    ),
    Section("thresholds", "Thresholds"),
    Section(
        "stopping",
        "Stopping at one layer",
        "Every sample leaves after the same layer, as in a checkpoint that has only the layers up to it.",
    ),
    Section(
        "generating",
        "While generating",
        "The figures above read given text; here every token is generated, so one that leaves early changes the text "
        "after it.",
    ),
    Section("settings", "Settings"),
)
OF_GENERATION = (
    Section("texts", "Texts", first=True),
    Section(
        "generating",
        "Early exit",
        "A token leaves after the first layer whose prediction the rule accepts.",
        after=True,
    ),
    Section("statistics", "Statistics", after=True),
    Section("settings", "Settings", after=True),
)
OF_EVALUATION = (
    Section(
        "scores",
        "Scores",
        "What the model scores on each task if it stops after a layer; the last point is the whole model.",
        first=True,
    ),
    Section("tasks", "Tasks"),
    Section("text", "Generated text", "Text that the model generates if it stops after a layer."),
    Section("settings", "Settings"),
)
OVER_TRAINING = Section("training", "Over training", "The same measures at every checkpoint.", after=True)
FIRST = "displacement"
"""Section that follows the opening paragraph of a measurement, before everything else."""
FURTHER = Section("further", "Further figures", after=True)
ABOUT_MODELS = (
    "Layers run from 1 to L; 0 is the embedding output. The state h<sub>l</sub> is the residual stream after layer "
    "l, before the model’s final norm. Padding never counts. “No first token” leaves out the first token of every "
    "sequence, which in many models carries an outlying norm."
)
ABOUT_SKIPPING = (
    "Layers run from 1 to L; a layer is an attention block and an MLP, each of which adds to the residual stream. "
    "All losses are of held-out data, on which no scalar was trained. The same data chose the blocks and the epoch "
    "at which training stopped, so that very small gains may be luck."
)
ABOUT_EXITS = (
    "Layers run from 1 to L. A model that stops after layer l applies its own final norm and head to the state h<sub>l"
    "</sub>; stopping after layer L is the whole model. Nothing is trained here."
)
STANDARD_ERRORS = Method(
    "Standard errors (±)",
    (
        *("displacement", "jump_rate", "coherence", "norm_ratio"),
        "lens_accuracy",
        "lens_loss",
        "saturation",
        "effective_depth",
    ),
    (
        "How much a number would vary over other samples of documents, rows or images. All windows of a document stay "
        "together in one of up to 32 groups, and the error comes from the scatter of the groups. A median layer or an "
        "effective depth is a step and has a 95 % interval instead: from the first layer that may be the one sought "
        "within the error, to the first that is good enough beyond its error."
    ),
    source="Cochran, <cite>Sampling Techniques</cite>, 6.3; Woodruff, <cite>Confidence intervals for medians and "
    "other position measures</cite>, JASA 47.",
)
ABOUT = {
    **dict.fromkeys((SINGLE, SERIES, COMPARISON, TRAINING, TRAININGS), ABOUT_MODELS),
    SKIP: ABOUT_SKIPPING,
}
"""Kind of results -> what its notes begin with; `ABOUT_EXITS` for all others."""


def arrange(
    names: Iterable[str],
    kind: str = SINGLE,
    sections: Sequence[Section] = OF_MODELS,
    tables: Mapping[str, Sequence[Table | Mapping[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """Sections with their slots; a slot is a figure with all its variants. `secondary` slots are folded.

    Curves over steps whose section is not on the page get a section of their own, and so do figures without a record.

    Args:
        names: of the figures.
        kind: of the results, see `figures.Source`.
        sections: of the page; those on training and further figures follow.
        tables: id of a section -> tables (or strips of layers) before its figures; empty ones are left out.
    """
    sections = (*sections, OVER_TRAINING, FURTHER)
    records = {record.name: record for record in figures.records(kind)}
    order, ids = list(records), {section.id for section in sections}
    placed: dict[str, dict[str, list[str]]] = {section.id: {} for section in sections}
    named = [(name.partition(":")[0], name) for name in names]
    for base, name in sorted(named, key=lambda pair: order.index(pair[0]) if pair[0] in records else len(order)):
        home = records[base].section if base in records else ""
        if home not in ids:
            home = (OVER_TRAINING if base.startswith("steps_") else FURTHER).id
        placed[home].setdefault(base, []).append(name)
    arranged = []
    for section in sections:
        slots = placed[section.id]
        several = [asdict(one) if isinstance(one, Table) else dict(one) for one in (tables or {}).get(section.id, [])]
        several = [table for table in several if table.get("rows", True)]
        if slots or several:
            arranged.append(
                {
                    **section._asdict(),
                    "slots": list(slots.values()),
                    "tables": several,
                    "secondary": [
                        slot[0] for base, slot in slots.items() if base in records and records[base].secondary
                    ],
                    "first": section.first or (section.id == FIRST and kind in (SINGLE, SERIES)),
                }
            )
    return arranged


def methods(kind: str, measures: Collection[str]) -> str:
    """The notes on how to read the figures of a kind of results, see `figures.Source`, as HTML.

    Only notes on one of `measures`, and those that name none.
    """
    general = [STANDARD_ERRORS] if ABOUT.get(kind) is ABOUT_MODELS else []
    notes = dict.fromkeys([*general, *(note for record in figures.records(kind) for note in record.methods)])
    shown = [note.html for note in notes if not note.measures or {*note.measures} & {*measures}]
    return "\n".join([f'<p class="intro">{ABOUT.get(kind, ABOUT_EXITS)}</p>', *shown])
