"""A series: the checkpoints of one training run, each measured once, combined by step; fingerprints of measurements."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fulldepth import __version__
from fulldepth.core.distributed import Processes
from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import sha256_of, sha256_of_file
from fulldepth.core.progress import Watcher, without_repeats
from fulldepth.data import Sequences, Source
from fulldepth.data.files import SUFFIXES, folder_files
from fulldepth.hf import (
    checkpoint_of,
    find_checkpoints,
    find_tokenizer,
    has_weights,
    incomplete_checkpoints,
    packaged,
    trained_steps,
)
from fulldepth.results import COLUMNS, DOCUMENT, GROUPS, PAGE, TABLE, Results, joined_influences
from fulldepth.settings.measure import LINEAR_LENS, SPEED_ONLY, MeasureSettings

NOT_READ = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".md", ".log"}
"""Suffixes of pickled weights, optimiser states and notes, which are never read."""
RESULT_FILES = {DOCUMENT, TABLE, GROUPS, PAGE}
"""Files of results, which may be written into the model's own folder."""
TOKENIZER = ("*token*", "vocab*", "merges*", "*.model", "chat_template*")
"""Files of a tokenizer."""


Contents = tuple[str, dict[str, str]]
"""Hub name, empty for local files, and name -> sha256 of every file that may be read; none for a Hub name.

The place of local files is left out: a folder that is moved or copied keeps its results.
"""


def hash_contents(model: str | Path) -> Contents:
    """Hash the files that loading a local model reads; a Hub name is identified by the name alone.

    Of a training run without a final model these are the files of its last complete checkpoint. Only files at the top
    level of a folder count; subfolders may hold results, logs and other checkpoints. A folder without a tokenizer gets
    the one that loading finds near it (`find_tokenizer`).

    Raises:
        FulldepthError: if a file cannot be read.
    """
    checkpoint = checkpoint_of(model)
    hub_name, hashes = _hash_files(checkpoint)
    folder = Path(packaged(checkpoint))
    tokenizer = find_tokenizer(folder) if folder.is_dir() else None
    if tokenizer is not None and Path(tokenizer) != folder:
        files = {file.name: file for pattern in TOKENIZER for file in _files(Path(tokenizer), pattern)}
        where = os.path.relpath(tokenizer, folder)
        hashes |= {f"{where}/{name}": sha256_of_file(file) for name, file in files.items()}
    return hub_name, hashes


def _hash_files(name: str) -> Contents:
    """Hash a local file, or the files at the top level of a local folder; any other name is a Hub name."""
    place = Path(packaged(name))
    if not place.exists():
        return name, {}
    files = [place] if place.is_file() else _files(place, "*")
    return "", {file.name: sha256_of_file(file) for file in files}


def _weights(model: Contents) -> dict[str, str]:
    """The files that hold weights."""
    return {name: digest for name, digest in model[1].items() if name.endswith(".safetensors")}


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    """The files at the top level of a folder that may affect the results, sorted by name."""
    for file in sorted(folder.glob(pattern)):
        if file.is_file() and not (file.name.startswith(".") or file.suffix in NOT_READ or file.name in RESULT_FILES):
            yield file


def _read_to_fit(data: Source | Sequences, settings: MeasureSettings) -> Any:
    """The text that the linear lens is fitted on: the hash of each file of data at that place, in subfolders, too, or
    the name where there is none; None if it is not measured.
    """
    if settings.named_measures.isdisjoint(LINEAR_LENS):
        return None
    named = getattr(data, "origin", None) if settings.fit is None else settings.fit
    if not isinstance(named, str | Path):
        return None
    place = Path(named).expanduser()
    if not place.exists():
        return str(named), {}
    files = [place] if place.is_file() else sorted(path for path in folder_files(place) if _is_data(path, place))
    return "", {str(file.relative_to(place)): sha256_of_file(file) for file in files}


def _is_data(path: Path, folder: Path) -> bool:
    """Return True for a file that is read as a part of the data in a folder."""
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in SUFFIXES and not is_hidden


def fingerprints(models: Sequence[Contents], data: Source | Sequences, settings: MeasureSettings) -> list[str]:
    """For each model, sha256 of everything that affects its results: models, data, settings, version."""
    other_contents: list[Any] = [
        settings.reference and hash_contents(settings.reference),
        settings.tokenizer and _hash_files(settings.tokenizer),
        _read_to_fit(data, settings),
    ]
    settings_read = settings.model_dump(exclude=SPEED_ONLY | {"reference", "tokenizer", "fit"})
    shared = [__version__, data.name, data.hash, other_contents, settings_read]
    return [digest([*shared, model]) for model in models]


def digest(document: Any) -> str:
    """sha256 of a document's JSON."""
    return "sha256:" + sha256_of(json.dumps(document, sort_keys=True, default=str))


STEPS = "steps"
"""Subfolder of a series' results with one result folder per checkpoint."""
TIMES = ("load", "forward", "total")
"""Entries of `timings` that are summed over a series."""
FINAL = "final"
"""Prefix of the name of a final model's result folder; its step follows."""


@dataclass(frozen=True)
class SeriesPoint:
    """One checkpoint of a series."""

    step: int
    place: Path
    name: str
    """Name of its result folder in `steps`."""
    fingerprint: str


