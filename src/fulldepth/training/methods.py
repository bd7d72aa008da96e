"""Presets of the objective by method name, so that one recipe can train with any method."""

from __future__ import annotations

from typing import Any

from fulldepth.hf import checkpoint_of
from fulldepth.losses import Objective
from fulldepth.settings.penalties import METHODS
from fulldepth.training.settings import ObjectiveSettings, TrainSettings


def resolved(settings: TrainSettings) -> TrainSettings:
    """The settings with the method's terms filled in (terms under `objective` take precedence), a run folder in
    `model.checkpoint` replaced by its last checkpoint, and `data.validation_sequences` of the task.

    The losses of all layers alternate with the last layer's in training from scratch, and are taken at every step in
    fine-tuning and in detection (aligned training, App. B.3, B.5 and C.2).
    """
    preset = METHODS[settings.method]
    if settings.model.checkpoint is not None or settings.task == "detection":
        preset = {
            name: {**options, "schedule": "always"} if "schedule" in options else options
            for name, options in preset.items()
        }
    chosen = {**preset, **settings.objective.model_dump(exclude_unset=True)}
    on = {name: options for name, options in chosen.items() if options is not None}
    data = settings.data.model_copy(update={"validation_sequences": settings.most_validation})
    changes: dict[str, Any] = {"objective": ObjectiveSettings(**on), "data": data}
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
