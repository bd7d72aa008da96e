"""Runs lm-eval's own evaluation of a model, quietly, and reads the scores from its output."""

from __future__ import annotations

import io
import logging
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import jinja2
import numpy as np
import torch
from numpy.typing import NDArray

from fulldepth.errors import FulldepthError, one_line
from fulldepth.uncertainty import advisable, identity, ratio_error

MISSING = "Tasks are scored by lm-eval: pip install 'fulldepth[evaluate]'."
FAILURES = (OSError, ValueError, KeyError, TypeError, IndexError, AssertionError, jinja2.TemplateError)
"""What the harness raises for missing data and invalid task files."""
SEED, PYTHON_SEED = 1234, 0
"""lm-eval's default seeds: of few-shot examples, NumPy and torch; of Python's `random`."""

_streams: list[tuple[Any, Any]] = []
"""stdout and stderr as they were when `quiet` was entered."""


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


@dataclass(frozen=True)
class UnitScores:
    """Scores of the tasks of a unit."""

    scores: list[Score]
    higher_is_better: dict[str, dict[str, bool | None]] = field(default_factory=dict)
    """Task -> metric without filter -> whether higher is better."""
    chance: dict[str, float] = field(default_factory=dict)
    """Multiple-choice task -> mean share of right answers of random choices, or of the most frequent one."""
    guesses: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Task -> for each example, the expected accuracy of what `chance` is of."""
    clusters: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Task -> identity of each example: equal documents are one."""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Task -> lm-eval's log of each example and filter."""


def lm_eval_version() -> str:
    """The installed version of lm-eval.

    Raises:
        FulldepthError: if it is not installed.
    """
    try:
        return metadata.version("lm-eval")
    except metadata.PackageNotFoundError as error:
        raise FulldepthError(MISSING) from error


def run_unit(
    lm: Any,
    loaded: Mapping[str, Any],
    *,
    limit: int | None = None,
    seed: int | None = None,
    bootstrap_iters: int = 100_000,
    **prompting: Any,
) -> UnitScores:
    """Evaluate a model as `lm_eval.simple_evaluate` does, on tasks that are loaded already.

    Args:
        lm: a model of lm-eval's interface.
        loaded: `tasks` and `groups`, from `Catalogue.load`.
        limit: most examples of each task, from the first; None = all.
        seed: of all random choices; None = lm-eval's default seeds.
        bootstrap_iters: resamples for standard errors of metrics that are no means, such as perplexity.
        **prompting: `apply_chat_template`, `system_instruction` and `fewshot_as_multiturn` of lm-eval's `evaluate`.

    Raises:
        FulldepthError: if a task cannot be run, with the reason.
    """
    from lm_eval import evaluate  # noqa: PLC0415  # an extra

    names = ", ".join(loaded["tasks"])
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=SEED if seed is None else seed)
    try:
        with quiet(), seeded(seed):
            output = evaluate(
                lm=lm,
                task_dict=dict(loaded),
                limit=limit,
                bootstrap_iters=bootstrap_iters,
                log_samples=True,
                **prompting,
            )
    except FulldepthError:
        raise
    except FAILURES as error:
        raise FulldepthError(f"lm-eval cannot run {names}: {reason(error)}") from error
    samples = output.get("samples") or {}
    found = UnitScores(list(_scores(output)), dict(output.get("higher_is_better") or {}), samples=samples)
    for name, rows in {name: _examples(each) for name, each in samples.items() if each}.items():
        found.clusters[name] = np.array([identity(str(row.get("doc_hash", row["doc_id"]))) for row in rows], np.int64)
        task = loaded["tasks"].get(name)
        is_choice = task is not None and task.OUTPUT_TYPE == "multiple_choice"
        choices = Counter(instance.doc_id for instance in task.instances) if is_choice else {}
        found.guesses[name] = _guesses(rows, choices)
        if is_choice:
            found.chance[name] = float(found.guesses[name].mean())
    return found


def reason(error: BaseException) -> str:
    """The message of an exception of the harness, in a line; its type for an empty one."""
    return one_line(error) or type(error).__name__


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
            values = _values(_examples(samples, how), metric, float(value))
            yield Score(task, name, float(value), error, count, values)


def _examples(samples: Sequence[Mapping[str, Any]], how: str | None = None) -> list[Mapping[str, Any]]:
    """The examples of a filter (None = the first one), in the order of the task."""
    how = samples[0].get("filter") if how is None and samples else how
    return sorted((one for one in samples if one.get("filter") == how), key=lambda one: int(one["doc_id"]))


def _values(rows: Sequence[Mapping[str, Any]], metric: str, score: float) -> NDArray[np.float64] | None:
    """A metric's value for each example; None unless the score is their mean."""
    values = [row.get(metric) for row in rows]
    if not values or not all(isinstance(value, int | float | np.number) for value in values):
        return None
    found = np.array(values, np.float64)
    return found if abs(found.mean() - score) <= 1e-9 * max(1.0, abs(score)) else None


def _guesses(rows: Sequence[Mapping[str, Any]], choices: Mapping[int, int]) -> NDArray[np.float64]:
    """[N] expected accuracy of a guess: the most frequent answer, or a random choice if that is no worse measurably.

    Args:
        rows: the examples.
        choices: example -> number of its choices; empty for tasks that are no multiple choice.
    """
    targets = [str(row.get("target")) for row in rows]
    frequent = max(targets, key=targets.count)
    constant = np.array([target == frequent for target in targets], np.float64)
    uniform = np.array([1 / max(1, choices.get(row["doc_id"], 1)) for row in rows])
    more = constant - uniform
    better = not choices or advisable(float(more.mean()), float(ratio_error(more, np.ones(len(more)))))
    return constant if better else uniform


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed the generators that tasks may use, as lm-eval does; on leaving, their states are restored."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(PYTHON_SEED if seed is None else seed)
    np.random.seed(SEED if seed is None else seed)
    torch.random.default_generator.manual_seed(SEED if seed is None else seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence messages and bars of the harness, and let it compute standard errors in this process.

    Its pool of processes would copy a process that holds a model and threads.
    """
    logger, pool = logging.getLogger("lm_eval"), os.environ.get("DISABLE_MULTIPROC")
    level = logger.level
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    _streams.append((sys.stdout, sys.stderr))
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        _streams.pop()
        logger.setLevel(level)
        if pool is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = pool


@contextmanager
def audible() -> Iterator[None]:
    """Inside `quiet`: the streams from before, while the model runs and shows its progress."""
    if not _streams:
        yield
        return
    stdout, stderr = _streams[-1]
    with redirect_stdout(stdout), redirect_stderr(stderr):
        yield
