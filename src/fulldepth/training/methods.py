"""Presets of the objective by method name, so that one recipe can train with any method."""

from __future__ import annotations

from typing import Any

from fulldepth.errors import unknown
from fulldepth.hf import checkpoint_of
from fulldepth.losses import Objective
from fulldepth.training.settings import ObjectiveSettings, TrainSettings

METHODS: dict[str, dict[str, Any]] = {
    "standard": {},
    "jreg": {"jump": {"weight": 1.0, "alpha": 1.0}},
    "cr": {"coherence": {"weight": 0.01}, "orthogonality": {"weight": 0.01}},
    "aligned": {"aligned": {"weight": 1.0, "weights": "linear", "schedule": "alternate"}},
    "similarity": {"similarity": {"weight": 1.0, "weights": "linear"}},
}
"""Method -> terms with the papers' weights (JREG Eq. 5; CR Sec. 3.3; aligned training Eq. 5 and App. B.3)."""


def resolved(settings: TrainSettings) -> TrainSettings:
    """The settings with the method's terms filled in (terms under `objective` take precedence), and a run folder in
    `model.checkpoint` replaced by its last checkpoint.

    Raises:
        FulldepthError: for an unknown method.
    """
    if settings.method not in METHODS:
        raise unknown("method", settings.method, METHODS)
    chosen = {**METHODS[settings.method], **settings.objective.model_dump(exclude_unset=True)}
    on = {name: options for name, options in chosen.items() if options is not None}
    changes: dict[str, Any] = {"objective": ObjectiveSettings(**on)}
    if settings.model.checkpoint is not None:
        start = checkpoint_of(settings.model.checkpoint)
        changes["model"] = settings.model.model_copy(update={"checkpoint": start})
    return settings.model_copy(update=changes)


def make_objective(settings: TrainSettings) -> Objective:
    """The objective that the settings describe.

    Raises:
        FulldepthError: for an unknown option of a term.
    """
    return Objective(energy_warmup=settings.objective.energy_warmup, **settings.objective.terms)
