"""Scores of tasks at every exit layer: one unit of tasks after another, with the answers kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulldepth.errors import FulldepthError
from fulldepth.evaluation.local_tasks import LOCAL_TASKS, local_task
from fulldepth.evaluation.subject import Subject
from fulldepth.evaluation.suites import SUITES
from fulldepth.execution.harness import (
    Answers,
    Catalogue,
    LayerReader,
    Score,
    Unit,
    UnitScores,
    layered_model,
    lm_eval_version,
    run_unit,
)
from fulldepth.execution.harness.layered import Session
from fulldepth.hf.truncation import truncated
from fulldepth.progress import Watcher
from fulldepth.settings.evaluate import EvaluateSettings, parse_layers

EXIT_BOOTSTRAP = 1000
"""Most resamples for standard errors at exit layers before the last."""


@dataclass
class Scored:
    """Scores of all units."""

    units: list[str] = field(default_factory=list)
    layers: dict[str, list[int]] = field(default_factory=dict)
    """Task -> exit layers."""
    scores: dict[int, list[Score]] = field(default_factory=dict)
    """Exit layer -> scores."""
    higher_is_better: dict[str, dict[str, bool | None]] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)
    guesses: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Task -> for each example, the expected accuracy of a guess."""
    clusters: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Task -> identity of each example."""
    warnings: list[str] = field(default_factory=list)


def units_of(names: list[str]) -> list[Unit]:
    """The units of names of tasks, groups and suites, each once."""
    units: dict[str, Unit] = {}
    for name in names:
        suite = SUITES.get(name)
        for member in (name,) if suite is None else suite.tasks:
            units.setdefault(member, Unit(member, None if suite is None else suite.num_fewshot))
    return list(units.values())


def catalogue_of(units: list[Unit], settings: EvaluateSettings) -> Catalogue:
    """Where the tasks are found; refuses unknown names and missing files before a model is loaded."""
    folders = settings.task_data or []
    own = {unit.name: local_task(unit.name, folders) for unit in units if unit.name in LOCAL_TASKS}
    known = [*LOCAL_TASKS, *SUITES]
    return Catalogue([unit.name for unit in units], own, settings.include_path, known)


def score_tasks(
    subject: Subject,
    units: list[Unit],
    catalogue: Catalogue | None,
    settings: EvaluateSettings,
    folder: Path | None,
    watcher: Watcher,
) -> Scored:
    """Score all units at their exit layers.

    Args:
        subject: the model.
        units: what is scored.
        catalogue: their tasks; None if there are none.
        settings: of the evaluation.
        folder: of the answers of an interrupted run; None = they are kept in memory.
        watcher: receives progress.

    Raises:
        FulldepthError: if a task cannot be loaded or run, or an exit layer does not exist.
    """
    scored = Scored(units=[unit.name for unit in units])
    for unit in units:
        assert catalogue is not None
        loaded = catalogue.load(unit.name, settings.seed)
        layers, notes = _layers_of(unit, loaded, subject, settings)
        scored.warnings += notes
        path = None if folder is None else folder / f"{_file_name(unit.name)}.jsonl"
        identity = _identity(subject, unit, loaded, layers, settings)
        with Answers(path, identity, len(layers)) as answers:
            if answers.reused:
                watcher.say(f"{unit.name}: {answers.reused:,} answers of the interrupted run are reused.")
            session = Session(
                LayerReader(subject.anatomy, subject.classifier, layers),
                cache(partial(truncated, subject.anatomy)),
                layers[-1],
                answers,
                watcher,
                unit.name,
            )
            _score_unit(subject, unit, loaded, settings, session, scored)
        if session.cut:
            scored.warnings.append(
                f"{session.cut:,} requests of {unit.name} are longer than the model's positions; their beginnings were "
                "cut, as lm-eval does."
            )
    return scored


def _score_unit(
    subject: Subject,
    unit: Unit,
    loaded: Mapping[str, Any],
    settings: EvaluateSettings,
    session: Session,
    scored: Scored,
) -> None:
    """Run lm-eval's evaluation once per exit layer, the last layer first."""
    lm = layered_model(subject.model, subject.tokenizer, session, settings.batch_size)
    shots = unit.num_fewshot if settings.num_fewshot is None else settings.num_fewshot
    layers = session.reader.layers
    for number, layer in enumerate(reversed(layers)):
        session.layer = layer
        most = settings.bootstrap_iters if number == 0 else min(EXIT_BOOTSTRAP, settings.bootstrap_iters)
        result = run_unit(lm, loaded, limit=settings.limit, num_fewshot=shots, seed=settings.seed, bootstrap_iters=most)
        scored.scores.setdefault(layer, []).extend(result.scores)
        if number == 0:
            _note(scored, result, layers)
            if len(layers) > 1:
                session.watcher.begin(f"{unit.name}: metrics of exit layers", len(layers) - 1)
        elif not _generates(loaded):
            session.watcher.advance(1)


