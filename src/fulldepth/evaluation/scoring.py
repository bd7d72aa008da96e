"""Scores of tasks at every exit layer: one unit of tasks after another, with the answers kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fulldepth.errors import FulldepthError
from fulldepth.evaluation.local_tasks import LOCAL_TASKS, local_task
from fulldepth.evaluation.subject import EvaluationSubject
from fulldepth.execution.harness import (
    Answers,
    Catalogue,
    LayerReader,
    Loaded,
    Score,
    Unit,
    layered_model,
    run_unit,
)
from fulldepth.execution.harness.layered import TaskSession
from fulldepth.hf.truncation import truncated
from fulldepth.progress import Watcher
from fulldepth.settings.evaluate import EvaluateSettings, parse_layers

ANSWERS = "answers"
"""Folder of a result folder for the answers of an unfinished evaluation."""
SAMPLES = "samples_{}.jsonl"
"""File of a result folder with lm-eval's log of every example of a task."""
EXIT_BOOTSTRAP = 1000
"""Most resamples for standard errors at exit layers before the last."""


class Suite(NamedTuple):
    """The tasks of a paper."""

    tasks: tuple[str, ...]
    """Names of tasks and groups of lm-eval."""
    num_fewshot: int | None
    """Solved examples in a prompt; None = each task's own number."""
    source: str


SUITES = {
    "jreg-suite": Suite(
        ("lambada_openai", "boolq", "arc_easy", "hellaswag", "piqa", "race", "social_iqa", "sciq", "swag"),
        None,
        "JREG, Sec. 5.2 and Table 3",
    ),
    "lime-suite": Suite(
        ("arc_easy", "arc_challenge", "winogrande", "copa", "multirc", "rte", "hellaswag", "piqa"),
        1,
        "LIME, Table 1 (one-shot)",
    ),
    "hopscotch-suite": Suite(
        ("gsm8k", "arc_challenge", "gpqa_main_zeroshot", "social_iqa", "pawsx"),
        None,
        "Hopscotch, poster, first table (gpqa: the main set without solved examples)",
    ),
}
"""Name -> suite."""


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


def load_tasks(units: list[Unit], settings: EvaluateSettings) -> dict[str, Loaded]:
    """Name of each unit -> its tasks with their data; before a model is loaded.

    Raises:
        FulldepthError: if a name is unknown, a file is missing, a task is not valid or its data cannot be read, or
            arguments of generation are given and no task generates.
    """
    own = {unit.name: local_task(unit.name, settings.task_data or []) for unit in units if unit.name in LOCAL_TASKS}
    catalogue = Catalogue([unit.name for unit in units], own, settings.include_path, [*LOCAL_TASKS, *SUITES])
    loaded = {}
    for unit in units:
        shots = unit.num_fewshot if settings.num_fewshot is None else settings.num_fewshot
        loaded[unit.name] = catalogue.load(
            unit.name, num_fewshot=shots, gen_kwargs=settings.gen_kwargs, seed=settings.seed
        )
    if settings.gen_kwargs and not any(each.generates for each in loaded.values()):
        raise FulldepthError("gen_kwargs are for tasks that generate text, and none of these does; leave them out.")
    return loaded


