"""The document of an evaluation: entries of the tasks, and findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fulldepth.evaluation.scoring import Scored
from fulldepth.execution.harness import Score
from fulldepth.results import Finding

CLEAR = 2
"""Standard errors by which a model is clearly better than random choices."""


class TaskCurve(NamedTuple):
    """The main metric of a task by exit layer."""

    task: str
    metric: str
    higher_is_better: bool
    layers: list[int]
    scores: list[Score]
    """Of each exit layer; the last one is the whole model's."""

    @property
    def full(self) -> Score:
        """The whole model's score."""
        return self.scores[-1]

    def is_close(self, score: Score) -> bool:
        """Whether a score is no worse than the whole model's by more than its standard error."""
        lost = self.full.value - score.value if self.higher_is_better else score.value - self.full.value
        return lost <= (self.full.error or 0.0)

    @property
    def earliest(self) -> int:
        """The first exit layer from which on all are within one standard error of the whole model."""
        worse = [layer for layer, score in zip(self.layers, self.scores, strict=True) if not self.is_close(score)]
        return next(layer for layer in self.layers if layer > max(worse, default=0))

    @property
    def best(self) -> int:
        """The exit layer with the best score; the last of several."""
        sign = 1 if self.higher_is_better else -1
        pairs = zip(self.layers, self.scores, strict=True)
        return max(pairs, key=lambda pair: (sign * pair[1].value, pair[0]))[0]

    def at(self, layer: int) -> Score:
        """The score of an exit layer."""
        return self.scores[self.layers.index(layer)]


def curves(scored: Scored) -> Iterator[TaskCurve]:
    """The main metric of every task, in the order of evaluation.

    It is the first metric of which higher is better, or the first one of a task without such.
    """
    for task, layers in scored.layers.items():
        by_layer = [[score for score in scored.scores[layer] if score.task == task] for layer in layers]
        directions = scored.higher_is_better.get(task) or {}
        names = [score.metric for score in by_layer[-1]]
        metric = next((name for name in names if directions.get(name.partition(":")[0])), names[0])
        scores = [next(score for score in each if score.metric == metric) for each in by_layer]
        yield TaskCurve(task, metric, bool(directions.get(metric.partition(":")[0], True)), layers, scores)


def task_entries(scored: Scored) -> dict[str, dict[str, Any]]:
    """The entry `tasks` of the document."""
    return {
        curve.task: {
            "metric": curve.metric,
            "higher_is_better": curve.higher_is_better,
            "count": curve.full.count,
            "chance": scored.chance.get(curve.task) if curve.metric.startswith("acc") else None,
        }
        for curve in curves(scored)
    }


def findings(scored: Scored) -> dict[str, Finding]:
    """Two findings of each task: the whole model's score, and the earliest exit layer that keeps it."""
    found = {}
    for curve in curves(scored):
        found[f"score {curve.task}"] = _score(curve, scored.chance.get(curve.task))
        if len(curve.layers) > 1:
            found[f"earliest_exit {curve.task}"] = _earliest(curve, scored.chance.get(curve.task))
    return found


def _score(curve: TaskCurve, chance: float | None) -> Finding:
    full = curve.full
    guess = f"; random choices give {chance:.3f}" if chance is not None and curve.metric.startswith("acc") else ""
    sentence = (
        f"{curve.task}: {_shown(full)} {curve.metric} with all {curve.layers[-1]} layers ({full.count:,} "
        f"examples{guess})."
    )
    return Finding(full.value, "1", sentence, standard_error=full.error)


def _earliest(curve: TaskCurve, chance: float | None) -> Finding:
    depth, earliest, best = curve.layers[-1], curve.earliest, curve.best
    if earliest == depth:
        sentence = (
            f"{curve.task}: stopping at the exit layer before the last is worse than the whole model by more than one "
            "standard error"
        )
    else:
        sentence = (
            f"{curve.task}: stopping at layer {earliest} of {depth} or later stays within one standard error of the "
            f"whole model ({curve.metric} {_shown(curve.at(earliest))} there, {_shown(curve.full)} with all)"
        )
    if best != depth:
        sentence += f"; the best score is that of layer {best} ({_shown(curve.at(best))})"
    guesses = chance is not None and curve.metric.startswith("acc")
    if guesses and curve.full.value - (chance or 0.0) <= CLEAR * (curve.full.error or 0.0):
        sentence += "; the whole model is not clearly better than random choices here, so layers cannot be told apart"
    why = "the layer of a threshold has no standard error"
    return Finding(float(earliest), "layers", f"{sentence}.", no_standard_error=why)


def _shown(score: Score) -> str:
    error = "" if score.error is None else f" ± {score.error:.3f}"
    return f"{score.value:.3f}{error}" if abs(score.value) < 1000 else f"{score.value:.4g}"
