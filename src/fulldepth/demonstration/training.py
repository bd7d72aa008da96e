"""`fulldepth demo --train`: trains a baseline, a tree residual and JREG side by side, measures and compares them."""

from __future__ import annotations

from pathlib import Path

from fulldepth import reporting
from fulldepth.comparison import compare
from fulldepth.errors import FulldepthError
from fulldepth.files import locked
from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.progress import Watcher
from fulldepth.results import Results
from fulldepth.settings import layer, read
from fulldepth.training import TrainSettings, train

RECIPES = {"baseline": "tiny-llama", "tree": "tiny-tree", "jreg": "tiny-jreg"}
"""Name of each model -> its recipe: the same sizes, data and order."""
CHECKPOINTS = 4
"""Checkpoints of each run, evenly spaced."""
MIN_STEPS, MAX_STEPS = 20, 1_000_000
RUN, RESULTS, COMPARISON, TRAINING = "run", "results", "comparison", "training"
"""Sub-folders: training run and results of each model; the two comparisons of the demo."""


def train_demo(output: str | Path, *, steps: int = 160, seed: int = 0, watcher: Watcher | None = None) -> Results:
    """Train the models, measure every checkpoint on text that was not trained on, and put them on one page.

    An interrupted demo resumes.

    Args:
        output: folder for `baseline/`, `tree/` and `jreg/` (each with `run/` and `results/`), `training/` (the
            curves of all runs) and `comparison/` (all models measured).
        steps: optimiser steps of each model, 16 x 128 tokens each.
        seed: of the weights and the order of the data.
        watcher: receives messages and progress.

    Returns:
        The comparison of the measured models.

    Raises:
        FulldepthError: if `steps` is too small or too large, or the folder holds another demo or is held by another
            process.
    """
    if not MIN_STEPS <= steps <= MAX_STEPS:
        raise FulldepthError(
            f"The demo keeps {CHECKPOINTS} checkpoints and needs at least {MIN_STEPS} steps, at most "
            f"{MAX_STEPS:,}, got {steps}."
        )
    folder, watcher = Path(output), watcher or Watcher()
    with locked(folder):
        return _demo(folder, steps, seed, watcher)


def _demo(folder: Path, steps: int, seed: int, watcher: Watcher) -> Results:
    """`train_demo` in a locked folder."""
    for name, recipe in RECIPES.items():
        watcher.say(f"{name} ({recipe})")
        period = -(-steps // CHECKPOINTS)
        changes = {"steps": steps, "seed": seed, "eval_every": period, "save_every": period}
        settings = layer(TrainSettings, read(recipe, "train"), changes)
        train(
            settings, folder / name / RUN, resume=True, recipe=name, watcher=watcher, after_evaluation=reporting.write
        )
        _measure(folder / name, settings, seed, watcher)
    _compare(folder, RUN, TRAINING)
    return _compare(folder, RESULTS, COMPARISON)


def _measure(folder: Path, settings: TrainSettings, seed: int, watcher: Watcher) -> None:
    """Measure every checkpoint of a model and write the page."""
    length = settings.sequence_length
    chosen = MeasureSettings(
        max_sequences=64,
        sequence_length=length,
        batch_size=16,
        entropy_sequences=16,
        words=["is", "are", "was", "were"],
        seed=seed,
    )
    measure_into(folder / RUN, "corpus:builtin", folder / RESULTS, chosen, watcher=watcher)


def _compare(folder: Path, part: str, to: str) -> Results:
    results = compare([folder / name / part for name in RECIPES], names=list(RECIPES))
    results.save(folder / to)
    return results
