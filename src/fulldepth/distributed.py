"""Several processes under torchrun: who this one is, and how values reach all of them.

torch.distributed is used directly rather than accelerate's `PartialState`: that one lives until the program ends, sends
plain values through the accelerator's backend, and gives up after minutes, where a fit may keep the others waiting for
hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from fulldepth import launch
from fulldepth.errors import FulldepthError
from fulldepth.files import locked

T = TypeVar("T")
PATIENCE = timedelta(days=7)
"""How long a process waits for the others where it joined them by itself."""


@dataclass(frozen=True)
class Processes:
    """This process among all."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    group: Any = None
    """Where plain values are exchanged; None = the default group."""

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
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """What every process has, in order of rank. Every process must call this."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, value: T) -> T:
        """What the first process has."""
        return self.gather(value)[0]

    def first(self, action: Callable[[], T]) -> T:
        """What `action` gives in the first process, which alone runs it, in all of them; plain values.

        Raises:
            FulldepthError: in every process, if the action raises it.
        """
        if self.world == 1:
            return action()
        result: Any = None
        message = None
        if self.is_main:
            try:
                result = action()
            except FulldepthError as error:
                message = str(error)
        result, message = self.agree((result, message))
        if message is not None:
            raise FulldepthError(message)
        agreed: T = result
        return agreed

    @contextmanager
    def holding(self, folder: str | Path | None) -> Iterator[None]:
        """Hold an output folder (None: there is none) for these processes: the first one locks it.

        Raises:
            FulldepthError: in every process, if another program is writing there.
        """
        with ExitStack() as stack:
            if folder is not None:
                self.first(partial(_hold, stack, folder))
            yield


def _hold(stack: ExitStack, folder: str | Path) -> None:
    stack.enter_context(locked(folder))


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Join the process group that torchrun describes in the environment, and leave it if we joined it.

    Args:
        device: where tensors are; None = the first accelerator, else the CPU.
    """
    world = launch.world()
    if world == 1:
        yield Processes()
        return
    joins = not distributed.is_initialized()
    if joins:
        on_cuda = torch.cuda.is_available() and not (device or "cuda").startswith("cpu")
        if on_cuda:
            torch.cuda.set_device(launch.local_rank() % torch.cuda.device_count())
        distributed.init_process_group("nccl" if on_cuda else "gloo", timeout=PATIENCE)
    group = distributed.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield Processes(distributed.get_rank(), world, launch.local_rank(), group)
    finally:
        if joins:
            distributed.destroy_process_group()


def current() -> Processes:
    """This process in the group that it has joined, for example by training; a single one if it has joined none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return Processes()
    return Processes(distributed.get_rank(), distributed.get_world_size(), launch.local_rank())


def cpu_group() -> Any:
    """A new group of all processes that talk through the CPU; None for a process that has joined no others."""
    return (
        distributed.new_group(backend="gloo") if distributed.is_available() and distributed.is_initialized() else None
    )


def add_up(tensor: Tensor) -> None:
    """Put the sum of every process's tensor in its place; complex numbers travel as pairs of real ones."""
    if current().world > 1:
        distributed.all_reduce(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


def any_process(flags: Tensor) -> Tensor:
    """The largest of every process's flags, without waiting for the device."""
    if current().world > 1:
        flags = flags.clone()
        distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    return flags


def sum_over_processes(value: Tensor) -> Tensor:
    """The sum of every process's tensor, `value` itself if there is only one process; gradients flow through it.

    The gradient of each process's `value` is the sum of the gradients of all processes' results. A loss that every
    process computes from the sum thus counts once for each process, and data parallelism, which averages gradients
    over the processes, makes it count once in all.
    """
    if current().world == 1:
        return value
    total: Tensor = _Sum.apply(value)
    return total


class _Sum(torch.autograd.Function):
    """All-reduce, whose own backward is an all-reduce."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.contiguous().clone()
        add_up(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        add_up(total)
        return total
