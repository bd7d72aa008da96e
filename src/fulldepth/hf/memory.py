"""Free memory of a device, and the check that a checkpoint's weights fit into it."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from fulldepth.errors import FulldepthError
from fulldepth.hf.file_checks import Weights

CONTAINER = Path("/sys/fs/cgroup")
"""Holds a container's `memory.max` (bytes, or `max` without a limit), `memory.current` and `memory.stat`."""
GIB = 1 << 30


def available_memory(device: torch.device) -> int:
    """Bytes free on a device; the file cache and what torch's allocator holds unused count as free."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def check_memory(where: str, weights: Weights, dtype: torch.dtype | str, device: torch.device) -> None:
    """Refuse a checkpoint whose weights exceed the free memory, before any weight is read.

    Args:
        where: the checkpoint.
        weights: from its headers.
        dtype: to load it in; `auto` = the stored one.
        device: target device; the CPU's memory is checked too, because weights are loaded through it.

    Raises:
        FulldepthError: with the bytes needed and free.
    """
    needed = weights.loaded_bytes(dtype)
    for target in {torch.device("cpu"), device}:
        free = available_memory(target)
        if needed > free:
            raise FulldepthError(
                f"The weights of {where} take {needed / GIB:,.1f} GiB ({needed:,} bytes), but only "
                f"{free / GIB:,.1f} GiB ({free:,} bytes) are free on {target}. Load it with --dtype bfloat16, or "
                "spread it with --device-map auto."
            )
