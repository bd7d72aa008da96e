"""Processes under torchrun: rank and world size, and exchange of values between processes.

torch.distributed is used directly. accelerate's `PartialState` lives until the program ends, sends plain values through
the accelerator's backend, and times out after minutes, while other processes may wait for a fit for hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from fulldepth.core import launch
from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import locked

T = TypeVar("T")
TIMEOUT = timedelta(days=7)
"""Timeout of process groups that `processes` creates."""


@dataclass(frozen=True)
class Processes:
    """Rank and group of this process."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    group: Any = None
    """Group for the exchange of plain values; None = the default group."""

    @property
    def is_main(self) -> bool:
        """True for the first process, which prints and writes."""
        return self.rank == 0

    def device(self, requested: str | None) -> str | None:
        """The requested device; with several processes and accelerators, this process's accelerator."""
        if requested in (None, "cuda") and self.world > 1 and torch.cuda.is_available():
            return f"cuda:{self.local_rank % torch.cuda.device_count()}"
        return requested

    def wait(self) -> None:
        """Wait until all processes call this."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in order of rank. Every process must call this."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, value: T) -> T:
        """The value of the first process. Every process must call this."""
        return self.gather(value)[0]

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` in the first process only and return its (plain) result in every process.

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
        """Lock an output folder for these processes; None locks nothing.

        Raises:
            FulldepthError: in every process, if another program is writing there.
        """
        with ExitStack() as stack:
            if folder is not None:
                self.first(lambda: stack.enter_context(locked(folder)))
            yield


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Join the process group that torchrun describes in the environment, and leave it if we joined it.

    Args:
        device: device of tensors; None = cuda if there is one, else the CPU.
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
        distributed.init_process_group("nccl" if on_cuda else "gloo", timeout=TIMEOUT)
    group = distributed.new_group(backend="gloo", timeout=TIMEOUT)
    try:
        yield Processes(distributed.get_rank(), world, launch.local_rank(), group)
    finally:
        if joins:
            distributed.destroy_process_group()


def current() -> Processes:
    """Return rank and group of this process in the default process group; a single process if there is no group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return Processes()
    return Processes(distributed.get_rank(), distributed.get_world_size(), launch.local_rank())


def add_up(tensor: Tensor) -> None:
    """Sum a tensor over processes in place; complex tensors are sent as pairs of real numbers."""
    if current().world > 1:
        distributed.all_reduce(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


def any_process(flags: Tensor) -> Tensor:
    """Element-wise maximum of flags over processes, without waiting for the device."""
    if current().world > 1:
        flags = flags.clone()
        distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    return flags


def sum_over_processes(value: Tensor) -> Tensor:
    """The sum of a tensor over processes, with gradients; with one process `value` itself.

    The gradient of each process's `value` is the sum of the gradients of all processes' results. A loss that every
    process computes from the sum therefore counts once per process, and once in total under data parallelism, which
    averages gradients over processes.
    """
    if current().world == 1:
        return value
    total: Tensor = _Sum.apply(value)
    return total


class _Sum(torch.autograd.Function):
    """All-reduce whose backward pass is also an all-reduce."""

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
