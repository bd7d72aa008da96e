"""Reads rank and world size of this process from torchrun's environment variables, without torch."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

STEP = 0.1
"""Seconds between two looks for the error of the first process."""
LEAD = 0.5
"""Seconds in which other processes may see the error of this one before torchrun ends them."""


def rank() -> int:
    """Rank of this process; 0 without torchrun."""
    return _number("RANK", 0)


def is_main() -> bool:
    """Return True if this process prints and writes; under torchrun only the first one does."""
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


def report_error(message: str) -> None:
    """Hand an error to torchrun, which prints it in its last lines; without torchrun, do nothing.

    Source: https://docs.pytorch.org/docs/stable/elastic/errors.html.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": content}), encoding="utf-8")
        if world() > 1:
            time.sleep(LEAD)


def first_has_reported(seconds: float) -> bool:
    """Wait at most `seconds` until the first process of this machine has handed its error to torchrun.

    Returns:
        True if it has.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "none"))
    first = error_file.parent.parent / "0" / error_file.name  # the folders of error files have the local ranks as names
    waited = 0.0
    while not (seen := local_rank() > 0 and first.is_file()) and waited < seconds:
        time.sleep(STEP)
        waited += STEP
    return seen


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
