"""Several processes under torchrun: who we are, and one door in and out. One process needs none of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from fulldepth.errors import FulldepthError
from fulldepth.files import locked

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among all."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    def device(self, asked: str | None) -> str | None:
        """The device asked for; with several processes and accelerators, each takes its own."""
        if asked in (None, "cuda") and self.world > 1 and torch.cuda.is_available():
            return f"cuda:{self.local_rank % torch.cuda.device_count()}"
        return asked

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            distributed.barrier()

    def first(self, action: Callable[[], T]) -> T:
        """What `action` gives on the first process, on every process.

        Raises:
            FulldepthError: on every process, if it raises one on the first.
        """
        found: list[Any] = [None, None]
        if self.is_main:
            try:
                found[0] = action()
            except FulldepthError as error:
                if self.world == 1:
                    raise
                found[1] = str(error)
        if self.world > 1:
            distributed.broadcast_object_list(found)
        if found[1] is not None:
            raise FulldepthError(found[1])
        return found[0]

    @contextmanager
    def holding(self, folder: Path) -> Iterator[None]:
        """The folder, locked by the first process for as long as all of them work.

        Raises:
            FulldepthError: on every process, if another command holds it or it cannot be written.
        """
        with ExitStack() as stack:
            self.first(lambda: stack.enter_context(locked(folder)))
            yield


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Join the process group that torchrun describes in the environment, and leave it if we joined it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes()
        return
    me = Processes(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", "0")))
    if distributed.is_initialized():
        yield me
        return
    on_cuda = torch.cuda.is_available() and not (device or "cuda").startswith("cpu")
    if on_cuda:
        torch.cuda.set_device(me.local_rank % torch.cuda.device_count())
    distributed.init_process_group("nccl" if on_cuda else "gloo")
    try:
        yield me
    finally:
        distributed.destroy_process_group()
