"""Several processes under torchrun: who we are, and how what each found reaches all. One process needs none of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from fulldepth.errors import FulldepthError
from fulldepth.files import locked

T = TypeVar("T")
PATIENCE = timedelta(days=7)
"""How long a process waits for the others: a fit may take hours."""


@dataclass(frozen=True)
class Processes:
    """This process among all."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    group: Any = None
    """Where plain values are exchanged: always on CPUs (gloo)."""

    @property
    def is_main(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    def device(self, asked: str | None) -> str | None:
        """The device asked for; with several processes and accelerators, each takes its own."""
        if asked in (None, "cuda") and self.world > 1 and torch.cuda.is_available():
            return f"cuda:{self.local_rank % torch.cuda.device_count()}"
        return asked

    def gather(self, value: T) -> list[T]:
        """What every process has, in order of rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, value: T) -> T:
        """What the first process has."""
        return self.gather(value)[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """What a piece of work gives that the first process does alone; plain values.

        Raises:
            FulldepthError: in every process, if the work raises it.
        """
        found: Any = None
        said = None
        if self.is_main:
            try:
                found = work()
            except FulldepthError as error:
                if self.world == 1:
                    raise
                said = str(error)
        found, said = self.agree((found, said))
        if said is not None:
            raise FulldepthError(said)
        result: T = found
        return result

    @contextmanager
    def holding(self, folder: str | Path | None) -> Iterator[None]:
        """Hold an output folder (None: there is none) for these processes: the first one locks it.

        Raises:
            FulldepthError: in every process, if another program is writing there.
        """
        with ExitStack() as stack:
            if folder is not None:
                self.on_main(partial(stack.enter_context, locked(folder)))
            yield


@contextmanager
def processes() -> Iterator[Processes]:
    """Join the process group that torchrun describes in the environment, and leave it if we joined it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes()
        return
    joined = not distributed.is_initialized()
    if joined:
        distributed.init_process_group("gloo", timeout=PATIENCE)
    group = distributed.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield Processes(distributed.get_rank(), world, int(os.environ.get("LOCAL_RANK", "0")), group)
    finally:
        if joined:
            distributed.destroy_process_group()
