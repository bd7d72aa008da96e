"""`model_hash`: which weights a model has, whatever file, device or precision they were loaded through."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fulldepth.fingerprint import Fingerprint
from fulldepth.hf import loaded_weight

CHUNK = 2**22
"""Weights that are hashed at a time."""


def model_hash(model: nn.Module) -> str:
    """`sha256:...` of the weights that `save_pretrained` would write: equal for the same saved weights.

    Over all parameters and persistent buffers by name (the one in memory): name, shape, type, sha256 of the values
    (row-major, little-endian). Floating-point values count as float32, or as float64 where float32 cannot hold them,
    so that a bfloat16 checkpoint has one hash however it is loaded; one that is loaded in a precision that rounds it
    is another model. Weights tied to others are left out, as in the file. Device, offloading, sharding, configuration
    and non-persistent buffers (rotary frequencies) do not count. Offloaded weights are read one at a time.

    Args:
        model: as loaded; while blocks are skipped in place its names differ.

    Raises:
        FulldepthError: if weights are on no device (`meta`) and offloaded nowhere.
    """
    state = model.state_dict()
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if target in state and source in state and _same(model, state, target, source):
            del state[target]
    fingerprint = Fingerprint("fulldepth model 1")
    for name in sorted(state):
        for path, tensor in _plain_tensors(name, _read(model, state, name)):
            kind, digest = _digest(tensor)
            for part in (path, str(list(tensor.shape)), kind):
                fingerprint.add(part.encode())
            fingerprint.add(digest)
    return str(fingerprint)


def _read(model: nn.Module, state: Mapping[str, Any], name: str) -> Any:
    """An entry of a state dict, read from where it is offloaded."""
    value = state[name]
    return loaded_weight(model, name, value) if isinstance(value, Tensor) else value


def _same(model: nn.Module, state: Mapping[str, Any], target: str, source: str) -> bool:
    """Whether two weights are one tensor, or hold the same."""
    one, other = state[target], state[source]
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if one is other:  # neither is read
        return True
    one, other = (loaded_weight(model, name, state[name]) for name in (target, source))
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride():
        return True
    return one.dtype == other.dtype and torch.equal(one, other.to(one.device))


def _plain_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a weight is made of: itself, or what a quantised one holds."""
    if hasattr(value, "__tensor_flatten__"):
        for inner in sorted(value.__tensor_flatten__()[0]):
            yield from _plain_tensors(f"{name}.{inner}", getattr(value, inner))
    elif isinstance(value, Tensor):
        yield name, value.detach()
    else:  # what quantised modules note beside their weights
        noted = repr(value).encode()
        yield name, torch.frombuffer(bytearray(noted), dtype=torch.uint8) if noted else torch.zeros(0)


def _digest(tensor: Tensor) -> tuple[str, bytes]:
    """The type that values count as, and the sha256 of their bytes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = tensor.dtype
    if kind.is_floating_point:
        kind = torch.float64 if kind == torch.float64 and not _fits_float32(tensor) else torch.float32
    digest = hashlib.sha256()
    for piece in tensor.reshape(-1).split(CHUNK):
        values = piece.to("cpu", kind).numpy()
        digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
    return str(kind).removeprefix("torch."), digest.digest()


def _fits_float32(tensor: Tensor) -> bool:
    return all(torch.equal(piece.float().double(), piece) for piece in tensor.reshape(-1).split(CHUNK))
