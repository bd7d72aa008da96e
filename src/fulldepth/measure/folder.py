"""Measuring into a result folder: one checkpoint or a series of them, resumable, nothing overwritten by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulldepth.data import Sequences, open_source
from fulldepth.errors import FulldepthError
from fulldepth.hf import find_checkpoints
from fulldepth.measure.fingerprint import contents, digest, fingerprints
from fulldepth.measure.processes import processes
from fulldepth.measure.run import measure_with
from fulldepth.measure.series import Point, extends, measure_series, series_points
from fulldepth.measure.settings import MeasureSettings
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, Results


def measure_into(
    model: str | Path,
    data: Any,
    output: str | Path,
    settings: MeasureSettings | None = None,
    *,
    overwrite: bool = False,
    series: bool = True,
    watcher: Watcher | None = None,
) -> Results:
    """Measure a checkpoint, or every `checkpoint-N` of a training run, into a result folder.

    A run that is already there is read, not repeated: the same model, data and settings, whose contents are compared,
    not their names or times. A series that was interrupted goes on after its last finished checkpoint, and one whose
    training went on is extended by the new checkpoints. With several processes, each takes its share of the data and
    the first one writes.

    Args:
        model: checkpoint folder, Hub name, or a folder of `checkpoint-N`. A final model at the root of such a folder is
            the last point of the series, if its `trainer_state.json` says which step it is.
        data: as for `measure`.
        output: the result folder; made if absent.
        settings: what to measure.
        overwrite: measure everything anew, and replace whatever results are there.
        series: False = of a folder that holds checkpoints and a model, measure the model alone.
        watcher: told what happens.

    Raises:
        FulldepthError: if the folder holds results of another run, cannot be written, or the measurement fails.
    """
    settings, watcher, folder = settings or MeasureSettings(), watcher or Watcher(), Path(output)
    with processes(settings.device) as me:
        read = data if isinstance(data, Sequences) else open_source(data, split=settings.split)
        points, remarks = series_points(model, read, settings) if series and find_checkpoints(model) else ([], [])
        prints = [point.fingerprint for point in points] or fingerprints([contents(model)], read, settings)
        print_of_run = digest(prints)
        for remark in remarks:
            watcher.say(remark)
        done = None if overwrite else _existing(folder, print_of_run, points)
        me.wait()
        if done is not None:
            watcher.say(f"{folder} already holds this measurement; nothing to do.")
            return done
        if me.is_main:
            _claim(folder)
        if points:
            results = measure_series(points, read, folder, settings, me, watcher, overwrite=overwrite)
            results.meta["warnings"] = [*results.meta["warnings"], *remarks]
        else:
            results = measure_with(model, read, settings, me, watcher)
        results.meta["fingerprint"] = print_of_run
        if me.is_main:
            results.save(folder)
        me.wait()
        return results


def _existing(folder: Path, print_of_run: str, points: list[Point]) -> Results | None:
    """Finished results of this very run; None if the folder is free, or holds a part of this series.

    Raises:
        FulldepthError: if it holds results of another run.
    """
    if not (folder / DOCUMENT).exists():
        return None
    found = Results.load(folder)
    if found.meta.get("fingerprint") == print_of_run:
        return found
    if extends(points, found.meta):
        return None
    model, data = (found.meta.get(key, {}).get("name", "?") for key in ("model", "data"))
    raise FulldepthError(
        f"{folder} holds the results of another run (model {model}, data {data}), or the contents of its model or data "
        "or the settings were others. "
        "Choose another --output, or replace it with --overwrite."
    )


def _claim(folder: Path) -> None:
    """Make the folder and see that it can be written, before hours of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FulldepthError(f"Cannot write into {folder}: {error.strerror or error}.") from error
