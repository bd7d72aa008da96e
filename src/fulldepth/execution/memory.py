"""Memory of weights and caches, and peak memory of a run, in bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache

CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
"""Linux: where the peak of the resident size is reset, and where it is read."""


def reset_peak() -> None:
    """Begin to measure the peak memory of a run, see `run_peak`."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # the kernel forgets the peak of the resident size so far
        CLEAR.write_text("5")


def run_peak(device: torch.device | None = None) -> int:
    """Peak memory since `reset_peak`, in bytes: allocated on the accelerator, else resident in the process.

    Where the kernel keeps no peak that can be reset (outside Linux), the present resident size is returned.
    """
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def peak_bytes(model: nn.Module, inputs: Tensor, run: Callable[[], Any]) -> int:
    """Bytes of a model's weights plus the peak of other memory during a run.

    On CUDA, from the allocator's statistics. Elsewhere, tensors returned by operations are counted while alive;
    temporary memory inside an operation is not. (The resident size of a process only grows, so it cannot be attributed
    to one of several models.)

    Args:
        model: the model.
        inputs: its inputs, on its device; not counted.
        run: runs the model.
    """
    device = inputs.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return int(torch.cuda.max_memory_allocated(device)) - before + resident_bytes(model)
    with AllocationTracker([*model.parameters(), *model.buffers(), inputs]) as tracker:
        run()
    return tracker.peak + resident_bytes(model)


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of living tensors that operations have returned.

    Args:
        existing: tensors allocated before, which are not counted.
    """

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages = {part.untyped_storage()._cdata for tensor in existing for part in _plain(tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            for part in _plain(tensor) if isinstance(tensor, Tensor) else ():
                storage = part.untyped_storage()
                key = storage._cdata
                size = storage.nbytes()
                if key not in self._storages and storage.device.type != "meta":
                    self._storages.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._forget, key, size)
        return output

    def _forget(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.now -= size


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all weights in a checkpoint; tied weights count once, quantised ones at their stored size."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)}
    return sum(part.nbytes for tensor in tensors.values() for part in _plain(tensor))


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, including buffers that checkpoints omit."""
    return sum(part.nbytes for tensor in (*model.parameters(), *model.buffers()) for part in _plain(tensor))


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values in a cache; entries without them count as 0."""
    states = (getattr(entry, name, None) for entry in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in states if isinstance(tensor, Tensor))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or the tensors inside a wrapper (quantised weights)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))
