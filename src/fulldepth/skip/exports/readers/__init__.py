"""Loads a checkpoint in a fresh process, as somebody else would, and compares its logits.

The programs beside this file run by themselves: nothing of this package is there for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from fulldepth.capture.stream import TOLERANCE, relative_error
from fulldepth.errors import FulldepthError

READERS = {
    "stock": ("with_transformers.py", "stock"),
    "carried": ("with_transformers.py", "carried"),
    "mlx": ("with_mlx.py",),
}
"""Name -> program and its last arguments. `stock`: transformers alone; `carried`: transformers with the folder's code,
which must be refused without; `mlx`: mlx-lm."""


class NotLoadedError(FulldepthError):
    """A reader could not load the checkpoint at all."""


def prove(folder: Path, ids: Tensor, expected: Tensor, allowed: float, reader: str) -> float:
    """Load a checkpoint in a fresh process without this package, and compare logits with and without a cache.

    Args:
        folder: the checkpoint.
        ids: `[B, T]` tokens.
        expected: `[B, T, V]` logits of the healed model.
        allowed: largest error, relative to the largest logit.
        reader: a key of `READERS`.

    Returns:
        The error.

    Raises:
        NotLoadedError: if it does not load, or as something else.
        FulldepthError: if it gives other logits.
    """
    program, *arguments = READERS[reader]
    with tempfile.TemporaryDirectory() as place:
        files = [str(Path(place) / name) for name in ("ids.pt", "logits.pt")]
        torch.save(ids.cpu(), files[0])
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(place) / "modules")}
        path = Path(__file__).with_name(program)
        command = [sys.executable, "-W", "ignore", "-P", str(path), str(folder.absolute()), *files, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=place)
        if done.returncode:
            said = " ".join(done.stderr.strip().splitlines()[-1:])[:400]
            raise NotLoadedError(f"The export is dropped: it does not load in a fresh process. {said}")
        found = torch.load(files[1], weights_only=True)
    said = json.loads(done.stdout.splitlines()[-1])
    error = relative_error(found, expected)
    if not error <= allowed:
        raise FulldepthError(
            f"The export is dropped: loaded again as {said['class']}, its logits miss the plan's by {error:.1e} of the "
            f"largest; {allowed:.1e} is allowed."
        )
    if not said["cache_error"] <= TOLERANCE[expected.dtype]:
        raise FulldepthError(
            f"The export is dropped: loaded again as {said['class']}, it gives other logits with a cache than without "
            f"({said['cache_error']:.1e} of the largest)."
        )
    return error
