"""Experiment trackers (`report_to`): checks that they are installed, and the numbers of an evaluation that they get."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from fulldepth.errors import FulldepthError, unknown
from fulldepth.training.evaluation import Evaluation

PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
}
"""Tracker -> packages of which it needs one; other trackers of transformers check this themselves."""
ANY = ("all", "none")
"""Names for all installed trackers and for none."""


def check_trackers(names: Iterable[str]) -> None:
    """Check the trackers of a run before it starts.

    Raises:
        FulldepthError: if transformers does not know a tracker, or its package is not installed.
    """
    for name in names:
        if name not in (*INTEGRATION_TO_CALLBACK, *ANY):
            raise unknown("tracker", name, INTEGRATION_TO_CALLBACK)
        packages = PACKAGES.get(name, ())
        if packages and not any(find_spec(package) for package in packages):
            raise FulldepthError(f"report_to={name} needs {packages[0]}, not installed here: pip install {packages[0]}")


def tracked(evaluation: Evaluation, means: Mapping[str, tuple[float, float] | list[float]]) -> dict[str, float]:
    """Numbers of one evaluation by name, as trackers show them; values that are not finite are left out.

    `eval_loss` (validation loss, nats), `eval_accuracy` (of classifiers), `eval_displacement_layer_1` to `L`,
    `eval_zeta_L`, `eval_zeta_L-1` and `eval_zeta_L-2` (jump rates, per cent) are of the validation sequences.
    `cross_entropy` (nats, on the training data) and `penalty_NAME` (without its weight) are means over the steps since
    the last evaluation. Trackers replace the prefix `eval_` by `eval/` and put `train/` before the others.

    Args:
        evaluation: on the held-out sequences.
        means: part of the loss -> (sum, count) since the last evaluation.
    """
    numbers = {"eval_loss": evaluation.loss}
    if evaluation.accuracy is not None:
        numbers["eval_accuracy"] = evaluation.accuracy
    for layer, value in enumerate(evaluation.displacement, start=1):
        numbers[f"eval_displacement_layer_{layer}"] = value
    for back, value in enumerate(evaluation.jump_rates):
        numbers[f"eval_zeta_L{f'-{back}' if back else ''}"] = value
    for name, (total, count) in means.items():
        numbers["cross_entropy" if name == "ce" else f"penalty_{name}"] = total / count if count else math.nan
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
