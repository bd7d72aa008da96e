"""Resuming on several machines: the first process decides, and sends what the others cannot read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from fulldepth.errors import FulldepthError
from fulldepth.files import remove_leftovers, temporary_name
from fulldepth.losses.processes import gathered
from fulldepth.training.folder import open_run
from fulldepth.training.resume import RunNotes, resume_notes
from fulldepth.training.settings import TrainSettings

PIECE = 64 << 20
"""Bytes that are sent at once."""
RECEIVED = "received"

T = TypeVar("T")


@contextmanager
def resuming(folder: Path, settings: TrainSettings) -> Iterator[tuple[Path | None, RunNotes]]:
    """The checkpoint that a run goes on from, as the first process sees it, and its notes.

    Where a machine does not share the first one's run folder, one of its processes gets a copy of the checkpoint, which
    lies in that machine's run folder until the run ends.

    Yields:
        The checkpoint where this process can read it, None to start at the beginning; and the notes of its seal.

    Raises:
        FulldepthError: in every process, if the first one cannot go on from the folder, `fsdp` is on and not all
            processes share the folder, or a copy cannot be written.
    """
    name, notes = first_decides(lambda: _last(folder, settings))
    sharing = shares(folder)
    if settings.fsdp and not all(sharing):
        raise FulldepthError(
            f"With fsdp every process writes its part of a checkpoint into the run folder, and process "
            f"{sharing.index(False)} does not see {folder} of the first process. Choose a folder on a shared disk."
        )
    if name is None:
        yield None, notes
        return
    if all(sharing):
        yield folder / name, notes
        return
    home = temporary_name(folder / RECEIVED)
    try:
        yield _sent(folder, name, home, sharing), notes
    finally:
        shutil.rmtree(home, ignore_errors=True)


def first_decides(decide: Callable[[], T]) -> T:
    """What a function gives in the first process, in all of them.

    Raises:
        FulldepthError: in every process, if it raises one.
    """
    if not _several():
        return decide()
    answer: list[Any] = [None, None]
    if distributed.get_rank() == 0:
        try:
            answer[0] = decide()
        except FulldepthError as error:
            answer[1] = str(error)
    distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise FulldepthError(answer[1])
    result: T = answer[0]
    return result


def shares(folder: Path) -> list[bool]:
    """For every process, whether its folder of this name is the first process's."""
    if not _several():
        return [True]
    probe = [temporary_name(folder / "shared").name if distributed.get_rank() == 0 else None]
    if distributed.get_rank() == 0:
        (folder / str(probe[0])).touch()
    distributed.broadcast_object_list(probe, src=0)
    seen = gathered((folder / str(probe[0])).exists())
    if distributed.get_rank() == 0:
        (folder / str(probe[0])).unlink()
    return seen


def _last(folder: Path, settings: TrainSettings) -> tuple[str | None, RunNotes]:
    checkpoint = open_run(folder, settings, True)
    return (None, RunNotes()) if checkpoint is None else (checkpoint.name, resume_notes(checkpoint))


def _sent(folder: Path, name: str, home: Path, sharing: list[bool]) -> Path:
    """Send a checkpoint's files to one process of every machine that does not see them; where this process reads it."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    needy = gathered(not sharing[distributed.get_rank()] and local == 0)
    group = distributed.new_group([0, *[rank for rank, needs in enumerate(needy) if needs]], backend="gloo")
    said = None
    if distributed.get_rank() == 0:
        _send(folder / name, group)
    elif needy[distributed.get_rank()]:
        said = _receive(home / name, group)
    everyone = gathered((str(home.absolute() / name), said))
    if problem := next((words for _, words in everyone if words is not None), None):
        raise FulldepthError(problem)
    if sharing[distributed.get_rank()]:
        return folder / name
    return Path(everyone[distributed.get_rank() - local][0])


def _send(checkpoint: Path, group: Any) -> None:
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    table = [[(path.relative_to(checkpoint).as_posix(), path.stat().st_size) for path in files]]
    distributed.broadcast_object_list(table, src=0, group=group)
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                distributed.broadcast(torch.frombuffer(bytearray(piece), dtype=torch.uint8), src=0, group=group)


def _receive(checkpoint: Path, group: Any) -> str | None:
    """Take what `_send` sends; what went wrong, in words, after everything has been taken."""
    table: list[Any] = [None]
    distributed.broadcast_object_list(table, src=0, group=group)
    problem = None
    try:
        remove_leftovers(checkpoint.parent.parent, RECEIVED)
        checkpoint.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error
    for name, size in table[0]:
        path, left = checkpoint / name, size
        while left:
            piece = torch.empty(min(left, PIECE), dtype=torch.uint8)
            distributed.broadcast(piece, src=0, group=group)
            left -= len(piece)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(piece.numpy().tobytes())
            except OSError as error:
                problem = error
    return None if problem is None else f"Cannot write {checkpoint}: {problem.strerror or problem}."


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized()
