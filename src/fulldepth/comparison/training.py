"""Compares training runs at equal steps: all rows, the numbers at the last common step, and the differences."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from fulldepth.comparison import training_verdict, verdict
from fulldepth.comparison.align import Depth, differences
from fulldepth.comparison.verdict import Entry
from fulldepth.errors import FulldepthError
from fulldepth.results import COLUMNS, Finding, Results
from fulldepth.uncertainty import Ratio, median_ratio

WINDOWED = ("train_loss", "penalty", "throughput")
"""Means since the previous evaluation: comparable only if that evaluation was at the same step."""


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
        depth: how layers are aligned, see `fulldepth.comparison.align.differences`.

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
    times = {label: _time_ratio(own, seconds[first]) for label, own in zip(labels, seconds, strict=True)}
    models = [_entry(run, label, label == labels[first], step) for run, label in zip(runs, labels, strict=True)]
    at_step = together[together["step"] == step]
    return together, {
        "of": "training",
        "step": step,
        "models": models,
        "headline": training_verdict.headline(models, step, times) | verdict.headline(at_step, models),
        "warnings": training_verdict.warnings(models, step),
    }


def last_common_step(runs: list[Results], labels: list[str]) -> int:
    """The last step with a validation loss in every run.

    Raises:
        FulldepthError: if there is none.
    """
    evaluated = [_steps(run.table) for run in runs]
    common = set.intersection(*map(set, evaluated))
    if not common:
        listing = "; ".join(f"{label}: {_listed(steps)}" for label, steps in zip(labels, evaluated, strict=True))
        raise FulldepthError(f"The runs have no evaluated step in common ({listing}).")
    return max(common)


def _steps(table: pd.DataFrame) -> list[int]:
    rows = table[(table["measure"] == "validation_loss") & np.isfinite(table["value"])]
    return sorted({int(step) for step in rows["step"]})


def _listed(steps: list[int]) -> str:
    shown = steps if len(steps) <= 6 else [*steps[:3], "...", steps[-1]]
    return ", ".join(map(str, shown)) or "none"


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
    return {
        "label": label,
        "baseline": is_baseline,
        **parts,
        "recipe": meta.get("recipe"),
        "last_step": max(_steps(run.table)),
        "targets": _targets(run.table),
        "headline": _numbers(run.table, _depth(run), step) | _size(meta["model"]),
    }


def _size(model: dict[str, Any]) -> Entry:
    return {"parameters": Finding(model["parameters"]).document()} if model.get("parameters") else {}


def _numbers(table: pd.DataFrame, layers: int, step: int) -> Entry:
    """The numbers of one run at a step; missing ones are left out."""
    so_far = table[table["step"] <= step]
    at_step = table[table["step"] == step]
    numbers = {
        "validation_loss": (_last(at_step, "validation_loss"), "nats"),
        "zeta_L": (_last(at_step, "jump_rate", layers), "%"),
        "zeta_L-1": (_last(at_step, "jump_rate", layers - 1), "%"),
        "zeta_L-2": (_last(at_step, "jump_rate", layers - 2), "%"),
        "last_layer_displacement": (_last(at_step, "displacement", layers), "1"),
        "time_per_step": (time_per_step(so_far), "s"),
        "throughput": (_middle(so_far, "throughput"), "tokens/s"),
        "peak_memory": (_last(so_far, "peak_memory"), "MiB"),
        "other_load": (_largest(so_far, "other_load"), "1"),
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


def _largest(table: pd.DataFrame, measure: str) -> float | None:
    rows = _rows(table, measure)
    return float(rows["value"].max()) if len(rows) else None


def _middle(table: pd.DataFrame, measure: str) -> float | None:
    rows = _rows(table, measure)
    return float(rows["value"].median()) if len(rows) else None


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


def _time_ratio(own: dict[tuple[int, int], float], base: dict[tuple[int, int], float]) -> Ratio:
    """Time over the baseline's: the median over the intervals between evaluations that both runs have."""
    both = [at for at in own if at in base]
    return median_ratio([own[at] for at in both], [base[at] for at in both])


def _targets(table: pd.DataFrame) -> int | None:
    counts = _rows(table, "validation_loss")["count"].dropna()
    return int(counts.iloc[-1]) if len(counts) else None
