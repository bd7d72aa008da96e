"""Several processes under torchrun: who we are, and how what each found reaches all. One process needs none of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

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
