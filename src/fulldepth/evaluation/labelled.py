"""Labelled data as a task: quality of a classifier or a detector at every exit layer, by class, and with early exit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.early_exit import (
    QUALITIES,
    Exit,
    Readings,
    Row,
    Subject,
    batches_of,
    document,
    drop_sentence,
    open_checkpoint,
    outcome,
    prepare_subject,
    read,
    with_times,
)
from fulldepth.errors import FulldepthError
from fulldepth.evaluation.outcome import findings, task_entries
from fulldepth.evaluation.scoring import Scored, rows_of
from fulldepth.execution.harness import Score
from fulldepth.execution.latency import machine
from fulldepth.hf import evaluating, unwrapped
from fulldepth.progress import Watcher
from fulldepth.results import Finding, Results, finite, provenance, tabulate
from fulldepth.settings import layer as layered
from fulldepth.settings.evaluate import EvaluateSettings, parse_layers
from fulldepth.settings.exit import ExitSettings

CLASS_SCORE = "class_score"
"""Measure of the rows by class: `site` is the class, `layer` is L."""
SHARED = (
    *("dtype", "device", "revision", "tokenizer", "trust_remote_code", "batch_size", "rounds"),
    *("split", "skip_bad", "truncate", "corrupt"),
)
"""Settings of an evaluation that early exit has too."""


def evaluate_labelled(
    model: str | Path | PreTrainedModel,
    data: Any,
    settings: EvaluateSettings,
    watcher: Watcher,
    folder: Path | None = None,
    *,
    tokenizer: Any = None,
) -> Results:
    """Accuracy, or average precision, on labelled data at every exit layer and by class; with `exit_thresholds` also
    with early exit: quality, mean layers and measured speed-up. Written to `folder`, without the page.

    Raises:
        FulldepthError: if the model is no classifier or detector, or the data do not fit it.
    """
    reading = _reading(settings)
    if isinstance(model, torch.nn.Module):
        model = unwrapped(model)
    with evaluating(model) if isinstance(model, PreTrainedModel) else nullcontext():
        subject = prepare_subject(open_checkpoint(model, reading), data, reading, tokenizer)
        if not subject.timed:
            raise FulldepthError(
                f"{type(subject.checkpoint.model).__name__} is a language model, which labelled data do not judge. "
                "Name --tasks, or text data with --generation-quality."
            )
        for warning in subject.warnings:
            watcher.say(warning)
        watcher.begin(f"Reading the layers of {Path(subject.checkpoint.name).name}", len(subject.sequences))
        readings = read(subject, reading.rule, tokens=None, seed=reading.seed, advance=watcher.advance)
        rows = [
            Row(outcome(readings, exit), "report", saves_all=not subject.detects)
            for threshold in sorted(set(settings.exit_thresholds or []))
            for exit in [Exit(settings.exit_rule, threshold, settings.min_layer, subject.num_layers)]
        ]
        seconds = None
        if rows and (settings.rounds or subject.detects):
            watcher.begin("Timing early exit", settings.rounds * batches_of(subject, readings))
            timing: dict[str, Any] = {"rounds": settings.rounds, "seed": reading.seed, "advance": watcher.advance}
            rows, seconds = with_times(subject, rows, readings, **timing)
    scored = _scored(subject, readings, settings)
    classes = _classes(subject, readings, rows)
    content = {
        **provenance("evaluation", settings.model_dump(), seed=reading.seed, machine=machine(subject.device)),
        **document(subject, {"report": readings}, rows, seconds),
        "tasks": task_entries(scored),
        "classes": classes,
        "headline": {name: found.document() for name, found in (findings(scored) | _early(rows)).items()},
    }
    table = [*rows_of(scored), *_class_rows(classes, readings.quality, subject.num_layers)]
    results = Results(tabulate(table), dict(finite(content)))
    if folder is not None:
        results.save(folder)
    return results


def _reading(settings: EvaluateSettings) -> ExitSettings:
    """How the data are read: all of them, unless `limit` is set."""
    given: dict[str, Any] = {name: getattr(settings, name) for name in SHARED}
    if "batch_size" not in settings.model_fields_set:
        del given["batch_size"]
    given |= {"max_sequences": settings.limit or 10**9, "seed": settings.seed or 0, "rule": [settings.exit_rule]}
    given["min_layer"] = settings.min_layer
    return layered(ExitSettings, given)


def _scored(subject: Subject, readings: Readings, settings: EvaluateSettings) -> Scored:
    """The data as a task, scored at exit layers."""
    name, depth = subject.sequences.name, subject.num_layers
    layers = parse_layers(settings.exit_layers, depth, list(range(1, depth + 1)))
    means = {layer: readings.scores(readings.all_at(layer))[readings.quality] for layer in layers}
    scores = {
        layer: [Score(name, readings.quality, mean.value, mean.error, len(readings.sequence))]
        for layer, mean in means.items()
    }
    return Scored(
        layers={name: layers},
        scores=scores,
        higher_is_better={name: {readings.quality: True}},
        chance={name: readings.chance.value} if subject.classifies else {},
        drops={name: [readings.shortfall(layer) for layer in layers]},
        leads={name: readings.lead},
    )


def _classes(subject: Subject, readings: Readings, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each class its number of samples or objects, and its quality without and with early exit."""
    names = subject.sequences.class_names
    full = readings.by_class(readings.all_at(readings.num_layers), len(names))
    early = [readings.by_class(row.outcome.layers, len(names)) for row in rows]
    return [
        {
            "name": name,
            "count": count,
            "value": None if mean is None else mean.value,
            "stderr": None if mean is None else mean.error,
            "early": [None if (own := each[index][1]) is None else own.value for each in early],
            "early_stderr": [None if (own := each[index][1]) is None else own.error for each in early],
        }
        for index, (name, (count, mean)) in enumerate(zip(names, full, strict=True))
    ]


def _class_rows(classes: Sequence[dict[str, Any]], quality: str, depth: int) -> list[tuple[Any, ...]]:
    """Rows of `class_score` of the full model."""
    rows: list[tuple[Any, ...]] = []
    for entry in classes:
        for statistic, key in ((quality, "value"), (f"{quality}_stderr", "stderr")):
            if entry[key] is not None:
                rows.append((CLASS_SCORE, entry["name"], depth, None, statistic, entry[key], entry["count"], "1"))
    return rows


def _early(rows: Sequence[Row]) -> dict[str, Finding]:
    """One finding for each threshold."""
    found = {}
    for row in rows:
        own, exit = row.outcome, row.outcome.exit
        name = QUALITIES[own.quality_name]
        times = "Not timed." if row.speedup is None else row.speedup.sentence()
        sentence = (
            f"With early exit ({exit.rule} {exit.threshold:g}): {name} {own.quality.value:.1%}. "
            f"{drop_sentence(own.drop, name)}. After {own.layers_run:.1f} of {len(own.exits)} layers on average. "
            f"{times}"
        )
        name = f"early_exit {exit.rule} {exit.threshold:g}"
        found[name] = Finding(own.quality.value, "1", sentence, standard_error=own.quality.error)
    return found


__all__ = ["evaluate_labelled"]