def score_tasks(
    subject: EvaluationSubject,
    tasks: dict[str, Loaded],
    settings: EvaluateSettings,
    folder: Path | None,
    watcher: Watcher,
) -> Scored:
    """Score all units at their exit layers.

    Args:
        subject: the model.
        tasks: name of each unit -> its tasks; taken out as they are scored.
        settings: of the evaluation.
        folder: result folder, which gets the answers of an unfinished run and the logs of examples; None = answers are
            kept in memory.
        watcher: receives progress.

    Raises:
        FulldepthError: if a task cannot be run, or an exit layer does not exist.
    """
    scored = Scored(units=list(tasks))
    for earlier in () if folder is None else folder.glob(SAMPLES.format("*")):
        earlier.unlink()
    logs = folder if settings.log_samples else None
    for name in scored.units:
        loaded = tasks.pop(name)
        layers, notes = _layers_of(name, loaded, subject, settings)
        scored.warnings += notes
        path = None if folder is None else folder / ANSWERS / f"{_file_name(name)}.jsonl"
        identity = {
            **subject.identity,
            "layers": layers,
            "unit": name,
            "tasks": loaded.content,
            **settings.model_dump(include={"limit", "seed", "batch_size"}),
        }
        with Answers(path, identity, len(layers)) as answers:
            if answers.reused:
                watcher.say(f"{name}: {answers.reused:,} answers of the interrupted run are reused.")
            session = TaskSession(
                LayerReader(subject.anatomy, subject.classifier, layers),
                cache(partial(truncated, subject.anatomy)),
                layers[-1],
                answers,
                watcher,
                name,
            )
            _score_unit(subject, loaded, settings, session, scored, logs)
        if session.cut:
            scored.warnings.append(
                f"{session.cut:,} requests of {name} are longer than the model's positions; their beginnings were "
                "cut, as lm-eval does."
            )
    return scored


def _score_unit(
    subject: EvaluationSubject,
    loaded: Loaded,
    settings: EvaluateSettings,
    session: TaskSession,
    scored: Scored,
    logs: Path | None,
) -> None:
    """Run lm-eval's evaluation once per exit layer, the last layer first."""
    lm = layered_model(subject.model, subject.tokenizer, session, settings.batch_size)
    layers = session.reader.layers
    for number, layer in enumerate(reversed(layers)):
        session.layer = layer
        most = settings.bootstrap_iters if number == 0 else min(EXIT_BOOTSTRAP, settings.bootstrap_iters)
        result = run_unit(
            lm,
            loaded.tasks,
            bootstrap_iters=most,
            **settings.model_dump(include={"limit", "seed", "apply_chat_template", "system_instruction"}),
            fewshot_as_multiturn=settings.multiturn,
        )
        if logs is not None:
            _log(logs, layer, result.samples)
        scored.scores.setdefault(layer, []).extend(result.scores)
        if number == 0:
            scored.higher_is_better |= result.higher_is_better
            scored.chance |= result.chance
            scored.guesses |= result.guesses
            scored.clusters |= result.clusters
            scored.layers |= {score.task: layers for score in result.scores}
            if len(layers) > 1:
                session.watcher.begin(f"{session.title}: metrics of exit layers", len(layers) - 1)
        elif not loaded.generates:
            session.watcher.advance(1)


def _log(folder: Path, layer: int, samples: Mapping[str, list[dict[str, Any]]]) -> None:
    """Append lm-eval's logs of examples to a file for each task, in lm-eval's format, with the exit layer."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else str(value)

    for task, entries in samples.items():
        lines = []
        for entry in entries:
            arguments = {
                f"gen_args_{number}": {f"arg_{place}": value for place, value in enumerate(given)}
                for number, given in enumerate(entry["arguments"])
            }
            logged = entry | {"exit_layer": layer, "arguments": arguments, "target": str(entry["target"])}
            lines.append(
                json.dumps(
                    logged,
                    default=plain,
                    ensure_ascii=False,
                )
                + "\n"
            )
        try:
            with (folder / SAMPLES.format(_file_name(task))).open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            raise FulldepthError(f"Cannot write into {folder}: {error.strerror or error}.") from error


def _layers_of(
    name: str, loaded: Loaded, subject: EvaluationSubject, settings: EvaluateSettings
) -> tuple[list[int], list[str]]:
    """The exit layers of a unit, and notes on them."""
    depth = subject.num_layers
    if not loaded.generates:
        return parse_layers(settings.exit_layers, depth, list(range(1, depth + 1))), []
    layers = parse_layers(settings.exit_layers, depth, [])
    if len(layers) > 1 and subject.plan is not None:
        raise FulldepthError(
            f"{name} generates text, and a model with blocks skipped in place cannot be cut to its first layers. "
            "Export the plan (fulldepth skip apply) and evaluate the export, or use --exit-layers full."
        )
    if settings.exit_layers is None:
        return layers, [
            f"{name} generates text, which takes a run per exit layer: only the whole model was scored. Name "
            "layers with --exit-layers."
        ]
    return layers, []


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
