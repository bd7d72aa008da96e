"""Checkpoints of a training run: lists, seals and removes them, and tells complete ones from unfinished ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pydantic
from pydantic import JsonValue, NonNegativeInt
from safetensors import safe_open

from fulldepth.core.errors import FulldepthError, names_of
from fulldepth.core.files import atomic, read_document, read_json, reading, sha256_of_file, temporary_name
from fulldepth.hf.families import SKIPPED

SEAL = "complete.json"
"""The file that is written last into a checkpoint: sizes and hashes of its files, and notes of the run."""
NAMED = 4
"""Most checkpoints that a message names."""
UNFINISHED = "unfinished"
"""The file that is written first into a checkpoint, and removed after the seal is written."""


class SealDocument(pydantic.BaseModel):
    """The entries of `complete.json`."""

    files: dict[str, NonNegativeInt]
    """Path inside the checkpoint -> bytes."""
    hashes: dict[str, str] = {}
    """Path -> SHA-256; absent in older runs."""
    notes: dict[str, JsonValue]

    @pydantic.model_validator(mode="after")
    def _hashes_are_of_the_files(self) -> SealDocument:
        if self.hashes and self.hashes.keys() != self.files.keys():  # any other path may lead to a pipe or a device
            raise ValueError("hashes and files name different files")
        return self


def find_checkpoints(run: str | Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every complete `checkpoint-N` in a run's folder, by step; empty for a single checkpoint.

    If no checkpoint has a seal, as in runs of other programs, every one with a configuration counts as complete. A
    final model at the root of the folder is not included.
    """
    candidates = [(step, path) for step, path in _numbered(Path(run)) if (path / "config.json").is_file()]
    sealed = any((path / SEAL).exists() for _, path in candidates)
    return sorted((step, path) for step, path in candidates if not sealed or is_sealed(path))


def incomplete_checkpoints(run: str | Path) -> str | None:
    """Return a sentence that names the checkpoints of a run that `find_checkpoints` leaves out; None if it has all."""
    complete = {path for _, path in find_checkpoints(run)}
    names = [path.name for _, path in sorted(_numbered(Path(run))) if path not in complete]
    if not names:
        return None
    which = names_of(names[-NAMED:])
    verb = "is" if len(names) == 1 else "are"
    more = f" and {len(names) - NAMED} before" if len(names) > NAMED else ""
    return f"{which}{more} in {run} {verb} left out: still being written, interrupted, or damaged."


