"""Scores models on tasks of lm-evaluation-harness, with its prompts and metrics (extra `fulldepth[evaluate]`)."""

from fulldepth.execution.harness.answers import Answers
from fulldepth.execution.harness.catalogue import Catalogue, Loaded, Unit
from fulldepth.execution.harness.layered import LayerReader, layered_model
from fulldepth.execution.harness.running import Score, UnitScores, lm_eval_version, run_unit

__all__ = [
    "Answers",
    "Catalogue",
    "LayerReader",
    "Loaded",
    "Score",
    "Unit",
    "UnitScores",
    "layered_model",
    "lm_eval_version",
    "run_unit",
]
