"""One model at work: seconds of prefill and of a decoding step, bytes of weights, cache and everything that lives."""

from __future__ import annotations

import gc
import inspect
import platform
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

PHASES = ("prefill", "decode")


class Trial(NamedTuple):
    """What one run of prompt and decoding took."""

    prefill: float
    """Seconds for the prompt."""
    decode: float
    """Seconds for one token after it, the mean over all steps."""
    cache: Any
    """What the model kept of all tokens."""
    logits: Tensor
    """[B, V] of the last step."""


def machine(device: torch.device) -> dict[str, Any]:
    """What times are taken on: the device, the name of the GPU or processor, and the threads that torch uses."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": str(device), "name": name, "threads": torch.get_num_threads()}


class Runner:
    """Runs a decoder as a server does: the prompt at once, then one token at a time with a growing cache.

    The tokens are given, so that every model does the same work. Only the last position's logits are made, where the
    model can be asked for that.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        names = inspect.signature(type(model).forward).parameters
        self.model = model
        self.last_only = "logits_to_keep" in names
        """Whether the head runs at one position of a prompt."""
        self._places = "position_ids" in names
        self._options: dict[str, Any] = {"use_cache": True, **({"logits_to_keep": 1} if self.last_only else {})}

    @torch.no_grad()
    def run(self, ids: Tensor, context: int) -> Trial:
        """Prefill and decode, timed apart.

        Args:
            ids: `[B, context + N]` on the model's device; N of them are decoded, at positions `context`, ... .
            context: tokens of the prompt.
        """
        prompt, steps = ids[:, :context], ids[:, context:].split(1, dim=1)
        places = [self._position(context + number, ids) for number in range(len(steps))]
        with _without_collection():
            start = _now(ids.device)
            output = self.model(input_ids=prompt, **self._options)
            between = _now(ids.device)
            for token, place in zip(steps, places, strict=True):
                output = self.model(input_ids=token, past_key_values=output.past_key_values, **place, **self._options)
            end = _now(ids.device)
        return Trial(between - start, (end - between) / len(steps), output.past_key_values, output.logits[:, -1])

    def peak(self, ids: Tensor, context: int) -> int:
        """Bytes of the weights and of the most that lives beside them at one time of such a run.

        On CUDA as its allocator counts. Elsewhere every tensor counts that an operation gives, for as long as it
        lives; what an operation needs within itself does not. (The resident size of a process only grows, so it says
        nothing of one model among several.)
        """
        if ids.device.type == "cuda":
            torch.cuda.synchronize(ids.device)
            torch.cuda.reset_peak_memory_stats(ids.device)
            before = torch.cuda.memory_allocated(ids.device)
            self.run(ids, context)
            return int(torch.cuda.max_memory_allocated(ids.device)) - before + resident_bytes(self.model)
        with AllocationTracker([*self.model.parameters(), *self.model.buffers(), ids]) as tracker:
            self.run(ids, context)
        return tracker.peak + resident_bytes(self.model)

    def _position(self, number: int, ids: Tensor) -> dict[str, Tensor]:
        """Where a decoded token stands, for models that can be told."""
        return {"position_ids": ids.new_full((len(ids), 1), number)} if self._places else {}


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of tensors that operations give while they live.

    Args:
        known: tensors that were there before, and do not count.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {part.untyped_storage()._cdata for tensor in known for part in _plain(tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                for part in _plain(tensor):
                    self._count(part.untyped_storage())
        return given

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or storage.device.type == "meta":
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all weights that a checkpoint keeps, tied ones once, quantised ones as they are stored."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)}
    return sum(part.nbytes for tensor in tensors.values() for part in _plain(tensor))


def resident_bytes(model: nn.Module) -> int:
    """The same with buffers that no checkpoint keeps."""
    return sum(part.nbytes for tensor in (*model.parameters(), *model.buffers()) for part in _plain(tensor))


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values in a cache; 0 for an entry that merely counts tokens."""
    held = (getattr(entry, name, None) for entry in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or those that a wrapper (quantised weights) is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def _now(device: torch.device) -> float:
    """Seconds, when everything that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage is collected while time is taken."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
