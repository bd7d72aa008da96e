"""`sweep`: what early exit of a model costs and saves, over rules and thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.early_exit import (
    Exit,
    LayerNumber,
    Readings,
    Row,
    Subject,
    batches_of,
    calibrated,
    document,
    open_checkpoint,
    outcome,
    prepare_subject,
    read,
    splits,
    with_times,
)
from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import machine
from fulldepth.exit.generated import generation_rows, runs_of
from fulldepth.exit.record import headline
from fulldepth.hf import evaluating, unwrapped
from fulldepth.progress import Watcher
from fulldepth.results import Results, claimed, finite, provenance, tabulate
from fulldepth.settings import layer as layered
from fulldepth.settings.exit import ExitSettings, Rule

MOST_GENERATED = 3
"""Thresholds of each rule with which text is generated beside the sweep of a language model."""


def sweep(
    model: str | Path | PreTrainedModel,
    data: Any,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    rule: Rule | Sequence[Rule] = "confidence",
    thresholds: Sequence[float] | None = None,
    min_layer: int = 1,
    target_accuracy_drop: float | None = None,
    tokenizer: Any = None,
    watcher: Watcher | None = None,
    **options: Any,
) -> Results:
    """Leave a model early, over rules and thresholds: accuracy, loss, agreement, exits per layer, and speed.

    One pass over the data applies the model's own final norm and head to every layer, which gives all rules and
    thresholds at once. Classifiers are then run with samples removed as they leave, and timed against
    their own forward pass. Language models are read with the true tokens before each position.

    Args:
        model: checkpoint folder, Hub name, or a loaded model (left on its device, in its mode).
        data: labelled texts or images for classifiers, texts for language models; as for `measure`.
        output: result folder, which also gets the page; None = nothing is written.
        overwrite: replace results in the output folder.
        rule: one or several of `confidence`, `margin`, `entropy` and `patience`; see `fulldepth.early_exit.rules`.
        thresholds: above 0 and at most 1, which is the full model; None = 0.5 to 1.
        min_layer: first layer after which a sample may leave.
        target_accuracy_drop: also choose a threshold for every rule, on one part of the data, and report it on the
            other.
        tokenizer: a tokenizer, its folder or Hub name; None = the checkpoint's.
        watcher: receives messages and progress.
        **options: any other field of `ExitSettings` (`max_sequences`, `batch_size`, `rounds`, `lens_tokens`, ...).

    Returns:
        Results of the kind `exit`: `.meta["exits"]`, `.headline`, and `lens_loss` and `lens_accuracy` of every layer.

    Raises:
        FulldepthError: if model, data or options are invalid, the data have no labels for a classifier, or the
            model's layers cannot be run one by one, or the folder holds other results.
    """
    given: dict[str, Any] = {"rule": [rule] if isinstance(rule, str) else list(rule), "min_layer": min_layer}
    given |= {} if thresholds is None else {"thresholds": list(thresholds)}
    given |= {"target_accuracy_drop": target_accuracy_drop, **options}
    for name in ("device", "dtype"):
        if given.get(name) is not None:
            given[name] = str(given[name]).removeprefix("torch.")
    folder: dict[str, Any] = {"output": output, "overwrite": overwrite}
    return sweep_with(model, data, layered(ExitSettings, given), watcher or Watcher(), tokenizer=tokenizer, **folder)


def sweep_with(
    model: str | Path | PreTrainedModel,
    data: Any,
    settings: ExitSettings,
    watcher: Watcher,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    tokenizer: Any = None,
) -> Results:
    """`sweep` with its settings resolved."""
    with claimed(output, overwrite):
        results = _swept(model, data, settings, watcher, tokenizer)
        if output is not None:
            results.save(output)
    return results


def _swept(
    model: str | Path | PreTrainedModel, data: Any, settings: ExitSettings, watcher: Watcher, tokenizer: Any
) -> Results:
    """The results, not saved."""
    start = perf_counter()
    if isinstance(model, torch.nn.Module):
        model = unwrapped(model)
    with evaluating(model) if isinstance(model, PreTrainedModel) else nullcontext():
        subject = prepare_subject(open_checkpoint(model, settings), data, settings, tokenizer)
        for warning in subject.warnings:
            watcher.say(warning)
        loaded = perf_counter()
        name = Path(subject.checkpoint.name).name
        watcher.begin(f"Reading the layers of {name}", len(subject.sequences))
        readings = read(
            subject, settings.rule, tokens=settings.lens_tokens, seed=settings.seed, advance=watcher.advance
        )
        read_at = perf_counter()
        rows, parts = _rows(subject, readings, settings)
        seconds = None
        if subject.classifies and settings.rounds:
            watcher.begin("Timing early exit", settings.rounds * batches_of(subject, parts["report"]))
            timing: dict[str, Any] = {"rounds": settings.rounds, "seed": settings.seed, "advance": watcher.advance}
            rows, seconds = with_times(subject, rows, parts["report"], **timing)
        generation = _generated(subject, rows, settings, watcher) if subject.anatomy.task == "causal-lm" else None
    table = tabulate([row for entry in readings.by_layer() for row in _table_rows(entry, len(readings.sequence))])
    content = {
        **provenance("exit", settings.model_dump(), seed=settings.seed, machine=machine(subject.device)),
        **document(subject, parts, rows, seconds),
        **({} if generation is None else generation),
        "timings": {"load": loaded - start, "forward": read_at - loaded, "total": perf_counter() - start},
        "headline": headline(subject, parts["report"], rows, settings),
    }
    return Results(table, finite(content))


def _rows(subject: Subject, readings: Readings, settings: ExitSettings) -> tuple[list[Row], dict[str, Readings]]:
    """Every rule with every threshold, and the calibrated ones; on both parts where a threshold is chosen."""
    target, layers = settings.target_accuracy_drop, subject.num_layers
    parts: dict[str, Readings] = {"report": readings}
    if target is not None:
        parts = splits(readings, settings.calibration_share, settings.seed)
    rows = []
    for rule in settings.rule:
        for threshold in sorted(set(settings.thresholds)):
            exit = Exit(rule, threshold, settings.min_layer, layers)
            rows += [Row(outcome(part, exit), split, classifies=subject.classifies) for split, part in parts.items()]
        if target is not None:
            best = calibrated(parts["calibration"], rule, settings.min_layer, settings.thresholds, target)
            exit = Exit(rule, best, settings.min_layer, layers)
            rows += [Row(outcome(part, exit), split, True, None, subject.classifies) for split, part in parts.items()]
    return rows, parts


def _generated(
    subject: Subject, rows: Sequence[Row], settings: ExitSettings, watcher: Watcher
) -> dict[str, Any] | None:
    """The entry `generation`, or a warning if the decoder cannot be run token by token; None if not asked for."""
    if not settings.prompts:
        return None
    exits = generated_exits([row for row in rows if row.split == "report"])
    watcher.begin("Generating with early exit", runs_of(exits, settings))
    try:
        return {"generation": generation_rows(subject, exits, settings, watcher.advance)}
    except FulldepthError as error:
        message = f"Nothing was generated with early exit: {error}"
        watcher.say(message)
        return {"warnings": [*subject.warnings, message]}


def generated_exits(rows: Sequence[Row]) -> list[Exit]:
    """At most `MOST_GENERATED` thresholds of each rule below 1: the one for the target accuracy, and the highest."""
    exits: list[Exit] = []
    for rule in dict.fromkeys(row.outcome.exit.rule for row in rows):
        ranked = sorted(
            (row for row in rows if row.outcome.exit.rule == rule and row.outcome.exit.threshold < 1),
            key=lambda row: (not row.calibrated, -row.outcome.exit.threshold),
        )
        exits += list(dict.fromkeys(row.outcome.exit for row in ranked))[:MOST_GENERATED]
    return sorted(exits, key=lambda exit: (exit.rule, exit.threshold))


def _table_rows(entry: LayerNumber, count: int) -> list[tuple[Any, ...]]:
    """Rows as `measure` writes them."""
    measure, statistic, layer, mean, unit = entry
    rows: list[tuple[Any, ...]] = [(measure, "residual", layer, None, statistic, mean.value, count, unit)]
    if mean.error is not None:
        rows.append((measure, "residual", layer, None, "standard_error", mean.error, count, unit))
    return rows
