"""Checkpoints of a training run: which there are, and which were written to the end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from fulldepth.errors import FulldepthError
from fulldepth.files import read_json

SEAL = "complete.json"
"""Written last into a checkpoint, by us: sizes of its files, and what a run wants to remember."""


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


def half_written(run: str | Path) -> list[Path]:
    """Checkpoints of one of our runs that were interrupted while they were written."""
    return sorted(path for _, path in _numbered(Path(run)) if not is_sealed(path))


def seal(checkpoint: str | Path, notes: dict[str, Any] | None = None) -> None:
    """Mark a checkpoint as whole: its files are all there, with these sizes."""
    folder = Path(checkpoint)
    document = {"files": _sizes(folder), "notes": notes or {}}
    part = folder / f".{SEAL}.part"
    part.write_text(json.dumps(document, indent=1), encoding="utf-8")
    os.replace(part, folder / SEAL)


def is_sealed(checkpoint: str | Path) -> bool:
    """Whether a checkpoint carries a seal, and every file still has the size that it names."""
    folder = Path(checkpoint)
    try:
        expected = json.loads((folder / SEAL).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    sizes = _sizes(folder)
    return all(sizes.get(name) == size for name, size in expected.items())


def notes_of(checkpoint: str | Path) -> dict[str, Any]:
    """What the run noted in the seal."""
    return dict(json.loads((Path(checkpoint) / SEAL).read_text(encoding="utf-8"))["notes"])


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(re.fullmatch(r"checkpoint-(\d+)", child.name), child) for child in folder.iterdir()]
    return [(int(match[1]), child) for match, child in matches if match and child.is_dir()]


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in (SEAL, f".{SEAL}.part"))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
