"""Finds out whether bfloat16 products work. Some processors announce instructions (AMX) that end a process."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from fulldepth.core.errors import FulldepthError

LIMIT = "ONEDNN_MAX_CPU_ISA"
"""Environment variable with the newest instructions that oneDNN, torch's library for such products, may use."""
CHOICES = ("AVX512_CORE_BF16", "AVX2")
"""Values of `LIMIT` to try where a product ends the process, the faster one first."""
ANNOUNCED = ("amx", "avx512_bf16")
PROBE = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); print(float((a @ a).sum()))"


def has_bfloat16() -> bool:
    """Return True if this processor has instructions for bfloat16 products that work; they are then faster."""
    return _announces_bfloat16() and failing_bfloat16() is None


@cache
def failing_bfloat16() -> tuple[str, str | None] | None:
    """How a bfloat16 product ends its process on this machine, and the value of `LIMIT` that prevents it (None = none).

    Returns None if the product works. The products run in child processes, once, and only if the processor announces
    instructions for them.
    """
    if not _announces_bfloat16() or (ending := _ending(dict(os.environ))) is None:
        return None
    return ending, next((value for value in CHOICES if _ending({**os.environ, LIMIT: value}) is None), None)


def check_bfloat16() -> None:
    """Refuse bfloat16 on a processor on which such products end the process.

    Raises:
        FulldepthError: states a remedy.
    """
    if (failing := failing_bfloat16()) is None:
        return
    ending, value = failing
    helps = "Use float32" + ("." if value is None else f", or set the environment variable {LIMIT}={value}.")
    raise FulldepthError(
        f"A product in bfloat16 ends the process on this machine ({ending}): its processor announces instructions "
        f"that it may not use. {helps}"
    )


def _announces_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return any(name in flags for name in ANNOUNCED)


def _ending(environment: dict[str, str]) -> str | None:
    """How a product in a process with these variables fails; None if it does not."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], env=environment, capture_output=True, text=True, check=False
    )
    return None if process.returncode == 0 else f"exit code {process.returncode}"
