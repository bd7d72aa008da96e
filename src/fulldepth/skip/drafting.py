"""`draft_plan`: a plan whose model drafts tokens for the full model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from fulldepth.execution import find_anatomy
from fulldepth.execution.decoding import DraftPlan
from fulldepth.skip.plan import Plan, plan_scalars


def draft_plan(path: str | Path) -> Callable[[PreTrainedModel], DraftPlan]:
    """The function that gives the skipped parts of a plan's file for `generate(plan=...)`, checked against the model.

    Raises:
        FulldepthError: if the file is no plan; when called, if the plan was made for another model.
    """
    plan = Plan.load(path)

    def drafts(model: PreTrainedModel) -> DraftPlan:
        plan.check_model(model)
        return DraftPlan(tuple(plan.blocks), plan.granularity, plan_scalars(plan, find_anatomy(model)))

    return drafts
