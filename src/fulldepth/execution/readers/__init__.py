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

import pydantic
import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import reading
from fulldepth.hf.rounding import TOLERANCE, relative_error

READERS = {"stock": "with_transformers", "carried": "with_transformers", "llama.cpp": "with_llama_cpp"}
"""Reader -> its program. `stock`: transformers alone; `carried`: transformers with the folder's code, without which
loading must fail; `llama.cpp`: that of the package xllamacpp."""
LOWEST = -60.0
"""llama.cpp's log-probabilities are cut here: it takes logarithms of float32 numbers, which end near exp(-87)."""


class ReaderReport(pydantic.BaseModel):
    """The last line that a reader's program prints."""

    class_name: str = pydantic.Field(alias="class")
    cache_error: float
    """Largest difference of logits with and without a cache, relative to the largest logit."""


class NotLoadedError(FulldepthError):
    """A reader could not load the checkpoint."""


def read_export(
    folder: Path, inputs: Tensor | Mapping[str, Tensor], reader: str, device_map: str | None = None
) -> tuple[Tensor, ReaderReport]:
    """Load a checkpoint in a fresh process, without this package.

    Args:
        folder: the checkpoint; for `llama.cpp` a GGUF file.
        inputs: `[B, T]` tokens of a causal language model; for the class that the configuration names, whatever it is,
            its keyword arguments.
        reader: one of `READERS`.
        device_map: of transformers; None = one device.

    Returns:
        `[B, T, V]` logits (without a head the last hidden state; from `llama.cpp` `[B, V]` log-probabilities after the
        last token), and the report.

    Raises:
        NotLoadedError: if it does not load.
    """
    with tempfile.TemporaryDirectory() as work:
        files = [str(Path(work) / name) for name in ("inputs.pt", "logits.pt")]
        saved = inputs.cpu() if isinstance(inputs, Tensor) else {name: value.cpu() for name, value in inputs.items()}
        torch.save(saved, files[0])
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(Path(work) / "modules")}
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-P",
            str(Path(__file__).with_name(f"{READERS[reader]}.py")),
            str(folder.absolute()),
            *files,
            reader,
            *([] if device_map is None else [device_map]),
        ]
        process = subprocess.run(
            command, env=environment, check=False, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if process.returncode:
            reason = " ".join(process.stderr.strip().splitlines()[-1:])[:400]
            raise NotLoadedError(f"The export is dropped: it does not load in a fresh process. {reason}")
        with reading(f"the logits that a fresh process computed from {folder}"):
            logits = torch.load(files[1], weights_only=True)
            return logits, ReaderReport.model_validate_json(process.stdout.splitlines()[-1], strict=True)


def prove_export(
    folder: Path,
    inputs: Tensor | Mapping[str, Tensor],
    expected: Tensor,
    allowed: float,
    reader: str,
    device_map: str | None = None,
) -> float:
    """Compare the logits that a fresh process computes, with and without a cache.

    Args:
        folder: the checkpoint.
        inputs: as for `read_export`.
        expected: logits of the model in this process, or its last hidden state.
        allowed: largest error, relative to the largest logit.
        reader: one of `READERS`.
        device_map: of transformers; None = one device.

    Returns:
        The error, relative to the largest logit.

    Raises:
        NotLoadedError: if the checkpoint does not load, or loads as another class.
        FulldepthError: if the logits differ by more than `allowed`, or differ with a cache.
    """
    logits, report = read_export(folder, inputs, reader, device_map)
    error = relative_error(logits.clamp(min=LOWEST) if reader == "llama.cpp" else logits, expected)
    if not error <= allowed:
        raise FulldepthError(
            f"The export is dropped: loaded again as {report.class_name}, its logits miss the model's by {error:.1e} "
            f"of the largest; {allowed:.1e} is allowed."
        )
    if not report.cache_error <= TOLERANCE[expected.dtype]:
        raise FulldepthError(
            f"The export is dropped: loaded again as {report.class_name}, it gives other logits with a cache than "
            f"without ({report.cache_error:.1e} of the largest)."
        )
    return error
