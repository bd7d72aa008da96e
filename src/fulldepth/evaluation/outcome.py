"""The document of an evaluation: entries of the tasks, and findings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fulldepth.core.files import Fingerprint, sha256_of
from fulldepth.core.number_format import plus_minus
from fulldepth.core.uncertainty import GROUPS, advisable
from fulldepth.evaluation.scoring import Score, Scored
from fulldepth.metrics.standard_errors import Mean
from fulldepth.results import Finding

TOLERANCE = 0.01
"""Loss up to which a layer keeps the whole model's score: of a share; of other scores, relative to that score."""


class TaskCurve(NamedTuple):
    """The main metric of a task by exit layer."""

    task: str
    metric: str
    higher_is_better: bool
    layers: list[int]
    scores: list[Score]
    """Of each exit layer; the last one is the whole model's."""
    drops: list[Mean]
    """Of each exit layer, what it loses against the whole model: paired by example where scores are means."""
    lead: Mean | None
    """Lead of the whole model over the most frequent answer or a random choice, paired; None for scores that are not
    shares of right answers."""
    chance: float | None
    """See `Scored`."""

    @property
    def full(self) -> Score:
        """The whole model's score."""
        return self.scores[-1]

    @property
    def tolerance(self) -> float:
        """Loss up to which a layer keeps the whole model's score."""
        share = self.higher_is_better and all(0 <= score.value <= 1 for score in self.scores)
        return TOLERANCE * (1 if share else abs(self.full.value))

    @property
    def is_advised(self) -> bool:
        """True if the whole model is measurably better than a guess."""
        return self.lead is not None and advisable(self.lead.value, self.lead.error, self.lead.groups)

    @property
    def by_estimate(self) -> int:
        """The first exit layer from which on no score is worse than the whole model's by more than `tolerance`."""
        return self._from([mean.value <= self.tolerance for mean in self.drops])

    @property
    def earliest(self) -> int:
        """The first exit layer from which on all are shown to lose at most `tolerance`: by the interval's upper end."""
        return self._from([(ends := mean.interval) is not None and ends[1] <= self.tolerance for mean in self.drops])

    def _from(self, close: Sequence[bool]) -> int:
        worse = [layer for layer, is_close in zip(self.layers[:-1], close, strict=False) if not is_close]
        return next(layer for layer in self.layers if layer > max(worse, default=0))


def curves(scored: Scored) -> Iterator[TaskCurve]:
    """The main metric of every task, in the order of evaluation.

    It is the first metric of which higher is better, or the first one of a task without such. Scores whose examples are
    not known lose unpaired.
    """
    for task, layers in scored.layers.items():
        by_layer = [[score for score in scored.scores[layer] if score.task == task] for layer in layers]
        directions = scored.higher_is_better.get(task) or {}
        names = [score.metric for score in by_layer[-1]]
        metric = next((name for name in names if directions.get(name.partition(":")[0])), names[0])
        scores = [next(score for score in scores_of_depth if score.metric == metric) for scores_of_depth in by_layer]
        higher = bool(directions.get(metric.partition(":")[0], True))
        full = scores[-1]
        sign = 1 if higher else -1
        known = scored.clusters.get(task)
        clusters = None if known is None else torch.from_numpy(known)
        drops: list[Mean] = []
        for score in scores:
            if full.values is not None and score.values is not None and clusters is not None:
                drops.append(Mean.of(torch.from_numpy(sign * (full.values - score.values)), clusters))
            else:
                errors = (full.error, score.error)
                error = None if None in errors else math.hypot(*errors)  # type: ignore[arg-type]
                drop = sign * (full.value - score.value)
                drops.append(Mean(drop, error, min(GROUPS, full.count), max(1, full.count)))
        lead = None
        guess = scored.guesses.get(task)
        if full.values is not None and guess is not None and clusters is not None and {*full.values} <= {0.0, 1.0}:
            lead = Mean.of(torch.from_numpy(full.values - guess), clusters)
        yield TaskCurve(task, metric, higher, layers, scores, drops, lead, scored.chance.get(task))


