"""Resuming on several machines: the first process chooses the checkpoint and sends it to machines without access."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from fulldepth.distributed import current
from fulldepth.errors import FulldepthError
from fulldepth.files import remove_leftovers, temporary_name
from fulldepth.training.folder import open_run
from fulldepth.training.resume import RunNotes, resume_notes
from fulldepth.training.settings import TrainSettings

PIECE = 64 << 20
"""Bytes per broadcast."""
RECEIVED = "received"


@contextmanager
def resuming(folder: Path, settings: TrainSettings) -> Iterator[tuple[Path | None, RunNotes]]:
    """The checkpoint to resume from, chosen by the first process, and its notes.

    On a machine that does not share the first one's run folder, one process receives a copy of the checkpoint into that
    machine's run folder; it is removed when the run ends.

    Yields:
        Path of the checkpoint readable by this process, or None to start at the beginning; and the notes of its seal.

    Raises:
        FulldepthError: in every process, if the first one cannot resume from the folder, `fsdp` is on and not all
            processes share the folder, or a copy cannot be written.
    """
    name, notes = current().first(lambda: _last(folder, settings))
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
    copy = temporary_name(folder / RECEIVED)
    try:
        yield _sent(folder, name, copy, sharing), notes
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def shares(folder: Path) -> list[bool]:
    """For every process, whether its `folder` is the same folder as the first process's."""
    process = current()
    probe = folder / process.agree(temporary_name(folder / "shared").name)
    if process.world > 1 and process.is_main:
        probe.touch()
    process.wait()
    sees_probe = process.gather(process.world == 1 or probe.exists())
    if process.world > 1 and process.is_main:
        probe.unlink()
    return sees_probe


def _last(folder: Path, settings: TrainSettings) -> tuple[str | None, RunNotes]:
    checkpoint = open_run(folder, settings, True)
    return (None, RunNotes()) if checkpoint is None else (checkpoint.name, resume_notes(checkpoint))


def _sent(folder: Path, name: str, copy: Path, sharing: list[bool]) -> Path:
    """Send a checkpoint to one process of every machine without access; the path at which this process reads it."""
    process = current()
    needy = process.gather(not sharing[process.rank] and process.local_rank == 0)
    group = distributed.new_group([0, *[rank for rank, needs in enumerate(needy) if needs]], backend="gloo")
    problem = None
    if process.is_main:
        _send(folder / name, group)
    elif needy[process.rank]:
        problem = _receive(copy / name, group)
    everyone = process.gather((str(copy.absolute() / name), problem))
    if problem := next((text for _, text in everyone if text is not None), None):
        raise FulldepthError(problem)
    if sharing[process.rank]:
        return folder / name
    return Path(everyone[process.rank - process.local_rank][0])


def _send(checkpoint: Path, group: Any) -> None:
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    table = [[(path.relative_to(checkpoint).as_posix(), path.stat().st_size) for path in files]]
    distributed.broadcast_object_list(table, src=0, group=group)
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                distributed.broadcast(torch.frombuffer(bytearray(piece), dtype=torch.uint8), src=0, group=group)


def _receive(checkpoint: Path, group: Any) -> str | None:
    """Receive everything that `_send` sends; the error message, or None."""
    table: list[Any] = [None]
    distributed.broadcast_object_list(table, src=0, group=group)
    problem = None
    try:
        remove_leftovers(checkpoint.parent.parent, RECEIVED)
        checkpoint.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error
    for name, size in table[0]:
        path, remaining = checkpoint / name, size
        while remaining:
            piece = torch.empty(min(remaining, PIECE), dtype=torch.uint8)
            distributed.broadcast(piece, src=0, group=group)
            remaining -= len(piece)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(piece.numpy().tobytes())
            except OSError as error:
                problem = error
    return None if problem is None else f"Cannot write {checkpoint}: {problem.strerror or problem}."
