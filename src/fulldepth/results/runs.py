"""Compares training runs at equal steps: all rows, the numbers at the last common step, and the differences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from fulldepth.errors import FulldepthError, one_line
from fulldepth.results import verdict
from fulldepth.results.align import Depth, differences
from fulldepth.results.finding import Finding
from fulldepth.results.folder import Results
from fulldepth.results.table import COLUMNS
from fulldepth.results.verdict import Entry
from fulldepth.thresholds import BUSY
from fulldepth.uncertainty import FEWEST_ROUNDS, Ratio, median_ratio

WINDOWED = ("train_loss", "penalty", "throughput")
"""Means since the previous evaluation: comparable only if that evaluation was at the same step."""
JUMPS = ("zeta_L", "zeta_L-1", "zeta_L-2")
MULTIPLES = {"peak_memory": "Peak memory", "parameters": "Parameters"}
"""Costs without noise, compared as ratios."""

NOT_COMPARABLE = (
    verdict.DATA,
    ("the tokenizers differ", "settings", "tokenizer"),
    ("the sequence lengths differ", "settings", "sequence_length"),
    ("the numbers of validation targets differ", "", "targets"),
)
"""Differences that make two validation losses incomparable, see `verdict.unlike`."""
UNEQUAL_STEPS = (
    ("the batch sizes differ", "settings", "global_batch_size"),
    ("the learning-rate schedules are of different length", "settings", "steps"),
)
"""Settings whose differences make equal steps unequal training."""


def compare_runs(
    runs: list[Results], labels: list[str], first: int, depth: Depth
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Compare several runs with run number `first` at equal steps.

    Every row's `difference` is its value minus the baseline's at the same step and depth; NaN if the baseline was not
    evaluated at that step, and for means since the previous evaluation if that evaluation was at another step. The
    numbers of `models` and `headline` are those at the last step at which every run was evaluated (`step`). Time per
    step is the median, over the intervals between evaluations up to that step, of training time over steps. Memory and
    parameters are given as ratios to the baseline, and time where the interval of its ratio does not hold 1.

    Args:
        runs: results of kind `training`.
        labels: one per run.
        first: position of the baseline.
        depth: how layers are aligned, see `fulldepth.results.align.differences`.

    Returns:
        The table with `step`, `model` and `difference`, and the entries `of`, `step`, `models`, `headline`,
        `warnings` of the document.

    Raises:
        FulldepthError: if no step has a validation loss in every run.
    """
    step = last_common_step(runs, labels)
    baseline = runs[first]
    tables = []
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        table = run.table[[*COLUMNS, "step"]].assign(model=label, difference=float("nan")).reset_index(drop=True)
        if index != first:
            table["difference"] = _differences(table, run, baseline, depth)
        tables.append(table)
    together = pd.concat(tables, ignore_index=True)
    seconds = [_seconds(run.table[run.table["step"] <= step]) for run in runs]
    times = {}
    for label, own in zip(labels, seconds, strict=True):
        both = [interval for interval in own if interval in seconds[first]]
        times[label] = median_ratio([own[at] for at in both], [seconds[first][at] for at in both])
    models = [_entry(run, label, label == labels[first], step) for run, label in zip(runs, labels, strict=True)]
    at_step = together[together["step"] == step]
    base, others = verdict.baseline_of(models)
    # no run is called the best: of one run each, the effect of another seed is not known
    costs = {
        f"{name}:{model['label']}": entry
        for model in others
        for name, entry in _against(model, base, step, times.get(model["label"]))
    }
    return together, {
        "of": "training",
        "step": step,
        "models": models,
        "headline": costs | verdict.headline(at_step, models),
        "warnings": _warnings(models, step),
    }


def last_common_step(runs: list[Results], labels: list[str]) -> int:
    """The last step with a validation loss in every run.

    Raises:
        FulldepthError: if there is none.
    """
    evaluated = [_steps(run.table) for run in runs]
    common = set.intersection(*map(set, evaluated))
    if not common:
        listing = "; ".join(
            f"{label}: {one_line(', '.join(map(str, steps)), 60) or 'none'}"
            for label, steps in zip(labels, evaluated, strict=True)
        )
        raise FulldepthError(f"The runs have no evaluated step in common ({listing}).")
    return max(common)


