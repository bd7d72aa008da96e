"""The run folder: ownership, saved settings, and the checkpoint to resume from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from fulldepth.distributed import current
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import atomic, locked, read_json, reading
from fulldepth.hf import UNFINISHED, drop_checkpoints, sealed_checkpoints, settle_checkpoints
from fulldepth.results import DOCUMENT, PAGE, TABLE, Results
from fulldepth.settings import layer, read
from fulldepth.settings.train import TrainSettings
from fulldepth.training.resume import RunNotes, resume_notes

SETTINGS, TOKENIZER = "settings.yaml", "tokenizer"
KIND = "training"
"""`kind` in the metadata of a run's results."""
NOT_OURS = (
    *(DOCUMENT, TABLE, PAGE, "plan.json", "progress.json", "responses.json*", "config.json", "*.safetensors"),
    *("checkpoint-*", TOKENIZER, "steps", "fulldepth_skip.json"),
)
"""Patterns of files from other commands, or from runs whose settings are missing."""
MAY_DIFFER = {
    *("about", "source", "log_every", "report_to", "workers", "device", "keep_checkpoints"),
    *("eval_every", "save_every", "micro_batch_size", "fsdp"),
}
"""Settings that a resumed run may change."""


def open_run(folder: Path, settings: TrainSettings, resume: bool) -> None:
    """Check that a run may write into a folder; nothing is written.

    The folder of a run that ended before its first step counts as empty.

    Raises:
        FulldepthError: if the folder holds a run and `resume` is not set, holds a run with other settings, or any
            other file that a run would overwrite.
    """
    if not (folder / SETTINGS).exists():
        if foreign := [path.name for pattern in NOT_OURS for path in sorted(folder.glob(pattern))]:
            raise FulldepthError(f"{folder} holds {foreign[0]} of something else; choose another --output.")
    elif not _took_no_step(folder):
        if not resume:
            raise FulldepthError(f"{folder} already holds a run. Go on with it (--resume), or choose another --output.")
        _compare(folder, settings)
        _check_results(folder)


@contextmanager
def holding(folder: Path, settings: TrainSettings, resume: bool) -> Iterator[tuple[Path | None, RunNotes, list[Path]]]:
    """Lock a run folder, write the settings, and remove or rename incomplete checkpoints, in the first process.

    Args:
        folder: the run folder.
        settings: written into it.
        resume: whether the folder may already hold the run.

    Yields:
        The checkpoint to resume from, or None to start at the beginning; its notes; and checkpoints that were renamed
        because they are incomplete.

    Raises:
        FulldepthError: in every process, if the folder is in use, holds something else, cannot be written, or not all
            processes see it.
    """

    def claim() -> tuple[Path | None, RunNotes, list[Path]]:
        stack.enter_context(locked(folder))
        open_run(folder, settings, resume)  # again: another process may have written here since
        try:
            if (folder / SETTINGS).exists() and _took_no_step(folder) and saved_settings(folder) != settings:
                shutil.rmtree(folder / TOKENIZER, ignore_errors=True)  # of another size, or trained on other text
            with atomic(folder / SETTINGS) as part:
                part.write_text(dump(settings), encoding="utf-8")
            renamed = settle_checkpoints(folder)
            if settings.keep_checkpoints is not None:  # killed between a new checkpoint and the removal of an old one
                drop_checkpoints(folder, settings.keep_checkpoints)
        except OSError as error:
            raise FulldepthError(f"Cannot write into {folder}: {error.strerror or error}.") from error
        checkpoints = sealed_checkpoints(folder)
        if not checkpoints:
            return None, RunNotes(), renamed
        return checkpoints[-1][1], resume_notes(checkpoints[-1][1]), renamed

    with ExitStack() as stack:
        claimed = current().first(claim)
        if not all(current().gather((folder / SETTINGS).exists())):
            raise FulldepthError(f"Not all processes see {folder}; choose a folder on a disk that all machines share.")
        yield claimed


def _took_no_step(folder: Path) -> bool:
    """Whether the folder holds only the settings of a run, with no row beyond step 0 and no checkpoint.

    Settings in another form than that of `dump` may be a user's recipe and are never overwritten.
    """
    others = [pattern for pattern in NOT_OURS if pattern not in (TOKENIZER, DOCUMENT, TABLE, PAGE, "checkpoint-*")]
    started = [path for path in folder.glob("checkpoint-*") if not (path / UNFINISHED).exists()]
    if started or any(any(folder.glob(pattern)) for pattern in others):
        return False
    try:
        if (folder / SETTINGS).read_text(encoding="utf-8") != dump(saved_settings(folder)):
            return False
        if not (folder / DOCUMENT).exists():
            return not (folder / TABLE).exists()
        results = Results.load(folder)
    except (FulldepthError, OSError, UnicodeDecodeError):
        return False
    return results.meta.get("kind") == KIND and bool((results.table.step == 0).all())


def _check_results(folder: Path) -> None:
    """Refuse a folder with results of another command; unreadable results are written anew."""
    if not (folder / DOCUMENT).exists():
        return
    try:
        document = read_json(folder / DOCUMENT)
    except FulldepthError:
        return
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind != KIND:
        raise FulldepthError(
            f"{folder / DOCUMENT} is not of a training run, but of {one_line(repr(kind), 60)}. Move it elsewhere."
        )


def dump(settings: TrainSettings) -> str:
    """Settings as YAML from which `saved_settings` restores them."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def saved_settings(folder: Path) -> TrainSettings:
    """The settings of the run in a folder.

    Raises:
        FulldepthError: if the file cannot be read or holds no such settings; the message names the file.
    """
    path = folder / SETTINGS
    try:
        with reading(path):
            return layer(TrainSettings, read(path, "train"))
    except FulldepthError as error:
        words = "\n".join(one_line(line, 200) for line in str(error).splitlines()[:4])
        raise FulldepthError(words if str(path) in words else f"{path} holds no settings of a run. {words}") from error


def _compare(folder: Path, settings: TrainSettings) -> None:
    saved, requested = (_flat(s.model_dump(mode="json")) for s in (saved_settings(folder), settings))
    different = [
        f"{one_line(key, 60)} was {one_line(repr(saved.get(key)), 60)}, is {one_line(repr(requested.get(key)), 60)}"
        for key in sorted(saved.keys() | requested.keys())
        if saved.get(key) != requested.get(key) and key not in MAY_DIFFER and key != "data.cache"
    ]
    if different:
        raise FulldepthError(
            f"{folder} holds a run of another recipe: {'; '.join(different[:4])}"
            f"{'; ...' if len(different) > 4 else ''}. Resume it with its own settings, or choose another --output."
        )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        flat.update(inner)
    return flat