def sealed_checkpoints(run: str | Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every sealed checkpoint of a run, by step."""
    return sorted((step, path) for step, path in _numbered(Path(run)) if is_sealed(path))


def checkpoint_of(name: str | Path) -> str:
    """Return the last complete checkpoint of a run's folder without a final model; any other name unchanged."""
    checkpoints = [] if (Path(name) / "config.json").is_file() else find_checkpoints(name)
    return str(checkpoints[-1][1]) if checkpoints else str(name)


def has_weights(checkpoint: str | Path) -> bool:
    """Return True if a folder holds a model: a configuration and safetensors."""
    folder = Path(checkpoint)
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def needs_own_class(model: Any, checkpoint: str | Path) -> bool:
    """Return True if only the model's class reads a checkpoint, and not the Trainer, which takes the files as they are.

    That is the case for a class without skipped parts, whose `layer_types` the Trainer's general configuration refuses,
    and if the files lack the name of a weight, because transformers renames it when saving.
    """
    if str(model.config.model_type).startswith(SKIPPED):
        return True
    stored: set[str] = set()
    for path in Path(checkpoint).glob("*.safetensors"):
        with reading(path), safe_open(path, framework="pt") as file:
            stored |= set(file.keys())
    names: dict[int, set[str]] = {}  # a tied weight has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return not all(group & stored for group in names.values())


def trained_steps(checkpoint: str | Path) -> int | None:
    """Return the optimiser step in a model's `trainer_state.json`; None if there is none."""
    try:
        state = read_json(Path(checkpoint) / "trainer_state.json", allow_constants=True)  # a logged loss may be NaN
    except FulldepthError:
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def begin_checkpoint(checkpoint: str | Path) -> None:
    """Create a checkpoint's folder and mark it as unfinished, before anything else is written into it."""
    folder = Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()


def seal(checkpoint: str | Path, notes: dict[str, Any] | None = None) -> None:
    """Mark a checkpoint as complete, with sizes and hashes of its files.

    Args:
        checkpoint: the folder.
        notes: entries that the run can read again with `notes_of`.
    """
    folder = Path(checkpoint)
    sizes = _sizes(folder)
    hashes = {name: sha256_of_file(folder / name) for name in sizes}
    document = {"files": sizes, "hashes": hashes, "notes": notes or {}}
    with atomic(folder / SEAL) as part:
        part.write_text(json.dumps(document, indent=1), encoding="utf-8")
    (folder / UNFINISHED).unlink(missing_ok=True)


def is_sealed(checkpoint: str | Path) -> bool:
    """Return True if a checkpoint has a seal and every file has the size stated there."""
    folder = Path(checkpoint)
    try:
        expected = read_document(folder / SEAL, SealDocument).files
    except FulldepthError:
        return False
    sizes = _sizes(folder)
    return all(sizes.get(name) == size for name, size in expected.items())


def notes_of(checkpoint: str | Path) -> dict[str, Any]:
    """Return the run's notes in the seal.

    Raises:
        FulldepthError: if the seal cannot be read, or a file has changed since.
    """
    folder = Path(checkpoint)
    document = read_document(folder / SEAL, SealDocument)
    for name, expected in document.hashes.items():
        if sha256_of_file(folder / name) != expected:
            raise FulldepthError(f"Cannot read {folder / name}: it has changed since the checkpoint was written.")
    return dict(document.notes)


def settle_checkpoints(run: str | Path) -> list[Path]:
    """Remove or rename the incomplete checkpoints of an interrupted run, before it resumes.

    A checkpoint that is newer than every sealed one, and is empty or marked as unfinished, is removed. Any other
    `checkpoint-N` without a valid seal may belong to another program and is renamed to `unsealed-checkpoint-N`
    (transformers treats every name that starts with `checkpoint-N` as a checkpoint).

    Returns:
        The new paths of renamed checkpoints.

    Raises:
        OSError: if something cannot be removed or renamed.
    """
    folder = Path(run)
    renamed = []
    sealed = sealed_checkpoints(folder)
    for _, path in sealed:
        (path / UNFINISHED).unlink(missing_ok=True)  # the run was killed before the mark was removed
    last = sealed[-1][0] if sealed else -1
    complete = {path for _, path in sealed}
    for step, path in _numbered(folder):
        if path in complete:
            continue
        unfinished = not path.is_symlink() and ((path / UNFINISHED).exists() or not any(path.iterdir()))
        if unfinished and step > last:
            shutil.rmtree(path)
        else:
            free = folder / f"unsealed-{path.name}"
            number = 1
            while free.exists() or free.is_symlink():
                number += 1
                free = folder / f"unsealed-{path.name}-{number}"
            renamed.append(path.rename(free))
    return renamed


def drop_checkpoints(run: str | Path, keep: int) -> None:
    """Remove all but the last `keep` sealed checkpoints; each is renamed first, so that none is left incomplete."""
    for _, path in sealed_checkpoints(run)[:-keep]:
        removed = path.rename(temporary_name(path))
        shutil.rmtree(removed, ignore_errors=True)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every `checkpoint-N` in a folder, complete or not."""
    if not folder.is_dir():
        return []
    matches = [(re.fullmatch(r"checkpoint-(\d{1,12})", child.name), child) for child in folder.iterdir()]
    for match, child in matches:
        if match and child.is_symlink() and not child.exists():
            raise FulldepthError(
                f"Cannot read {child}: the link points to nothing. Restore the checkpoint, or remove the link."
            )
    return [(int(match[1]), child) for match, child in matches if match and child.is_dir()]


def _sizes(folder: Path) -> dict[str, int]:
    """Path inside the folder -> bytes, without seal and mark."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in (SEAL, UNFINISHED))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
