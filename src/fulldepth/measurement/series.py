"""A series: the checkpoints of one training run, each measured once, combined by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pydantic

from fulldepth.data import Sequences, Source
from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.hf import find_checkpoints, has_weights, trained_steps
from fulldepth.measurement.fingerprint import contents, fingerprints
from fulldepth.measurement.run import measure_with
from fulldepth.progress import Watcher, without_repeats
from fulldepth.results import COLUMNS, Results, joined
from fulldepth.settings.measure import MeasureSettings

STEPS = "steps"
"""Subfolder of a series' results with one result folder per checkpoint."""
FINAL = "final"
"""Prefix of the name of a final model's result folder; its step follows."""


@dataclass(frozen=True)
class Point:
    """One checkpoint of a series."""

    step: int
    place: Path
    name: str
    """Name of its result folder in `steps`."""
    fingerprint: str


class StepTimings(pydantic.BaseModel):
    """Seconds, as `measure` writes them."""

    load: float
    forward: float
    total: float
    measures: dict[str, float]


class StepData(pydantic.BaseModel):
    """Entry on the data in a checkpoint's `results.json`."""

    hash: str


class SeriesEntry(pydantic.BaseModel):
    """A checkpoint in a series' `results.json`."""

    step: int
    folder: str
    fingerprint: str


class StepDocument(pydantic.BaseModel):
    """The parts of a checkpoint's `results.json` that a series reads."""

    kind: Literal["measure"]
    complete: Literal[True]
    fingerprint: str
    model: dict[str, Any]
    data: StepData
    timings: StepTimings
    headline: dict[str, dict[str, Any]]
    lens_grid: dict[str, Any] | None
    left_out: list[dict[str, str]]
    warnings: list[str]


def series_points(
    run: str | Path, data: Source | Sequences, settings: MeasureSettings
) -> tuple[list[Point], list[str]]:
    """Every `checkpoint-N` of a training run and its final model, by step; and notes on the final model.

    The final model in the run's folder is a separate point if its weights differ from those of every checkpoint and
    its `trainer_state.json` names a later step than the last checkpoint's.
    """
    steps = find_checkpoints(run)
    models = [contents(place) for _, place in steps]
    names = [place.name for _, place in steps]
    remarks: list[str] = []
    final = contents(run) if has_weights(run) else None
    if final is not None and final.weights not in [model.weights for model in models]:
        step, remarks = _final_step(run, last=steps[-1][0])
        if step is not None:
            steps, models, names = [*steps, (step, Path(run))], [*models, final], [*names, f"{FINAL}-{step}"]
    prints = fingerprints(models, data, settings)
    return [Point(n, place, name, p) for (n, place), name, p in zip(steps, names, prints, strict=True)], remarks


def _final_step(run: str | Path, *, last: int) -> tuple[int | None, list[str]]:
    """The step of a final model that is not a checkpoint; None and the reason if it is not after the last one."""
    step = trained_steps(run)
    if step is not None and step > last:
        return step, []
    reason = (
        "it has no trainer_state.json that names its step"
        if step is None
        else f"its trainer_state.json names step {step}, and the last checkpoint is of step {last}"
    )
    return None, [
        f"The model at the root of {run} is no point of the series: its weights are those of no checkpoint, and "
        f"{reason}. --no-series measures it alone."
    ]


def extends(points: Sequence[Point], earlier: Mapping[str, Any]) -> bool:
    """Whether this series extends a finished one: every checkpoint measured there is among the points.

    An earlier final model may be missing, because continued training replaces it.

    Args:
        points: of this series.
        earlier: the finished series' document.
    """
    try:
        entries = pydantic.TypeAdapter(list[SeriesEntry]).validate_python(earlier.get("steps"), strict=True)
    except pydantic.ValidationError:
        return False
    measured = {(e.step, e.fingerprint) for e in entries if not e.folder.startswith(f"{FINAL}-")}
    return bool(measured) and measured <= {(point.step, point.fingerprint) for point in points}


def measure_series(
    points: Sequence[Point],
    data: Source | Sequences,
    folder: Path,
    settings: MeasureSettings,
    process: Processes,
    watcher: Watcher,
    *,
    overwrite: bool,
) -> Results:
    """Measure every checkpoint without results (with `overwrite`, all of them), then combine the results.

    Raises:
        FulldepthError: if a checkpoint's folder holds results of another run, or a measurement fails.
    """
    results = [None if overwrite else _finished(folder / STEPS / point.name, point.fingerprint) for point in points]
    process.wait()
    parts: list[tuple[Point, Results]] = []
    watcher = without_repeats(watcher)
    for number, (point, part) in enumerate(zip(points, results, strict=True), start=1):
        title = f"Checkpoint {number} of {len(points)}: step {point.step}"
        if part is None:
            watcher.say(title)
            part = measure_with(point.place, data, settings, process, watcher)
            part.meta["fingerprint"] = point.fingerprint
            if process.is_main:
                part.save(folder / STEPS / point.name, page=False)
        else:
            watcher.say(f"{title} is measured already")
        parts.append((point, part))
    return combine(parts)


def _finished(folder_of_step: Path, print_of_step: str) -> Results | None:
    """A checkpoint's results; None if they are missing or damaged, so that it must be measured again.

    Raises:
        FulldepthError: if they are complete and belong to another run.
    """
    try:
        results = Results.load(folder_of_step)
        document = StepDocument.model_validate(results.meta, strict=True)
    except (FulldepthError, pydantic.ValidationError):
        return None
    if list(results.table.columns) != COLUMNS:
        return None
    if document.fingerprint != print_of_step:
        raise FulldepthError(
            f"{folder_of_step} holds results of another run (another model, other data or other settings). "
            "Choose another --output, or replace it with --overwrite."
        )
    return results


def combine(parts: Sequence[tuple[Point, Results]]) -> Results:
    """Combine the results of checkpoints into one series: a `step` column, and the last checkpoint's headline.

    Raises:
        FulldepthError: if the checkpoints were measured on different data.
    """
    if len({part.meta["data"]["hash"] for _, part in parts}) > 1:
        raise FulldepthError("The checkpoints turned the data into different tokens; their numbers cannot be compared.")
    table = pd.concat([part.table.assign(step=point.step) for point, part in parts], ignore_index=True)
    influences = joined(
        (part.meta, None if part.influences is None else part.influences.assign(step=point.step))
        for point, part in parts
    )
    last = parts[-1][1].meta
    keys = ("model", "headline", "lens_grid", "left_out", "fingerprint")
    steps = [
        {"step": point.step, "folder": point.name, **{key: part.meta[key] for key in keys}} for point, part in parts
    ]
    timings: dict[str, Any] = {
        key: round(sum(part.meta["timings"][key] for _, part in parts), 4) for key in ("load", "forward", "total")
    }
    timings["measures"] = last["timings"]["measures"]
    return Results(table, {**last, "timings": timings, "steps": steps}, influences)