def task_entries(scored: Scored) -> dict[str, dict[str, Any]]:
    """The entry `tasks` of the document."""
    return {
        curve.task: {
            "metric": curve.metric,
            "higher_is_better": curve.higher_is_better,
            "count": curve.full.count,
            "chance": curve.chance if curve.metric.startswith("acc") else None,
            "advised": curve.is_advised,
            "earliest": curve.earliest,
            "earliest_by_estimate": curve.by_estimate,
            **_identity_of(scored, curve.task),
        }
        for curve in curves(scored)
    }


def _identity_of(scored: Scored, task: str) -> dict[str, Any]:
    """Return what must be equal before two scores of a task are compared: `examples`, a hash of documents, and `asked`.

    A group has the hash of its tasks' examples. Its `asked` has what its tasks have in common, and a `definition` of
    the rest. Empty where a task's documents are not known.
    """
    tasks = _tasks_of(scored, task)
    if not tasks or any(name not in scored.clusters or name not in scored.asked for name in tasks):
        return {}
    documents = [sha256_of(np.sort(scored.clusters[name]).astype("<u8").tobytes()) for name in tasks]
    asked = [scored.asked[name] for name in tasks]
    if tasks == [task]:
        return {"examples": f"sha256:{documents[0]}", "asked": asked[0]}
    shared = {key: value for key, value in asked[0].items() if all(entry[key] == value for entry in asked)}
    shared.pop("definition", None)
    rest = [
        json.dumps([name, entry | dict.fromkeys(shared)], sort_keys=True)
        for name, entry in zip(tasks, asked, strict=True)
    ]
    definition = {"definition": str(Fingerprint(*rest))}
    return {"examples": str(Fingerprint(*documents)), "asked": dict.fromkeys(asked[0]) | shared | definition}


def _tasks_of(scored: Scored, name: str) -> list[str]:
    """A task itself, or the tasks of a group and of its groups, by name."""
    members = scored.members.get(name)
    return sorted({task for member in members for task in _tasks_of(scored, member)}) if members else [name]


def findings(scored: Scored, is_skipped: bool = False) -> dict[str, Finding]:
    """Two findings of each task: the whole model's score, and the earliest exit layer that keeps it.

    Args:
        scored: the scores.
        is_skipped: whether blocks of a plan were skipped.
    """
    skipped = " and the plan's blocks skipped" * is_skipped
    entries = {}
    for curve in curves(scored):
        full = curve.full
        is_accuracy = curve.metric.startswith("acc")
        guess = f"; a guess gives {curve.chance:.3f}" if curve.chance is not None and is_accuracy else ""
        sentence = (
            f"{curve.task}: {_shown(full)} {curve.metric} with all {curve.layers[-1]} layers{skipped} "
            f"({full.count:,} examples{guess})."
        )
        entries[f"score {curve.task}"] = Finding(full.value, "1", sentence, standard_error=full.error)
        if len(curve.layers) > 1:
            entries[f"earliest_exit {curve.task}"] = _earliest(curve)
    return entries


def _earliest(curve: TaskCurve) -> Finding:
    depth = curve.layers[-1]
    earliest = curve.earliest
    plain = curve.by_estimate
    why = "the layer of a threshold has no standard error"
    if not curve.is_advised:
        guess = "a guess" if curve.chance is None else f"a guess ({curve.chance:.3f})"
        known = "is not measurably better than" if curve.lead is not None else "cannot be compared with"
        sentence = f"{curve.task}: the whole model ({_shown(curve.full)}) {known} {guess}: nothing is advised."
        return Finding(None, "layers", sentence, no_standard_error=why)
    tolerance = f"{curve.tolerance:.3g}"
    if earliest == depth:
        sentence = f"{curve.task}: no earlier exit layer is shown to lose at most {tolerance} {curve.metric}"
    else:
        drop = curve.drops[curve.layers.index(earliest)]
        low, high = drop.interval or (math.nan, math.nan)
        sentence = (
            f"{curve.task}: from layer {earliest} of {depth} on, stopping early loses at most {tolerance} "
            f"{curve.metric} (there {drop.value:.3f}, 95 % interval {low:.3f} to {high:.3f})"
        )
    if plain != earliest:
        sentence += f"; by the estimates alone from layer {plain} on"
    return Finding(float(earliest), "layers", f"{sentence}.", no_standard_error=why)


def _shown(score: Score) -> str:
    if abs(score.value) >= 1000:
        return f"{score.value:.4g}"
    return f"{score.value:.3f} {plus_minus(score.error, 3)}".rstrip()
