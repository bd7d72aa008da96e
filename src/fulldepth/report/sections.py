"""Where each figure stands on the page, and what introduces it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SECTIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "displacement",
        "Displacement and jump",
        "Displacement is how far a layer turns the residual stream. Layers near zero hand their input on; a last layer "
        "that stands out does work that the layers before it left undone.",
        ("displacement", "jump_rate"),
    ),
    (
        "similarity",
        "Similarity of layers",
        "Every pair of layers against each other. Large blocks of one shade are layers that hold nearly the same "
        "representation; a strong diagonal that fades slowly is steady progress.",
        ("cosine", "cka", "cosine_to_last"),
    ),
    (
        "predictions",
        "Predictions by depth",
        "The last layer’s classifier applied to every layer: how good the model would be if it stopped there, and from "
        "which layer on the prediction no longer changes.",
        ("lens_accuracy", "lens_loss", "saturation", "effective_depth"),
    ),
    (
        "coherence",
        "Coherence",
        "How far each channel’s output is a linear image of its input along the sequence. Near one the layer copies, "
        "near zero it is unrelated to its input; in between it works.",
        ("coherence", "coherence_effective", "coherence_bins"),
    ),
    (
        "geometry",
        "Norms, entropy and weights",
        "The size of what each layer adds, how many directions the states fill, and how strongly the projections act.",
        ("norm_ratio", "renyi_entropy", "spectral_norm", "nc1", "separability", "mmd"),
    ),
    (
        "memory",
        "Memory and streams",
        "What layers read besides the layer before them: the earlier states from which a memory takes keys and values, "
        "and the residual streams between which a model carries its state.",
        ("retrieval_weight", "expected_retrieval", "self_retrieval", "stream_mixing"),
    ),
)
OF_TRAINING: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "loss",
        "Loss and penalties",
        "Cross-entropy in nats per token, on held-out text and on the text being learnt; penalties are not part of it.",
        ("loss", "learning_rate", "penalty"),
    ),
    (
        "displacement",
        "Displacement and jump",
        "Displacement is how far a layer turns the residual stream, here of the validation data as training goes on. "
        "Layers near zero hand their input on; a last layer that stands out does work that the layers before it left "
        "undone.",
        ("displacement", "steps_displacement", "steps_jump_rate"),
    ),
    ("cost", "Speed and memory", "", ("time_loss", "throughput")),
    ("settings", "Settings", "", ()),
)
"""The same for training runs, one or several."""
OF_SKIPPING: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "blocks",
        "Which blocks went",
        "The model’s depth, layer by layer. A number says when a block went; below it stands the loss, in nats, that "
        "its removal added to that before it. Nothing is healed here.",
        (),
    ),
    (
        "removal",
        "What removal costs",
        "Held-out data, read again after every removal: the loss, how far the predictions are from the unmodified "
        "model’s, and how often both would say the same.",
        ("removal_loss", "added_loss", "kl", "greedy_agreement"),
    ),
    (
        "healing",
        "Scalars that heal",
        "What was trained afterwards, and nothing else: how strongly each block adds to the stream, and how strongly "
        "the stream passes it by.",
        ("scalars",),
    ),
    (
        "states",
        "Inside the model",
        "How far the states of each layer have moved from the original’s, and whether the blocks that went had smaller "
        "weights than those that stayed.",
        ("mmd", "spectral_norm"),
    ),
    (
        "pareto",
        "Quality against time",
        "Every model that was timed, by its held-out loss. What lies on the frontier cannot be made faster without a "
        "higher loss, nor better without more time, by any other model on this page.",
        ("pareto_prefill", "pareto_decode"),
    ),
    (
        "cost",
        "Time, memory and size",
        "Prompt (prefill) and token by token (decode) apart, each model beside the original in the same rounds.",
        ("time_saved_prefill", "time_saved_decode"),
    ),
    (
        "quantise",
        "With quantisation",
        "Skipping and quantising together, in both orders.",
        (),
    ),
    ("settings", "Settings", "", ()),
)
"""The same for folders of `fulldepth skip`, one or several."""
TRAINING = ("training", "Over training", "The same measures at every checkpoint.")
FURTHER = ("further", "Further figures", "")


def arrange(
    names: Iterable[str],
    training: bool = False,
    tables: Mapping[str, list[dict[str, Any]]] | None = None,
    order: tuple[tuple[str, str, str, tuple[str, ...]], ...] | None = None,
) -> list[dict[str, Any]]:
    """Sections with their slots; a slot is a figure with all its variants, its difference follows it.

    Curves over steps get a section of their own, and so does what no section knows.

    Args:
        names: of the figures.
        training: whether they are of training runs.
        tables: id of a section -> tables (or strips of layers) that stand before its figures.
        order: the sections; None = those of measurements, or of training runs.
    """
    slots: dict[str, list[str]] = {}
    for name in names:
        slots.setdefault(name.split(":")[0], []).append(name)
    made = []
    for key, heading, intro, bases in order or (OF_TRAINING if training else SECTIONS):
        wanted = [slot for base in bases for slot in (base, f"difference_{base}")]
        found = [slots.pop(slot) for slot in wanted if slot in slots]
        made.append(_section(key, heading, intro, found) | {"tables": (tables or {}).get(key, [])})
    over_steps = [slots.pop(slot) for slot in list(slots) if slot.startswith("steps_")]
    made += [_section(*TRAINING, over_steps), _section(*FURTHER, list(slots.values()))]
    return [section for section in made if section["slots"] or section["tables"]]


def _section(key: str, heading: str, intro: str, slots: list[list[str]]) -> dict[str, Any]:
    return {"id": key, "title": heading, "intro": intro, "slots": slots, "tables": []}
