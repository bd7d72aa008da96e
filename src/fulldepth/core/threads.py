"""Spreads work over independent matrices in threads, each of which computes with one thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_threads(function: Callable[[Item], Result], items: Iterable[Item], *tensors: Tensor) -> list[Result]:
    """Call `function` for every item, in as many threads as torch uses, each with one OpenMP and MKL thread.

    For kernels that scale badly inside one matrix (eigenvalues, FFT, matrix-vector products), above all when other
    processes share the cores. Gradient and inference mode are those of the caller. Plain calls in the caller's thread
    if torch uses one thread, for fewer than two items, or if one of `tensors` is not on the CPU.

    `torch.set_num_threads` changes the calling thread, and the default that later threads start with. The former ends
    with the threads here, the latter is restored.

    Args:
        function: must be safe to call from several threads.
        items: arguments.
        tensors: what the function reads, to see its device.

    Returns:
        The results in the order of the items.

    Raises:
        Exception: the first exception of `function`; items that have not begun are dropped.
    """
    todo = list(items)
    threads = torch.get_num_threads()
    workers = min(threads, len(todo))
    if workers < 2 or any(tensor.device.type != "cpu" for tensor in tensors):
        return [function(item) for item in todo]
    inference = torch.is_inference_mode_enabled()
    grad = torch.is_grad_enabled()

    def call(item: Item) -> Result:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return function(item)

    try:
        with ThreadPoolExecutor(workers, "fulldepth", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(call, todo))
    finally:
        torch.set_num_threads(threads)
