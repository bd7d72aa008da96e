"""Loads a checkpoint in a fresh process without this package, and compares its logits.

The programs beside this file import nothing of this package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.execution.stream import TOLERANCE, relative_error
from fulldepth.files import reading

READERS = {
    "stock": ("with_transformers.py", "stock"),
    "carried": ("with_transformers.py", "carried"),
    "stock class": ("with_own_class.py", "stock"),
    "carried class": ("with_own_class.py", "carried"),
    "mlx": ("with_mlx.py",),
    "llama.cpp": ("with_llama_cpp.py",),
    "vllm": ("with_vllm.py",),
}
"""Name -> program and its last arguments. `stock`: transformers alone; `carried`: transformers with the folder's code,
without which loading must fail; `stock class`, `carried class`: the class that the configuration names, any inputs;
`mlx`: mlx-lm; `llama.cpp`: llama-cpp-python, with the path of llama.cpp's converter as
last argument; `vllm`: vLLM on the CPU."""


class ReaderReport(pydantic.BaseModel):
    """The last line that a reader's program prints."""

    class_name: str = pydantic.Field(alias="class")
    cache_error: float
    """Largest difference of logits with and without a cache, relative to the largest logit."""


class NotLoadedError(FulldepthError):
    """A reader could not load the checkpoint."""


def read(
    folder: Path,
    ids: Tensor | Mapping[str, Tensor],
    reader: str,
    *further: str,
    device_map: str | None = None,
    interpreter: str | Path | None = None,
) -> tuple[Tensor, ReaderReport]:
    """Run a reader's program in a fresh process, without this package.

    Args:
        folder: the checkpoint.
        ids: `[B, T]` tokens; for `... class` keyword arguments of the model.
        reader: a key of `READERS`.
        further: last arguments of its program.
        device_map: for a reader of transformers; None = one device.
        interpreter: a Python that has the reader and torch; None = this one.

    Returns:
        `[B, T, V]` logits, and the reader's report.

    Raises:
        NotLoadedError: if it does not load.
    """
    program, *arguments = READERS[reader]
    if arguments and device_map is not None:
        arguments.append(device_map)
    with tempfile.TemporaryDirectory() as work:
        files = [str(Path(work) / name) for name in ("ids.pt", "logits.pt")]
        saved = ids.cpu() if isinstance(ids, Tensor) else {name: value.cpu() for name, value in ids.items()}
        torch.save(saved, files[0])
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(work) / "modules")}
        python = [str(interpreter or sys.executable), "-W", "ignore", "-P", str(Path(__file__).with_name(program))]
        command = [*python, str(folder.absolute()), *files, *arguments, *further]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        process = subprocess.run(command, env=environment, check=False, cwd=work, **streams)
        if process.returncode:
            reason = " ".join(process.stderr.strip().splitlines()[-1:])[:400]
            raise NotLoadedError(f"The export is dropped: it does not load in a fresh process. {reason}")
        with reading(f"the logits that a fresh process computed from {folder}"):
            logits = torch.load(files[1], weights_only=True)
            return logits, ReaderReport.model_validate_json(process.stdout.splitlines()[-1], strict=True)


def prove(
    folder: Path, ids: Tensor, expected: Tensor, allowed: float, reader: str, device_map: str | None = None
) -> float:
    """Compare the logits that a fresh process computes, with and without a cache.

    Args:
        folder: the checkpoint.
        ids: `[B, T]` tokens.
        expected: `[B, T, V]` logits of the healed model.
        allowed: largest error, relative to the largest logit.
        reader: a key of `READERS`.
        device_map: for a reader of transformers; None = one device.

    Returns:
        The error, relative to the largest logit.

    Raises:
        NotLoadedError: if the checkpoint does not load, or loads as another class.
        FulldepthError: if the logits differ by more than `allowed`, or differ with a cache.
    """
    logits, report = read(folder, ids, reader, device_map=device_map)
    error = relative_error(logits, expected)
    if not error <= allowed:
        raise FulldepthError(
            f"The export is dropped: loaded again as {report.class_name}, its logits miss the plan's by {error:.1e} of "
            f"the largest; {allowed:.1e} is allowed."
        )
    if not report.cache_error <= TOLERANCE[expected.dtype]:
        raise FulldepthError(
            f"The export is dropped: loaded again as {report.class_name}, it gives other logits with a cache than "
            f"without ({report.cache_error:.1e} of the largest)."
        )
    return error
