"""`fulldepth evaluate`: scores of tasks, and quality of generated text, at every exit layer."""

from fulldepth.evaluation.loading import SUITES, load_tasks
from fulldepth.evaluation.local_tasks import LOCAL_TASKS
from fulldepth.evaluation.run import OtherResultsError, evaluate
from fulldepth.settings.evaluate import EvaluateSettings

__all__ = ["LOCAL_TASKS", "SUITES", "EvaluateSettings", "OtherResultsError", "evaluate", "load_tasks"]
