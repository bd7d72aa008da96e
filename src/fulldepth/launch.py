"""This process's rank and world size from torchrun's environment variables, without torch."""

from __future__ import annotations

import os


def rank() -> int:
    """Rank of this process; 0 without torchrun."""
    return _number("RANK", 0)


def is_main() -> bool:
    """Whether this process prints and writes; under torchrun only the first one."""
    return rank() == 0


def local_rank() -> int:
    """Rank of this process on its machine; 0 without torchrun."""
    return _number("LOCAL_RANK", 0)


def world() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return _number("WORLD_SIZE", 1)


def local_world() -> int:
    """Number of processes on this machine; by default all of them."""
    return _number("LOCAL_WORLD_SIZE", world())


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
