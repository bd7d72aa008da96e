"""Several processes under torchrun: who we are, and one door in and out. One process needs none of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed


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
