"""Sharded checkpoints: each process writes its part of every tensor with torch.distributed.checkpoint.

The format is its safetensors format, whose headers state the position of a part in the full tensor. torch's default
format is not used because it unpickles its `.metadata`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fulldepth.files import reading

WEIGHT_SHARDS, OPTIMIZER_SHARDS = "weights", "optimizer"
"""Folders inside a checkpoint."""


def is_sharded(checkpoint: str | Path) -> bool:
    """Whether a checkpoint's weights are in shards; `fulldepth train export` merges them."""
    return (Path(checkpoint) / WEIGHT_SHARDS).is_dir()


def write_shards(
    folder: str | Path, tensors: Mapping[str, torch.Tensor], group: Any, *, background: bool
) -> Future[Any]:
    """Write this process's parts of tensors; every process must call this, with the same names.

    Args:
        folder: on a disk that all processes share; created if absent.
        tensors: DTensors, of which each process writes its part, and ordinary ones, which one process writes.
        group: of all processes, with a CPU backend. One group carries one write at a time.
        background: return as soon as the tensors are copied to the CPU's memory.

    Returns:
        A future that is done when every process has written its part.
    """
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    if background:
        future: Any = dcp.async_save(dict(tensors), storage_writer=writer, process_group=group)
        upload: Future[Any] = getattr(future, "upload_completion", future)
        return upload
    finished: Future[Any] = Future()
    try:
        finished.set_result(dcp.save(dict(tensors), storage_writer=writer, process_group=group))
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        finished.set_exception(error)
    return finished


def read_shards(folder: str | Path, tensors: Mapping[str, torch.Tensor], group: Any = None) -> None:
    """Fill tensors from shards, or from ordinary safetensors files; any number of processes may have written them.

    Args:
        folder: with the files.
        tensors: name -> DTensor or ordinary tensor; filled in place.
        group: of all processes, with a CPU backend; None = this process reads alone.

    Raises:
        FulldepthError: if a tensor is missing or has another shape, or a file is damaged.
    """
    with reading(folder), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = HuggingFaceStorageReader(str(folder))
        try:
            dcp.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            raise first_failure(error) from error


def stored_shapes(folder: str | Path) -> dict[str, list[int]]:
    """Name -> shape of every full tensor in a folder of shards, or of ordinary safetensors files.

    Raises:
        FulldepthError: if a file is damaged.
    """
    shapes: dict[str, list[int]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with reading(path), safe_open(path, framework="pt") as file:
            offsets = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name).get_shape()
                start = offsets.get(name, {}).get("saved_offsets", [0] * len(part))
                ends = [a + b for a, b in zip(start, part, strict=True)]
                shapes[name] = [max(a, b) for a, b in zip(shapes.get(name, ends), ends, strict=True)]
    return shapes


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """First name of each weight -> all its names, the first included."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: group for group in names.values()}


def missing_weights(model: nn.Module, stored: Mapping[str, Any]) -> list[str]:
    """Weights of which no name is in `stored`."""
    return [name for name, group in aliases(model).items() if not any(other in stored for other in group)]


def first_failure(error: BaseException) -> Exception:
    """The error of the first process that failed."""
    failures = getattr(error, "failures", {})
    cause = next((wrapped[0] for _, wrapped in sorted(failures.items())), error)
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))
