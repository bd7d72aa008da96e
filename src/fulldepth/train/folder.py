"""The run folder: whose it is, what is whole in it, what a resumed run goes on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from fulldepth.errors import FulldepthError
from fulldepth.files import atomic
from fulldepth.hf import half_written, sealed_checkpoints
from fulldepth.recipes import layer, read
from fulldepth.train.settings import TrainSettings

SETTINGS, TOKENIZER, TOKENS = "settings.yaml", "tokenizer", "tokens"
MAY_DIFFER = {
    *("about", "source", "log_every", "report_to", "workers", "device", "keep_checkpoints"),
    *("eval_every", "save_every", "micro_batch_size"),
}
"""Settings that a resumed run may change."""


def open_run(folder: Path, settings: TrainSettings, resume: bool) -> Path | None:
    """Claim a run folder; the checkpoint to go on from, or None to start at the beginning.

    Raises:
        FulldepthError: if the folder holds a run and `resume` is not set, holds a run of other settings, or cannot be
            written.
    """
    if (folder / SETTINGS).exists():
        if not resume:
            raise FulldepthError(f"{folder} already holds a run. Go on with it (--resume), or choose another --output.")
        _compare(folder, settings)
        found = sealed_checkpoints(folder)
        return found[-1][1] if found else None
    if folder.is_dir() and any(folder.glob("checkpoint-*")):
        raise FulldepthError(f"{folder} holds checkpoints of something else; choose another --output.")
    return None


def claim(folder: Path, settings: TrainSettings) -> None:
    """Write the resolved settings into the folder, and clear away checkpoints that were interrupted (one process).

    Raises:
        FulldepthError: if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / SETTINGS) as part:
            part.write_text(dump(settings), encoding="utf-8")
        for path in half_written(folder):
            shutil.rmtree(path)
    except OSError as error:
        raise FulldepthError(f"Cannot write into {folder}: {error.strerror or error}.") from error


def dump(settings: TrainSettings) -> str:
    """Settings as YAML that reads back to the same."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def saved_settings(folder: Path) -> TrainSettings:
    """The settings of the run in a folder."""
    return layer(TrainSettings, read(folder / SETTINGS, "train"))


def _compare(folder: Path, settings: TrainSettings) -> None:
    before, now = (_flat(s.model_dump(mode="json")) for s in (saved_settings(folder), settings))
    different = [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in MAY_DIFFER and key != "data.cache"
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
