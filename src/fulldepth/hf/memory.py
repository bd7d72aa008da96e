"""Free memory of a device, and the check that a checkpoint's weights fit into it."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from fulldepth.errors import FulldepthError
from fulldepth.hf.file_checks import Weights

LIMIT, USAGE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
"""Memory limit and usage of a container, in bytes; the limit may be `max`, none."""
GIB = 1 << 30


def available_memory(device: torch.device) -> int | None:
    """Bytes free on a device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        return min(free, int(LIMIT.read_text()) - int(USAGE.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def check_memory(where: str, weights: Weights, dtype: torch.dtype | str, device: torch.device) -> None:
    """Refuse a checkpoint whose weights exceed the free memory, before any weight is read.

    Args:
        where: the checkpoint.
        weights: from its headers.
        dtype: to load it in; `auto` = as stored.
        device: target device; the CPU's memory is checked too, because weights are loaded through it.

    Raises:
        FulldepthError: with the bytes needed and free.
    """
    needed = weights.loaded_bytes(dtype)
    for target in {torch.device("cpu"), device}:
        free = available_memory(target)
        if free is not None and needed > free:
            raise FulldepthError(
                f"The weights of {where} take {needed / GIB:,.1f} GiB ({needed:,} bytes), but only "
                f"{free / GIB:,.1f} GiB ({free:,} bytes) are free on {target}. Load it with --dtype bfloat16, or "
                "spread it with --device-map auto."
            )
