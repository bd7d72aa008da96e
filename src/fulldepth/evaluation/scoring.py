"""Scores of tasks at every exit layer: lm-eval's own evaluation, once per layer, on answers kept on disk."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from numpy.typing import NDArray

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import append_text, sha256_of
from fulldepth.core.progress import Watcher
from fulldepth.core.uncertainty import advisable, counted, deal, identity, ratio_error, ratio_influence
from fulldepth.data.conversations import reasoning_mark
from fulldepth.evaluation.harness import SEED, Answers, LayerReader, layered_model, quiet, seeded
from fulldepth.evaluation.loading import Loaded
from fulldepth.evaluation.model import EvaluatedModel
from fulldepth.results import DOCUMENT
from fulldepth.settings.evaluate import EvaluateSettings

ANSWERS = "answers"
"""Folder of a result folder for the answers of an unfinished evaluation."""
SAMPLES = "samples_{}.jsonl"
"""File of a result folder with lm-eval's log of every example of a task."""
EXIT_BOOTSTRAP = 1000
"""Most resamples for standard errors at exit layers before the last."""
FAILURES = (OSError, ValueError, KeyError, TypeError, IndexError, AssertionError, jinja2.TemplateError)
"""What the harness raises for missing data and invalid task files."""


@dataclass(frozen=True)
class Score:
    """One number of one task."""

    task: str
    metric: str
    """As the task names it: acc, acc_norm, exact_match, perplexity, ...; with its filter if that is not `none`."""
    value: float
    error: float | None
    """Standard error; None where the harness gives none."""
    count: int
    """Examples."""
    values: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    """[count] of each example, in the order of the task; None where the score is not their mean."""


@dataclass
class Scored:
    """Scores of all tasks."""

    layers: dict[str, list[int]] = field(default_factory=dict)
    """Task -> exit layers."""
    scores: dict[int, list[Score]] = field(default_factory=dict)
    """Exit layer -> scores."""
    higher_is_better: dict[str, dict[str, bool | None]] = field(default_factory=dict)
    """Task -> metric without filter -> whether higher is better."""
    chance: dict[str, float] = field(default_factory=dict)
    """Multiple-choice task -> mean share of right answers of random choices, or of the most frequent one."""
    guesses: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Task -> for each example, the expected accuracy of what `chance` is of."""
    clusters: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Task -> identity of each example: equal documents are one."""
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task -> how its examples are asked, see `Loaded`."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """Group of tasks -> its tasks and groups."""
    warnings: list[str] = field(default_factory=list)


def score_tasks(
    model: EvaluatedModel,
    tasks: dict[str, Loaded],
    settings: EvaluateSettings,
    exit_layers: list[int] | None,
    folder: Path | None,
    watcher: Watcher,
) -> Scored:
    """Score all tasks at their exit layers.

    Args:
        model: with the blocks of its plan skipped.
        tasks: from `load_tasks`; taken out as they are scored.
        settings: of the evaluation.
        exit_layers: those of `EvaluateSettings.exit_layers_of`.
        folder: result folder, which gets the answers of an unfinished run and the logs of examples; None = answers are
            kept in memory.
        watcher: receives progress.

    Raises:
        FulldepthError: if a task cannot be run.
    """
    scored = Scored()
    subject = model.subject
    mark = reasoning_mark(subject.tokenizer) if settings.apply_chat_template else ""
    for name in list(tasks):
        loaded = tasks.pop(name)
        if folder is not None and (settings.log_samples or (folder / DOCUMENT).exists()):
            for task in loaded.tasks["tasks"]:  # logs of earlier results; those of others have other names
                (folder / SAMPLES.format(_file_name(task))).unlink(missing_ok=True)
        layers = _layers_of(name, loaded, model, exit_layers, scored.warnings)
        if mark and not loaded.generates:
            scored.warnings.append(
                f"The chat template begins each answer with {mark!r}: {name} scores answers in place of the reasoning, "
                "which the model would not write. Tasks that generate text let it reason."
            )
        path = None if folder is None else folder / ANSWERS / f"{_file_name(name)}.jsonl"
        origin = {
            **model.identity,
            "layers": layers,
            "unit": name,
            "tasks": loaded.content,
            **settings.model_dump(include={"limit", "seed", "batch_size"}),
        }
        with Answers(path, origin, len(layers)) as answers:
            if answers.reused:
                watcher.say(f"{name}: {answers.reused:,} answers of the interrupted run are reused.")
            reader = LayerReader(subject.anatomy, subject.classifier, layers)
            options: dict[str, Any] = {"batch_size": settings.batch_size, "title": name, "watcher": watcher}
            lm = layered_model(reader, subject.tokenizer, answers, **options)
            for layer in reversed(layers):
                lm.layer = layer
                is_whole = layer == layers[-1]
                output = _run(lm, loaded.tasks, settings, subject.device, None if is_whole else EXIT_BOOTSTRAP)
                samples = output.get("samples") or {}
                if folder is not None and settings.log_samples:
                    _log(folder, layer, samples)
                scores = list(_scores(output))
                scored.scores.setdefault(layer, []).extend(scores)
                if is_whole:
                    scored.asked |= loaded.asked
                    scored.members |= dict(output.get("group_subtasks") or {})
                    scored.layers |= {score.task: layers for score in scores}
                    scored.higher_is_better |= dict(output.get("higher_is_better") or {})
                    for task, listed in samples.items():
                        rows = _examples(listed)
                        _add_guesses(scored, task, loaded.tasks["tasks"].get(task), rows)
                        directions = scored.higher_is_better.get(task) or {}
                        scored.warnings += _none_right(task, listed, [m for m, higher in directions.items() if higher])
                    if len(layers) > 1:
                        watcher.begin(f"{name}: metrics of exit layers", len(layers) - 1)
                elif not loaded.generates:
                    watcher.advance(1)
        if lm.cut:
            scored.warnings.append(
                f"{counted(lm.cut, 'request')} of {name} did not fit in the model's positions; beginnings were cut, as "
                "lm-eval does."
            )
    return scored


def _run(
    lm: Any, loaded: Mapping[str, Any], settings: EvaluateSettings, device: torch.device, limit: int | None
) -> dict[str, Any]:
    """The output of lm-eval's `evaluate`, as in `lm_eval.simple_evaluate`, with at most so many resamples."""
    from lm_eval import evaluate  # noqa: PLC0415  # an extra

    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=SEED if settings.seed is None else settings.seed)
    resamples = settings.bootstrap_iters if limit is None else min(limit, settings.bootstrap_iters)
    try:
        with quiet(), seeded(settings.seed, device):
            return evaluate(
                lm=lm,
                task_dict=dict(loaded),
                bootstrap_iters=resamples,
                log_samples=True,
                limit=settings.limit,
                apply_chat_template=settings.apply_chat_template,
                fewshot_as_multiturn=settings.apply_chat_template,
                system_instruction=settings.system_instruction,
            )
    except FulldepthError:
        raise
    except FAILURES as error:
        reason = one_line(error) or type(error).__name__
        raise FulldepthError(f"lm-eval cannot run {lm.title}: {reason}") from error