def series_points(
    run: str | Path, data: Source | Sequences, settings: MeasureSettings
) -> tuple[list[SeriesPoint], list[str]]:
    """Every complete `checkpoint-N` of a training run and its final model, by step; and notes on what is left out.

    The final model in the run's folder is a separate point if its weights differ from those of every checkpoint and
    its `trainer_state.json` names a later step than the last checkpoint's.
    """
    steps = find_checkpoints(run)
    models = [hash_contents(place) for _, place in steps]
    names = [place.name for _, place in steps]
    left_out = incomplete_checkpoints(run)
    remarks = [] if left_out is None else [left_out]
    final = hash_contents(run) if has_weights(run) else None
    if final is not None and _weights(final) not in map(_weights, models):
        step = trained_steps(run)
        last = steps[-1][0]
        if step is not None and step > last:
            steps = [*steps, (step, Path(run))]
            models = [*models, final]
            names = [*names, f"{FINAL}-{step}"]
        else:
            reason = (
                "it has no trainer_state.json that names its step"
                if step is None
                else f"its trainer_state.json names step {step}, and the last checkpoint is of step {last}"
            )
            remarks.append(
                f"The model at the root of {run} is no point of the series: its weights are those of no checkpoint, "
                f"and {reason}. --no-series measures it alone."
            )
    prints = fingerprints(models, data, settings)
    return [SeriesPoint(n, place, name, p) for (n, place), name, p in zip(steps, names, prints, strict=True)], remarks


def extends(points: Sequence[SeriesPoint], earlier: Mapping[str, Any]) -> bool:
    """Return True if this series extends a finished one: every checkpoint measured there is among the points.

    An earlier final model may be missing, because continued training replaces it.

    Args:
        points: of this series.
        earlier: the finished series' document.
    """
    try:
        entries = [e for e in earlier["steps"] if not e["folder"].startswith(f"{FINAL}-")]
        measured = {(entry["step"], entry["fingerprint"]) for entry in entries}
    except (AttributeError, KeyError, TypeError):  # no series, or written by hand
        return False
    return bool(measured) and measured <= {(point.step, point.fingerprint) for point in points}


def measure_series(
    points: Sequence[SeriesPoint],
    folder: Path,
    measured: Callable[[Path, Watcher], Results],
    process: Processes,
    watcher: Watcher,
    *,
    overwrite: bool,
) -> Results:
    """Measure every checkpoint without results (with `overwrite`, all of them), then combine the results.

    Args:
        points: the checkpoints.
        folder: the result folder of the series.
        measured: measures one checkpoint.
        process: this process.
        watcher: receives messages.
        overwrite: measure checkpoints that have results, too.

    Raises:
        FulldepthError: if a checkpoint's folder holds results of another run, or a measurement fails.
    """
    results = [None if overwrite else _finished(folder / STEPS / point.name, point.fingerprint) for point in points]
    process.wait()
    parts: list[tuple[SeriesPoint, Results]] = []
    watcher = without_repeats(watcher)
    for number, (point, part) in enumerate(zip(points, results, strict=True), start=1):
        title = f"Checkpoint {number} of {len(points)}: step {point.step}"
        if part is None:
            watcher.say(title)
            part = measured(point.place, watcher)
            part.meta["fingerprint"] = point.fingerprint
            if process.is_main:
                part.save(folder / STEPS / point.name, page=False, overwrite=overwrite)
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
        meta = results.meta
        timings = results.meta["timings"]
        fingerprint = meta["fingerprint"]
        complete = meta["kind"] == "measure" and meta["complete"]
        stated = [meta["data"]["hash"], meta["model"], timings["measures"], *(timings[key] for key in TIMES)]
        complete = complete and None not in [*stated, *(meta[key] for key in ("headline", "left_out", "warnings"))]
    except (FulldepthError, KeyError, TypeError):
        return None
    if not complete or list(results.table.columns) != COLUMNS:
        return None
    if fingerprint != print_of_step:
        raise FulldepthError(
            f"{folder_of_step} holds results of another run (another model, other data or other settings). "
            "Choose another --output, or replace it with --overwrite."
        )
    return results


def combine(parts: Sequence[tuple[SeriesPoint, Results]]) -> Results:
    """Combine the results of checkpoints into one series: a `step` column, and the last checkpoint's headline.

    Raises:
        FulldepthError: if the checkpoints were measured on different data.
    """
    if len({part.meta["data"]["hash"] for _, part in parts}) > 1:
        raise FulldepthError("The checkpoints turned the data into different tokens; their numbers cannot be compared.")
    table = pd.concat([part.table.assign(step=point.step) for point, part in parts], ignore_index=True)
    influences = joined_influences(
        (part.meta, None if part.influences is None else part.influences.assign(step=point.step))
        for point, part in parts
    )
    last = parts[-1][1].meta
    keys = ("model", "headline", "lens_grid", "left_out", "fingerprint")
    steps = [
        {"step": point.step, "folder": point.name, **{key: part.meta[key] for key in keys}} for point, part in parts
    ]
    timings = total_times([part.meta for _, part in parts]) | {"measures": last["timings"]["measures"]}
    return Results(table, {**last, "timings": timings, "steps": steps}, influences)


def total_times(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry `timings` of several measurements, without the times of single measures."""
    return {key: round(sum(meta["timings"][key] for meta in metas), 4) for key in TIMES}
