"""What torchrun says in the environment about this process; nothing here needs torch."""

from __future__ import annotations

import os


def rank() -> int:
    """This process's number; 0 without torchrun."""
    return _number("RANK", 0)


def local_rank() -> int:
    """This process's number on its machine; 0 without torchrun."""
    return _number("LOCAL_RANK", 0)


def world() -> int:
    """How many processes torchrun started; 1 without it."""
    return _number("WORLD_SIZE", 1)


def local_world() -> int:
    """How many of them run on this machine; all, where the environment does not say."""
    return _number("LOCAL_WORLD_SIZE", world())


def _number(name: str, default: int) -> int:
    words = os.environ.get(name, "")
    return int(words) if words.isdecimal() else default