def _steps(table: pd.DataFrame) -> list[int]:
    rows = table[(table["measure"] == "validation_loss") & np.isfinite(table["value"])]
    return sorted({int(step) for step in rows["step"]})


def _differences(table: pd.DataFrame, run: Results, baseline: Results, depth: Depth) -> np.ndarray[Any, Any]:
    result = np.full(len(table), np.nan)
    previous, of_baseline = _previous(run.table), _previous(baseline.table)
    for step in previous:
        rows, base_rows = table[table["step"] == step], baseline.table[baseline.table["step"] == step]
        if previous[step] != of_baseline.get(step):
            base_rows = base_rows[~base_rows["measure"].isin(WINDOWED)]
        result[rows.index] = differences(rows, _depth(run), base_rows, _depth(baseline), depth)
    return result


def _previous(table: pd.DataFrame) -> dict[int, int | None]:
    """Each step of a run -> the one evaluated before it."""
    steps = sorted({int(step) for step in table["step"]})
    return dict(zip(steps, [None, *steps[:-1]], strict=True))


def _depth(run: Results) -> int:
    return int(run.meta["model"]["num_layers"])


def _entry(run: Results, label: str, is_baseline: bool, step: int) -> Entry:
    """Entry of a run in the comparison's document; `headline` holds its numbers at the common step."""
    meta = run.meta
    parts = {key: meta.get(key) or {} for key in ("model", "data", "settings")}
    counts = _rows(run.table, "validation_loss")["count"].dropna()
    return {
        "label": label,
        "baseline": is_baseline,
        **parts,
        "recipe": meta.get("recipe"),
        "last_step": max(_steps(run.table)),
        "targets": int(counts.iloc[-1]) if len(counts) else None,
        "headline": _numbers(run, step),
    }


def _numbers(run: Results, step: int) -> Entry:
    """The numbers of one run at a step; missing ones are left out."""
    table, layers = run.table, _depth(run)
    so_far, at_step = table[table["step"] <= step], table[table["step"] == step]
    rates, loads = (_rows(so_far, measure)["value"] for measure in ("throughput", "other_load"))
    numbers = {
        "validation_loss": (_last(at_step, "validation_loss"), "nats"),
        **{name: (_last(at_step, "jump_rate", layers - back), "%") for back, name in enumerate(JUMPS)},
        "last_layer_displacement": (_last(at_step, "displacement", layers), "1"),
        "time_per_step": (time_per_step(so_far), "s"),
        "throughput": (float(rates.median()) if len(rates) else None, "tokens/s"),
        "peak_memory": (_last(so_far, "peak_memory"), "MiB"),
        "other_load": (float(loads.max()) if len(loads) else None, "1"),
        "parameters": (run.meta["model"].get("parameters") or None, "1"),
    }
    return {name: Finding(value, unit).document() for name, (value, unit) in numbers.items() if value is not None}


def _rows(table: pd.DataFrame, measure: str, layer: int | None = None) -> pd.DataFrame:
    """The finite rows of a measure; if `layer` is given, those of that layer of the residual stream."""
    rows = table[(table["measure"] == measure) & np.isfinite(table["value"])]
    if layer is not None:
        rows = rows[(rows["layer"] == layer).fillna(False).astype(bool) & (rows["site"] == "residual")]
    return rows.sort_values("step")


def _last(table: pd.DataFrame, measure: str, layer: int | None = None) -> float | None:
    rows = _rows(table, measure, layer)
    return float(rows["value"].iloc[-1]) if len(rows) else None


def time_per_step(table: pd.DataFrame) -> float | None:
    """Seconds per step: median over the intervals between evaluations, which is robust to disturbed intervals."""
    return float(np.median(list(seconds.values()))) if (seconds := _seconds(table)) else None