def _note(scored: Scored, result: UnitScores, layers: list[int]) -> None:
    scored.higher_is_better |= result.higher_is_better
    scored.chance |= result.chance
    scored.guesses |= result.guesses
    scored.clusters |= result.clusters
    scored.layers |= {score.task: layers for score in result.scores}


def _generates(loaded: Mapping[str, Any]) -> bool:
    return any(task.OUTPUT_TYPE == "generate_until" for task in loaded["tasks"].values())


def _layers_of(
    unit: Unit, loaded: Mapping[str, Any], subject: Subject, settings: EvaluateSettings
) -> tuple[list[int], list[str]]:
    """The exit layers of a unit, and notes on them."""
    depth = subject.num_layers
    if not _generates(loaded):
        return parse_layers(settings.exit_layers, depth, list(range(1, depth + 1))), []
    layers = parse_layers(settings.exit_layers, depth, [])
    if len(layers) > 1 and subject.plan is not None:
        raise FulldepthError(
            f"{unit.name} generates text, and a model with blocks skipped in place cannot be cut to its first layers. "
            "Export the plan (fulldepth skip apply) and evaluate the export, or use --exit-layers full."
        )
    if settings.exit_layers is None:
        return layers, [
            f"{unit.name} generates text, which takes a run per exit layer: only the whole model was scored. Name "
            "layers with --exit-layers."
        ]
    return layers, []


def _identity(
    subject: Subject, unit: Unit, loaded: Mapping[str, Any], layers: list[int], settings: EvaluateSettings
) -> dict[str, Any]:
    """What the answers of a unit depend on, beside the texts of the requests, which are part of their keys."""
    configs = {name: task.dump_config() for name, task in loaded["tasks"].items()}
    text = json.dumps(configs, sort_keys=True, default=str)
    return {
        "answers": 1,
        "model": subject.hash,
        "dtype": str(subject.model.dtype),
        "plan": subject.plan_digest,
        "layers": layers,
        "unit": unit.name,
        "tasks": hashlib.sha256(text.encode()).hexdigest(),
        "num_fewshot": unit.num_fewshot if settings.num_fewshot is None else settings.num_fewshot,
        **settings.model_dump(include={"limit", "seed", "batch_size"}),
        "lm_eval": lm_eval_version(),
    }


def _file_name(name: str) -> str:
    """A file name for a unit: names that hold other characters get a hash."""
    plain = "".join(c if c.isalnum() or c in "_-" else "-" for c in name)[:80]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def rows_of(scored: Scored) -> Iterator[tuple[Any, ...]]:
    """Rows of `task_score`: site = task, layer = exit layer, statistic = metric or `METRIC_stderr`."""
    for layer in sorted(scored.scores):
        for score in scored.scores[layer]:
            count = score.count or None
            yield "task_score", score.task, layer, None, score.metric, score.value, count, "1"
            if score.error is not None:
                yield "task_score", score.task, layer, None, f"{score.metric}_stderr", score.error, count, "1"
