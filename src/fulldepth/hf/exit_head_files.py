"""The file of exit heads beside an ordinary checkpoint: `exit_heads.LAYER.weight`, `exit_box_heads.LAYER.weight`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import reading
from fulldepth.hf.anatomy import anatomy_candidates
from fulldepth.hf.exit_heads import (
    BOXES,
    CLASSES,
    Weights,
    attach_exit_heads,
    check_exit_heads,
    exit_heads_of,
    remove_exit_heads,
)
from fulldepth.hf.older_names import stored_file

EXIT_HEADS = "exit_heads.safetensors"
"""File beside `model.safetensors`; stock transformers does not read it."""
NAME = re.compile(rf"({CLASSES}|{BOXES})\.([1-9]\d{{0,3}})\.weight")
"""Kind and layer."""


def save_exit_heads(model: nn.Module, folder: str | Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a model's heads beside its checkpoint; nothing is written without any.

    Args:
        model: the model.
        folder: of the checkpoint.
        tensors: name -> weight, where the model's own are sharded; None = the model's own.

    Raises:
        FulldepthError: if the heads do not fit the model.
    """
    own = _named(model)
    if not own:
        return
    if tensors is None:
        check_exit_heads(*anatomy_candidates(model))  # type: ignore[arg-type]
    source: Any = own if tensors is None else tensors
    stored = {name: source[name].detach().to("cpu", copy=True).contiguous() for name in own}
    # One entry only: safetensors writes several in random order, and equal heads must be equal files.
    save_file(stored, str(Path(folder) / EXIT_HEADS), metadata={"format": "pt"})


def find_exit_heads(name: str | Path, revision: str | None = None) -> Path | None:
    """The file of exit heads of a checkpoint (a folder, or a Hub name in the local cache); None without one."""
    return stored_file(str(name), EXIT_HEADS, revision)


def load_exit_heads(model: PreTrainedModel, path: str | Path) -> None:
    """Give a loaded model the heads in a file, in place of those that it has.

    Args:
        model: the model.
        path: the file, or the checkpoint's folder.

    Raises:
        FulldepthError: if the file is damaged or holds anything but one finite matrix for each of layers 1..L-1 (of a
            detector, two), or they do not fit the model.
    """
    stored = _read(path)
    attach_exit_heads(model, _by_layer(stored), model.device, model.dtype)
    try:
        check_exit_heads(*anatomy_candidates(model))
    except FulldepthError as error:
        remove_exit_heads(model)
        raise FulldepthError(f"Cannot use {path}. {error}") from error


def restore_exit_heads(model: nn.Module, path: str | Path) -> None:
    """Fill the heads that a model has from a file, in place, so that its optimiser keeps them.

    Raises:
        FulldepthError: if the file is damaged, or holds other heads than the model has.
    """
    stored, own = _read(path), _named(model)
    shapes, wanted = ({name: list(weight.shape) for name, weight in each.items()} for each in (stored, own))
    if shapes != wanted:
        name = min(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
        found = shapes.get(name, "missing")
        raise FulldepthError(
            f"Cannot use {path}: {name} is {found}; the model needs {wanted.get(name, 'no such head')}."
        )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(stored[name])


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a model's heads by their names in the file."""
    kinds = {kind: exit_heads_of(model, kind) for kind in (CLASSES, BOXES)}
    return {
        f"{kind}.{layer}.weight": head.weight  # type: ignore[misc]
        for kind, heads in kinds.items()
        for layer, head in heads.items()
    }


def _by_layer(stored: Mapping[str, Tensor]) -> Weights:
    weights: Weights = {}
    for name, weight in stored.items():
        match = NAME.fullmatch(name)
        assert match is not None
        weights.setdefault(match[1], {})[int(match[2])] = weight
    return weights


def _read(path: str | Path) -> dict[str, Tensor]:
    """Name -> finite matrix in a file."""
    path = Path(path) / EXIT_HEADS if Path(path).is_dir() else Path(path)
    stored: dict[str, Tensor] = {}
    with reading(path), safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if not NAME.fullmatch(name):
                raise FulldepthError(
                    f"Cannot read {path}: it holds {one_line(name, 80)}; expected {CLASSES}.LAYER.weight alone, and of "
                    f"a detector {BOXES}.LAYER.weight."
                )
            stored[name] = weight = file.get_tensor(name)
            if weight.ndim != 2 or not weight.is_floating_point():
                raise FulldepthError(f"Cannot read {path}: {name} is no matrix of floating-point numbers.")
            if not bool(torch.isfinite(weight).all()):
                raise FulldepthError(f"Cannot read {path}: {name} holds NaN or infinity.")
    if not any(name.startswith(f"{CLASSES}.") for name in stored):
        raise FulldepthError(f"Cannot read {path}: it holds no {CLASSES}.LAYER.weight.")
    return stored


__all__ = [
    "EXIT_HEADS",
    "find_exit_heads",
    "load_exit_heads",
    "restore_exit_heads",
    "save_exit_heads",
]