def _seconds(table: pd.DataFrame) -> dict[tuple[int, int], float]:
    """Seconds per step between two evaluations, by the steps of both."""
    rows = _rows(table, "elapsed").drop_duplicates("step", keep="last")
    rows = rows[rows["step"] > 0]
    steps, clock = [0, *map(int, rows["step"])], [0.0, *rows["value"]]
    return {
        (before, after): (end - start) / (after - before)
        for (before, after), (start, end) in zip(pairwise(steps), pairwise(clock), strict=True)
    }


def _value(model: Entry, name: str) -> float | None:
    value = (model["headline"].get(name) or {}).get("value")
    return None if value is None else float(value)


def _busy(model: Entry) -> str:
    """Why the costs of a run cannot be compared; empty if other programs hardly used the machine."""
    load = _value(model, "other_load")
    if load is None:
        return f"it is not recorded how busy the machine of {model['label']} was"
    return f"other programs used {load:.0%} of its CPU during {model['label']}" if load > BUSY else ""


def _against(model: Entry, baseline: Entry, step: int, time: Ratio | None) -> Iterator[tuple[str, Finding]]:
    """Name and finding of one run: difference of the loss, ratios of the costs.

    Costs are compared if both runs are known to have had the machine to themselves.
    """
    loss, base = (_value(entry, "validation_loss") for entry in (model, baseline))
    pair = f"{model['label']} against {baseline['label']}"
    if loss is not None and base is not None:
        sentence = (
            f"Validation loss at step {step:,}: {loss:.3f} nats in {model['label']} against {base:.3f} in "
            f"{baseline['label']} ({verdict.signed(loss - base, 3)}, of one run each)."
        )
        yield "validation_loss", Finding(loss - base, "nats", sentence)
    alone = not _busy(model) and not _busy(baseline)
    if alone and time is not None:
        title, ends = f"Time per step, {pair}", f"95 % interval {time.low:.2f} to {time.high:.2f}"
        if math.isnan(time.low):
            sentence = f"{title}: not compared; an interval takes {FEWEST_ROUNDS} common evaluations."
            yield "time_per_step", Finding(None, "x", sentence)
        elif not time.differs:
            yield "time_per_step", Finding(None, "x", f"{title}: no measurable difference ({ends}).")
        else:
            sentence = f"{title}: {time.value:.2f} times ({ends})."
            yield "time_per_step", Finding(time.value, "x", sentence, interval=(time.low, time.high))
    for name, title in MULTIPLES.items():
        cost, base_cost = _value(model, name), _value(baseline, name)
        if cost is not None and base_cost and (alone or name == "parameters"):
            ratio = cost / base_cost
            sentence = f"{title}: {ratio:.2f} times {baseline['label']}'s in {model['label']}."
            yield name, Finding(ratio, "x", sentence)


def _warnings(models: list[Entry], step: int) -> list[str]:
    """One line for each reason to distrust a difference, and for runs trained past the common step."""
    baseline, others = verdict.baseline_of(models)
    lines = []
    if step == 0:
        lines.append("The only evaluated step that all runs have is 0, before training.")
    if further := [model["label"] for model in models if model["last_step"] > step]:
        was = "was" if len(further) == 1 else "were"
        lines.append(f"{', '.join(further)} {was} trained past step {step:,}, the last that all runs have.")
    if busy := [reason for reason in map(_busy, models) if reason]:
        lines.append(f"Time and memory are not compared, because {'; '.join(busy)}.")
    for model in others:
        pair = f"{model['label']} and {baseline['label']}"
        if reasons := list(verdict.unlike(model, baseline, NOT_COMPARABLE)):
            lines.append(f"{pair}: the losses are not comparable because {'; '.join(reasons)}.")
        if reasons := list(verdict.unlike(model, baseline, UNEQUAL_STEPS)):
            lines.append(f"{pair}: equal steps are not equal training because {'; '.join(reasons)}.")
        lines += verdict.depth_warning(model, baseline)
    return lines
