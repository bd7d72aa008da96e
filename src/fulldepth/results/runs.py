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
from fulldepth.results.differences import Depth, counterparts, depth_of
from fulldepth.results.document import Finding
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
        depth: how layers are aligned, see `fulldepth.results.differences.counterparts`.

    Returns:
        The table with `step`, `model` and `difference`, and the entries `of`, `step`, `models`, `headline`,
        `warnings` of the document.

    Raises:
        FulldepthError: if no step has a validation loss in every run.
    """
    evaluated = [sorted(map(int, set(_rows(run.table, "validation_loss")["step"]))) for run in runs]
    common = set.intersection(*map(set, evaluated))
    if not common:
        listing = "; ".join(f"{label}: {one_line(steps, 60)}" for label, steps in zip(labels, evaluated, strict=True))
        raise FulldepthError(f"The runs have no evaluated step in common ({listing}).")
    step, baseline = max(common), runs[first]
    before = _previous(baseline.table)
    tables, models, times = [], [], {}
    clock = seconds_per_step(baseline.table, step)
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        table = run.table[[*COLUMNS, "step"]].assign(model=label, difference=float("nan"))
        models.append(_entry(run, label, index == first, step))
        if index != first:
            equal = {at for at, previous in _previous(run.table).items() if before.get(at, -1) == previous}
            rows = baseline.table
            rows = rows[rows["step"].isin(equal) | ~rows["measure"].isin(WINDOWED)]
            table["difference"] = (
                table["value"] - counterparts(table, depth_of(run), rows, depth_of(baseline), depth)[:, 0]
            )
            own = seconds_per_step(run.table, step)
            both = [interval for interval in own if interval in clock]
            times[label] = median_ratio([own[at] for at in both], [clock[at] for at in both])
        tables.append(table)
    together = pd.concat(tables, ignore_index=True)
    at_step = together[together["step"] == step].assign(difference_error=float("nan"))
    base, others = verdict.baseline_of(models)
    # no run is called the best: of one run each, the effect of another seed is not known
    costs = {
        f"{name}:{model['label']}": finding
        for model in others
        for name, finding in _against(model, base, step, times[model["label"]])
    }
    names = (*JUMPS, "last_layer_displacement")
    refused = [name for name in costs if name.startswith("comparable:")]
    measured = [model for model in models if f"comparable:{model['label']}" not in refused]
    return together, {
        "of": "training",
        "step": step,
        "models": models,
        "headline": {name: costs[name] for name in refused} | costs | verdict.headline(at_step, measured, names=names),
        "warnings": _warnings(models, step),
    }


def _previous(table: pd.DataFrame) -> dict[int, int | None]:
    """Each step of a run -> the one evaluated before it."""
    steps = sorted({int(step) for step in table["step"]})
    return dict(zip(steps, [None, *steps[:-1]], strict=True))


def _entry(run: Results, label: str, is_baseline: bool, step: int) -> Entry:
    """Entry of a run in the comparison's document; `headline` holds its numbers at the common step."""
    meta, layers = run.meta, depth_of(run)
    so_far, at_step = run.table[run.table["step"] <= step], run.table[run.table["step"] == step]

    def last(table: pd.DataFrame, measure: str, layer: int | None = None) -> float | None:
        values = _rows(table, measure, layer)["value"]
        return float(values.iloc[-1]) if len(values) else None

    seconds = pd.Series([*seconds_per_step(run.table, step).values()], dtype="float64")
    numbers = {
        "validation_loss": (last(at_step, "validation_loss"), "nats"),
        **{name: (last(at_step, "jump_rate", layers - back), "%") for back, name in enumerate(JUMPS)},
        "last_layer_displacement": (last(at_step, "displacement", layers), "1"),
        "time_per_step": (seconds.median(), "s"),
        "throughput": (_rows(so_far, "throughput")["value"].median(), "tokens/s"),
        "peak_memory": (last(so_far, "peak_memory"), "MiB"),
        "other_load": (_rows(so_far, "other_load")["value"].max(), "1"),
        "parameters": (meta["model"].get("parameters") or None, "1"),
    }
    losses = _rows(run.table, "validation_loss")
    counts = losses["count"].dropna()
    return {
        "label": label,
        "baseline": is_baseline,
        **{key: meta.get(key) or {} for key in ("model", "data", "settings")},
        "recipe": meta.get("recipe"),
        "last_step": int(losses["step"].max()),
        "targets": int(counts.iloc[-1]) if len(counts) else None,
        "headline": {
            name: Finding(value, unit).document() for name, (value, unit) in numbers.items() if pd.notna(value)
        },
    }