def _add_guesses(scored: Scored, name: str, task: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add what is known of a task's examples: which are equal, and how well a guess does."""
    if not rows:
        return
    scored.clusters[name] = np.array([identity(str(row.get("doc_hash", row["doc_id"]))) for row in rows], np.int64)
    is_choice = task is not None and task.OUTPUT_TYPE == "multiple_choice"
    if not is_choice:
        scored.guesses[name] = _guesses(rows, {})
        return
    answered = {row["doc_id"]: _right_choices(task, row["doc"]) for row in rows}
    rows = [{"doc_id": row["doc_id"], "target": answered[row["doc_id"]][0]} for row in rows]
    scored.guesses[name] = _guesses(rows, {number: choices for number, (_, choices) in answered.items()})
    scored.chance[name] = float(scored.guesses[name].mean())


def _right_choices(task: Any, doc: Any) -> tuple[frozenset[str], float]:
    """The right choices of an example as texts, and the number of its choices for each right one.

    Choices are scored without their places, so that a guess may be one text every time, and not one place.
    """
    choices = list(task.doc_to_choice(doc))
    stated = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    named = stated if isinstance(stated, list) else [stated]
    places = {choices.index(answer) if isinstance(answer, str) and answer in choices else answer for answer in named}
    right = {place for place in places if isinstance(place, int) and 0 <= place < len(choices)}
    return frozenset(str(choices[place]) for place in right), len(choices) / len(right) if right else math.inf


def _none_right(task: str, samples: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> list[str]:
    """A sentence if no answer of a task is right by any of its metrics that count right answers and any of its filters,
    and what to look at: likelihoods are of an answer that follows the prompt as it stands, with no space between.
    """
    values = [row.get(metric) for row in samples for metric in metrics]
    marks = [value for value in values if isinstance(value, int | float | np.number)]
    if not marks or any(marks):
        return []
    rows = _examples(samples)
    pairs = [(str(request[0]), str(request[1])) for row in rows for request in row["arguments"] if len(request) > 1]
    joined = [pair for pair in pairs if pair[0][-1:].isalnum() and pair[1][:1].isalnum()]
    hint = " Look at the prompts and answers (--set log_samples=true)."
    if joined:
        before = joined[0][0][-20:]
        after = joined[0][1][:20]
        hint = f" Its answers follow the prompts without a space ({before + after!r}); give them one (' {after}')."
    return [f"None of the {len(rows):,} answers of {task} is right with the whole model.{hint}"]


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
            lines.append(json.dumps(logged, default=plain, ensure_ascii=False) + "\n")
        append_text(folder / SAMPLES.format(_file_name(task)), "".join(lines))


def _layers_of(
    name: str, loaded: Loaded, model: EvaluatedModel, exit_layers: list[int] | None, warnings: list[str]
) -> list[int]:
    """The exit layers of a task; a note on them is added to the warnings."""
    depth = model.num_layers
    if not loaded.generates:
        return exit_layers or list(range(1, depth + 1))
    layers = exit_layers or [depth]
    if len(layers) > 1:
        model.check_can_be_cut()
    if exit_layers is None:
        warnings.append(
            f"{name} generates text, which takes a run per exit layer: only the whole model was scored. Name "
            "layers with --exit-layers."
        )
    return layers


def _scores(output: Mapping[str, Any]) -> Iterator[Score]:
    """The scores in the output of lm-eval's `evaluate`: `acc,none`: 0.5, `acc_stderr,none`: 0.1 -> one score."""
    for task, results in output["results"].items():
        samples = (output.get("samples") or {}).get(task) or []
        count = int((output["n-samples"].get(task) or {}).get("effective", 0))
        for key, value in results.items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stated = results.get(f"{metric}_stderr,{how}")
            error = float(stated) if isinstance(stated, int | float) and math.isfinite(stated) else None
            name = metric if how == "none" else f"{metric}:{how}"
            values = None
            listed = [row.get(metric) for row in _examples(samples, how)]
            if listed and all(isinstance(number, int | float | np.number) for number in listed):
                numbers = np.array(listed, np.float64)
                is_mean = abs(numbers.mean() - value) <= 1e-9 * max(1.0, abs(value))
                values = numbers if is_mean else None
            yield Score(task, name, float(value), error, count, values)


def _examples(samples: Sequence[Mapping[str, Any]], how: str | None = None) -> list[Mapping[str, Any]]:
    """The examples of a filter (None = the first one), in the order of the task."""
    how = samples[0].get("filter") if how is None and samples else how
    return sorted(
        (sample for sample in samples if sample.get("filter") == how), key=lambda sample: int(sample["doc_id"])
    )


def _guesses(rows: Sequence[Mapping[str, Any]], choices: Mapping[int, float]) -> NDArray[np.float64]:
    """[N] expected accuracy of a guess: the most frequent answer, or a random choice if that is no worse measurably.

    Args:
        rows: the examples; `target` is the right answer, or the set of all right ones.
        choices: example -> number of its choices for each right one; empty for tasks that are no multiple choice.
    """
    targets = [row.get("target") for row in rows]
    answers = [target if isinstance(target, frozenset) else frozenset([str(target)]) for target in targets]
    times = Counter(answer for right in answers for answer in sorted(right))
    frequent = max(times, key=lambda answer: times[answer], default="")  # of equally frequent ones the first
    constant = np.array([frequent in right for right in answers], np.float64)
    uniform = np.array([1 / max(1, choices.get(row["doc_id"], 1)) for row in rows])
    more = constant - uniform
    error = float(ratio_error(more, np.ones(len(more))))
    better = not choices or advisable(float(more.mean()), error, len(more))
    return constant if better else uniform


def _file_name(name: str) -> str:
    """A file name for a unit: names that hold other characters get a hash."""
    plain = "".join(c if c.isalnum() or c in "_-" else "-" for c in name)[:80]
    return plain if plain == name else f"{plain}-{sha256_of(name)[:8]}"


def influences_of(scored: Scored) -> Iterator[tuple[Any, ...]]:
    """Entries of `fulldepth.results.influences` for every score that is a mean over known examples."""
    for layer in sorted(scored.scores):
        for score in scored.scores[layer]:
            clusters = scored.clusters.get(score.task)
            if score.values is None or clusters is None:
                continue
            group = deal(clusters)
            influence = ratio_influence(np.bincount(group, score.values), np.bincount(group))
            yield "task_score", score.task, layer, None, score.metric, influence


def table_rows(scored: Scored) -> Iterator[tuple[Any, ...]]:
    """Rows of `task_score`: site = task, layer = exit layer, statistic = metric or `METRIC_stderr`."""
    for layer in sorted(scored.scores):
        for score in scored.scores[layer]:
            count = score.count or None
            yield "task_score", score.task, layer, None, score.metric, score.value, count, "1"
            if score.error is not None:
                yield "task_score", score.task, layer, None, f"{score.metric}_stderr", score.error, count, "1"
