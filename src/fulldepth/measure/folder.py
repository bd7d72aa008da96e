"""Measuring into a result folder: one checkpoint or a series of them, resumable, nothing overwritten by accident."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd

from fulldepth import __version__
from fulldepth.errors import FulldepthError, one_line
from fulldepth.hf import find_checkpoints
from fulldepth.measure.processes import Processes, processes
from fulldepth.measure.run import measure_with
from fulldepth.measure.settings import MeasureSettings
from fulldepth.progress import Watcher
from fulldepth.results import COLUMNS, DOCUMENT, Results, TableMismatchError, holder

STEPS = "steps"
"""Sub-folder of a series' results with one result folder for each checkpoint."""
SPEED_ONLY = {"batch_size", "device", "device_map"}
"""Settings that change no number."""
KEPT = ("model", "headline", "lens_grid", "left_out")
"""Entries that a series keeps of every checkpoint."""
SPENT = ("load", "forward", "total")
"""Timings that a series adds up."""


def measure_into(
    model: str | Path,
    data: Any,
    output: str | Path,
    settings: MeasureSettings | None = None,
    *,
    overwrite: bool = False,
    watcher: Watcher | None = None,
) -> Results:
    """Measure a checkpoint, or every `checkpoint-N` of a training run, into a result folder.

    A run that is already there is read, not repeated; a series goes on after the last finished checkpoint; results of
    this run that were interrupted while they were written are measured again. The folder is locked meanwhile. With
    several processes, each takes its share of the data and the first one writes.

    Args:
        model: checkpoint folder, Hub name, or a folder of `checkpoint-N`.
        data: as for `measure`.
        output: the result folder; made if absent.
        settings: what to measure.
        overwrite: replace results of another run.
        watcher: told what happens.

    Raises:
        FulldepthError: if the folder holds results of another run, belongs to another command, is held by another
            process, cannot be written, or the measurement fails.
    """
    settings, watcher, folder = settings or MeasureSettings(), watcher or Watcher(), Path(output)
    checkpoints = find_checkpoints(model)
    print_of_run = fingerprint(model, data, settings)
    with processes(settings.device) as me, me.holding(folder):
        if me.first(lambda: _is_there(folder, print_of_run, overwrite, watcher)):
            watcher.say(f"{folder} already holds this measurement; nothing to do.")
            return Results.load(folder)
        me.first(lambda: _claim(folder, *([folder / STEPS] if checkpoints else [])))
        if checkpoints:
            results = _series(checkpoints, data, folder, settings, me, watcher)
        else:
            results = measure_with(model, data, settings, me, watcher)
        results.meta["fingerprint"] = print_of_run
        if me.is_main:
            results.save(folder)
        me.wait()
        return results


def fingerprint(model: str | Path, data: Any, settings: MeasureSettings) -> str:
    """sha256 of everything that decides the numbers: files (names, sizes, times), data, settings, version.

    Of models only the files at the top of their folders: results, logs and the like may live below.
    """
    folders: list[str | Path] = [folder for _, folder in find_checkpoints(model)]
    models = [_identity(place, "*") for place in (*(folders or [model]), settings.reference, settings.tokenizer)]
    what = settings.model_dump(exclude=SPEED_ONLY | {"reference", "tokenizer"})
    document = [__version__, models, _identity(data, "**/*"), what]
    return "sha256:" + hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def _identity(place: Any, pattern: str) -> tuple[str, list[tuple[str, int, int]]]:
    """A place's name, in one spelling, and name, size and time of change of its files if it is a local one."""
    if not isinstance(place, str | Path) or not Path(place).exists():
        return str(place), []
    path = Path(place).resolve()
    files = [path] if path.is_file() else sorted(p for p in path.glob(pattern) if p.is_file())
    return str(path), [(str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _is_there(folder: Path, print_of_run: str, overwrite: bool, watcher: Watcher) -> bool:
    """Whether the folder holds finished results of this very run; False if it is free.

    Raises:
        FulldepthError: if it holds results of another run, or belongs to another command.
    """
    if words := holder(folder):
        raise FulldepthError(f"{folder} holds {words}, which needs its own results there. Choose another --output.")
    if overwrite or not (folder / DOCUMENT).exists():
        return False
    try:
        meta, whole = Results.load(folder).meta, True
    except TableMismatchError as error:
        meta, whole = error.meta, False
    except FulldepthError as error:
        raise FulldepthError(f"{error} Choose another --output, or replace it with --overwrite.") from error
    if meta.get("fingerprint") == print_of_run:
        if not whole:
            watcher.say(f"{folder} was interrupted while this measurement was written; it is measured again.")
        return whole
    model, data = (one_line((meta.get(key) or {}).get("name") or "?", 200) for key in ("model", "data"))
    raise FulldepthError(
        f"{folder} holds the results of another run (model {model}, data {data}, or other settings). "
        "Choose another --output, or replace it with --overwrite."
    )


def _claim(*folders: Path) -> None:
    """Make the folders and see that they can be written, before hours of work."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise FulldepthError(f"Cannot write into {folder}: {error.strerror or error}.") from error


def _series(
    checkpoints: list[tuple[int, Path]],
    data: Any,
    folder: Path,
    settings: MeasureSettings,
    me: Processes,
    watcher: Watcher,
) -> Results:
    """Measure every checkpoint that is not measured yet, then put all together."""
    parts: list[tuple[int, Results]] = []
    for number, (step, checkpoint) in enumerate(checkpoints, start=1):
        home = folder / STEPS / checkpoint.name
        print_of_step = fingerprint(checkpoint, data, settings)
        part = _finished(home, print_of_step)
        me.wait()
        if part is None:
            watcher.say(f"Checkpoint {number} of {len(checkpoints)}: step {step}")
            part = measure_with(checkpoint, data, settings, me, watcher)
            part.meta["fingerprint"] = print_of_step
            if me.is_main:
                part.save(home)
        else:
            watcher.say(f"Checkpoint {number} of {len(checkpoints)}: step {step} is measured already")
        parts.append((step, part))
    return combine(parts)


def _finished(home: Path, print_of_step: str) -> Results | None:
    """A checkpoint's results, if they are whole and of the same run; anything else is measured anew."""
    try:
        found = Results.load(home)
    except FulldepthError:
        return None
    return found if found.meta.get("fingerprint") == print_of_step and _is_whole(found) else None


def _is_whole(found: Results) -> bool:
    """Whether results have everything that `combine` reads."""
    meta, timings = found.meta, found.meta.get("timings") or {}
    return (
        list(found.table.columns) == COLUMNS
        and meta.get("kind") == "measure"
        and all(key in meta for key in KEPT)
        and (meta.get("data") or {}).get("hash") is not None
        and all(timings.get(key) is not None for key in (*SPENT, "measures"))
    )


def combine(parts: list[tuple[int, Results]]) -> Results:
    """One series out of the results of single checkpoints: a `step` column, and the last checkpoint's headline.

    Raises:
        FulldepthError: if the checkpoints did not read the same data.
    """
    if len({part.meta["data"]["hash"] for _, part in parts}) > 1:
        raise FulldepthError("The checkpoints turned the data into different tokens; their numbers cannot be compared.")
    table = pd.concat([part.table.assign(step=step) for step, part in parts], ignore_index=True)
    last = parts[-1][1].meta
    steps = [{"step": step, **{key: part.meta[key] for key in KEPT}} for step, part in parts]
    timings: dict[str, Any] = {key: round(sum(part.meta["timings"][key] for _, part in parts), 4) for key in SPENT}
    timings["measures"] = last["timings"]["measures"]
    return Results(table, {**last, "timings": timings, "steps": steps})
