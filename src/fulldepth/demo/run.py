"""`demo` trains a baseline and a JREG model, measures their checkpoints, and compares them."""

from __future__ import annotations

from pathlib import Path

from fulldepth import report
from fulldepth.comparison import compare
from fulldepth.errors import FulldepthError
from fulldepth.files import locked
from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.progress import Watcher
from fulldepth.results import Results
from fulldepth.settings import layer, read
from fulldepth.training import TrainSettings, train

RECIPES = {"baseline": "tiny-llama", "jreg": "tiny-jreg"}
"""Name of each model -> its recipe: the same model, data and order, with and without the displacement penalty."""
CHECKPOINTS = 4
"""Checkpoints of each run, evenly spaced."""
MIN_STEPS, MAX_STEPS = 20, 1_000_000
RUN, RESULTS, COMPARISON, TRAINING = "run", "results", "comparison", "training"
"""Sub-folders: training run and results of each model; the two comparisons of the demo."""


def demo(output: str | Path, *, steps: int = 160, seed: int = 0, watcher: Watcher | None = None) -> Results:
    """Train both models, measure every checkpoint on held-out text, and compare them on one page.

    An interrupted demo resumes.

    Args:
        output: folder for `baseline/` and `jreg/` (each with `run/` and `results/`), `training/` (both runs' curves)
            and `comparison/` (both models measured).
        steps: optimiser steps of each model, 16 x 128 tokens each.
        seed: of the weights and the order of the data.
        watcher: receives messages and progress.

    Returns:
        The comparison of the two measured models.

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
    """`demo` in a folder that no other process writes into."""
    for name, recipe in RECIPES.items():
        watcher.say(f"{name} ({recipe})")
        period = -(-steps // CHECKPOINTS)
        changes = {
            "steps": steps,
            "seed": seed,
            "warmup_steps": steps // 10,
            "eval_every": period,
            "save_every": period,
        }
        settings = layer(TrainSettings, read(recipe, "train"), changes)
        train(settings, folder / name / RUN, resume=True, recipe=name, watcher=watcher, after_evaluation=report.write)
        _measure(folder / name, settings, seed, watcher)
    _compare(folder, RUN, TRAINING)
    return _compare(folder, RESULTS, COMPARISON)


def _measure(folder: Path, settings: TrainSettings, seed: int, watcher: Watcher) -> None:
    """Measure every checkpoint of a model, and write the page."""
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
    report.write(folder / RESULTS)


def _compare(folder: Path, part: str, to: str) -> Results:
    results = compare([folder / name / part for name in RECIPES], names=list(RECIPES))
    results.save(folder / to)
    report.write(folder / to)
    return results