def _rows(table: pd.DataFrame, measure: str, layer: int | None = None) -> pd.DataFrame:
    """The finite rows of a measure; if `layer` is given, those of that layer of the residual stream."""
    rows = table[(table["measure"] == measure) & np.isfinite(table["value"])]
    if layer is not None:
        rows = rows[(rows["layer"] == layer).fillna(False).astype(bool) & (rows["site"] == "residual")]
    return rows.sort_values("step")


def seconds_per_step(table: pd.DataFrame, last: int) -> dict[tuple[int, int], float]:
    """Seconds per step between two evaluations, by the steps of both, up to the step `last`."""
    rows = _rows(table, "elapsed").drop_duplicates("step", keep="last")
    rows = rows[(rows["step"] > 0) & (rows["step"] <= last)]
    clock = [(0, 0.0), *zip(map(int, rows["step"]), rows["value"], strict=True)]
    return {(before, after): (end - start) / (after - before) for (before, start), (after, end) in pairwise(clock)}


def _value(model: Entry, name: str) -> float | None:
    value = (model["headline"].get(name) or {}).get("value")
    return None if value is None else float(value)


def _busy(model: Entry) -> str:
    """Why the costs of a run cannot be compared; empty if other programs hardly used the machine."""
    load = _value(model, "other_load")
    if load is None:
        return f"it is not recorded how busy the machine of {model['label']} was"
    return f"other programs used {load:.0%} of its CPU during {model['label']}" if load > BUSY else ""


def _against(model: Entry, baseline: Entry, step: int, time: Ratio) -> Iterator[tuple[str, Finding]]:
    """Name and finding of one run: difference of the loss, ratios of the costs.

    Costs are compared if both runs are known to have had the machine to themselves.
    """
    label, other = model["label"], baseline["label"]
    values = {name: (_value(model, name), _value(baseline, name)) for name in ("validation_loss", *MULTIPLES)}
    loss, base = values.pop("validation_loss")
    refused = verdict.refusal(model, baseline, NOT_COMPARABLE)
    if refused is not None:
        yield "comparable", refused
    elif loss is not None and base is not None:
        sentence = (
            f"Validation loss at step {step:,}: {loss:.3f} nats in {label} against {base:.3f} in {other} "
            f"({verdict.signed(loss - base, 3)}, of one run each)."
        )
        yield "validation_loss", Finding(loss - base, "nats", sentence)
    alone = not _busy(model) and not _busy(baseline)
    if alone:
        ends = f"95 % interval {time.low:.2f} to {time.high:.2f}"
        said = f"{time.value:.2f} times ({ends})" if time.differs else f"no measurable difference ({ends})"
        if math.isnan(time.low):
            said = f"not compared; an interval takes {FEWEST_ROUNDS} common evaluations"
        value, interval = (time.value, (time.low, time.high)) if time.differs else (None, None)
        yield (
            "time_per_step",
            Finding(value, "x", f"Time per step, {label} against {other}: {said}.", interval=interval),
        )
    for name, (cost, base_cost) in values.items():
        if cost is not None and base_cost and (alone or name == "parameters"):
            ratio = cost / base_cost
            yield name, Finding(ratio, "x", f"{MULTIPLES[name]}: {ratio:.2f} times {other}'s in {label}.")


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
        if reasons := verdict.unlike(model, baseline, UNEQUAL_STEPS):
            lines.append(f"{pair}: equal steps are not equal training because {reasons}.")
        lines += verdict.depth_warning(model, baseline)
    return lines
