"""Checkpoints of a training run: which there are, and which were written to the end."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pydantic
from pydantic import JsonValue, NonNegativeInt

from fulldepth.errors import FulldepthError
from fulldepth.files import atomic, read_document, read_json, temporary_name

SEAL = "complete.json"
"""Written last into a checkpoint, by us: sizes of its files, and what a run wants to remember."""
UNFINISHED = "unfinished"
"""Written first into a checkpoint, by us, and removed once the seal is there."""


class SealDocument(pydantic.BaseModel):
    """The entries of `complete.json`."""

    files: dict[str, NonNegativeInt]
    """Path inside the checkpoint -> bytes."""
    notes: dict[str, JsonValue]


def find_checkpoints(run: str | Path) -> list[tuple[int, Path]]:
    """(step, folder) of every whole `checkpoint-N` in a training run's folder, by step; empty for a single checkpoint.

    A checkpoint of another program carries no seal and counts as whole if it has a configuration. A final model at the
    root of the folder is none of them.
    """
    found = [(step, path) for step, path in _numbered(Path(run)) if (path / "config.json").is_file()]
    ours = any((path / SEAL).exists() for _, path in found)
    return sorted((step, path) for step, path in found if not ours or is_sealed(path))


def sealed_checkpoints(run: str | Path) -> list[tuple[int, Path]]:
    """(step, folder) of every whole checkpoint of one of our runs, by step."""
    return sorted((step, path) for step, path in _numbered(Path(run)) if is_sealed(path))


def checkpoint_of(name: str | Path) -> str:
    """A checkpoint's own name; for the folder of a training run, its final model if it has one, else its last whole
    checkpoint.
    """
    found = [] if (Path(name) / "config.json").is_file() else find_checkpoints(name)
    return str(found[-1][1]) if found else str(name)


def has_weights(checkpoint: str | Path) -> bool:
    """Whether a folder holds a model: a configuration and safetensors."""
    folder = Path(checkpoint)
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def trained_steps(checkpoint: str | Path) -> int | None:
    """The optimiser step that the Trainer noted beside a model (`trainer_state.json`); None where it does not say."""
    try:
        state = read_json(Path(checkpoint) / "trainer_state.json", allow_constants=True)  # a logged loss may be NaN
    except FulldepthError:
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def begin_checkpoint(checkpoint: str | Path) -> None:
    """Make a checkpoint's folder and mark it as unfinished, before anything else is written into it."""
    folder = Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()


def seal(checkpoint: str | Path, notes: dict[str, Any] | None = None, *, without: str | None = None) -> None:
    """Mark a checkpoint as whole: its files are all there, with these sizes.

    Args:
        checkpoint: the folder.
        notes: what a run wants to remember.
        without: a folder inside that will be removed.
    """
    folder = Path(checkpoint)
    sizes = {
        name: size for name, size in _sizes(folder).items() if without is None or not name.startswith(f"{without}/")
    }
    document = {"files": sizes, "notes": notes or {}}
    with atomic(folder / SEAL) as part:
        part.write_text(json.dumps(document, indent=1), encoding="utf-8")
    (folder / UNFINISHED).unlink(missing_ok=True)


def is_sealed(checkpoint: str | Path) -> bool:
    """Whether a checkpoint carries a seal, and every file still has the size that it names."""
    folder = Path(checkpoint)
    try:
        expected = read_document(folder / SEAL, SealDocument).files
    except FulldepthError:
        return False
    sizes = _sizes(folder)
    return all(sizes.get(name) == size for name, size in expected.items())


def notes_of(checkpoint: str | Path) -> dict[str, Any]:
    """What the run noted in the seal.

    Raises:
        FulldepthError: if the seal cannot be read.
    """
    return dict(read_document(Path(checkpoint) / SEAL, SealDocument).notes)


def settle_checkpoints(run: str | Path) -> list[Path]:
    """Clear away what a killed run left half-written, before the run goes on.

    Removed is a checkpoint that is newer than every whole one and either carries our mark or is empty. Anything else
    without a valid seal is not known to be ours: `checkpoint-N` is renamed to `unsealed-checkpoint-N` (transformers
    takes every name that starts with `checkpoint-N` for a checkpoint), so that the run can write its own.

    Returns:
        The new names.

    Raises:
        OSError: if something cannot be removed or renamed.
    """
    folder, renamed = Path(run), []
    whole = sealed_checkpoints(folder)
    for _, path in whole:
        (path / UNFINISHED).unlink(missing_ok=True)  # killed between the seal and this
    last, done = (whole[-1][0] if whole else -1), {path for _, path in whole}
    for step, path in _numbered(folder):
        if path in done:
            continue
        ours = not path.is_symlink() and ((path / UNFINISHED).exists() or not any(path.iterdir()))
        if ours and step > last:
            shutil.rmtree(path)
        else:
            renamed.append(path.rename(_free(folder / f"unsealed-{path.name}")))
    return renamed


def drop_checkpoints(run: str | Path, keep: int) -> None:
    """Remove all but the last `keep` whole checkpoints; a kill in between leaves none that is half there."""
    for _, path in sealed_checkpoints(run)[:-keep]:
        removed = path.rename(temporary_name(path))
        shutil.rmtree(removed, ignore_errors=True)


def _free(path: Path) -> Path:
    """The path, or the first with a number after it that nothing has."""
    number, free = 1, path
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(re.fullmatch(r"checkpoint-(\d{1,12})", child.name), child) for child in folder.iterdir()]
    return [(int(match[1]), child) for match, child in matches if match and child.is_dir()]


def _sizes(folder: Path) -> dict[str, int]:
    """Path inside the folder -> bytes, without our own marks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in (SEAL, UNFINISHED))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
