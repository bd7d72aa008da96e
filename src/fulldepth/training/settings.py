"""Settings of a run, with the penalties validated against the classes that define them."""

from __future__ import annotations

from typing import Self

import pydantic

from fulldepth.errors import unknown
from fulldepth.losses import TERMS
from fulldepth.losses.terms import make_term
from fulldepth.settings import train
from fulldepth.settings.train import InitializerSettings, ModelSettings

__all__ = ["InitializerSettings", "ModelSettings", "ObjectiveSettings", "TrainSettings"]


class ObjectiveSettings(train.ObjectiveSettings):
    """Penalties added to the cross-entropy; unknown terms and options are refused."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.__pydantic_extra__:
            if name not in TERMS:
                raise unknown("setting", f"objective.{name}", [f"objective.{key}" for key in (*TERMS, "energy_warmup")])
        for name, options in self.terms.items():
            make_term(name, options)
        return self


class TrainSettings(train.TrainSettings):
    """Everything that determines a training run; saved with it."""

    objective: ObjectiveSettings = ObjectiveSettings()
