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
TRAINING = ("training", "Over training", "The same measures at every checkpoint.")
FURTHER = ("further", "Further figures", "")


def arrange(
    names: Iterable[str], training: bool = False, tables: Mapping[str, list[dict[str, Any]]] | None = None
) -> list[dict[str, Any]]:
    """Sections with their slots; a slot is a figure with all its variants, its difference follows it.

    Curves over steps get a section of their own, and so does what no section knows.

    Args:
        names: of the figures.
        training: whether they are of training runs.
        tables: id of a section -> tables that stand before its figures.
    """
    slots: dict[str, list[str]] = {}
    for name in names:
        slots.setdefault(name.split(":")[0], []).append(name)
    made = []
    for key, heading, intro, order in OF_TRAINING if training else SECTIONS:
        wanted = [slot for base in order for slot in (base, f"difference_{base}")]
        found = [slots.pop(slot) for slot in wanted if slot in slots]
        made.append(_section(key, heading, intro, found) | {"tables": (tables or {}).get(key, [])})
    over_steps = [slots.pop(slot) for slot in list(slots) if slot.startswith("steps_")]
    made += [_section(*TRAINING, over_steps), _section(*FURTHER, list(slots.values()))]
    return [section for section in made if section["slots"] or section["tables"]]


def _section(key: str, heading: str, intro: str, slots: list[list[str]]) -> dict[str, Any]:
    return {"id": key, "title": heading, "intro": intro, "slots": slots, "tables": []}
