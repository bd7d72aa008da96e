"""Hashes of a model: of its weights, and of the configuration by which it computes with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fulldepth.core.files import Fingerprint
from fulldepth.hf.modes import loaded_weight

CHUNK = 2**22
"""Number of elements that are hashed at a time."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_NUMBERS = {"transformers_version", "_name_or_path", "use_cache", "architectures", "auto_map", "dtype", *TOKEN_IDS}
"""Entries of `config.json` that have no effect on the numbers of a batch, or that are set from the tokenizer."""


def model_hash(model: nn.Module) -> str:
    """Return `sha256:...` of the weights that `save_pretrained` would write: equal for the same saved weights.

    Covers all parameters and persistent buffers by their names in memory: name, shape, type, sha256 of the values
    (row-major, little-endian). Floating-point values are hashed as float32, or as float64 where float32 cannot hold
    them, so a bfloat16 checkpoint has one hash in every precision that does not round it. Weights tied to others are
    left out, as in the file. Device, offloading, sharding, configuration and non-persistent buffers (rotary
    frequencies) do not matter. Offloaded weights are read one at a time.

    Args:
        model: a loaded model; while blocks are skipped in place its names differ.

    Returns:
        The hash, in hexadecimal digits.

    Raises:
        FulldepthError: if weights are on no device (`meta`) and offloaded nowhere.
    """
    state = model.state_dict()

    def loaded(name: str) -> Any:
        return loaded_weight(model, name, state[name]) if isinstance(state[name], Tensor) else state[name]

    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if (
            target in state
            and source in state
            and (state[target] is state[source] or equal(loaded(target), loaded(source)))
        ):
            del state[target]
    fingerprint = Fingerprint("fulldepth model 1")
    for name in sorted(state):
        for path, tensor in _plain_tensors(name, loaded(name)):
            kind, digest = _digest(tensor)
            for part in (path, str(list(tensor.shape)), kind):
                fingerprint.add(part.encode())
            fingerprint.add(digest)
    return str(fingerprint)


def configuration_hash(model: PreTrainedModel, *ignored: str) -> str:
    """Return `sha256:...` of the entries of a model's configuration that determine its numbers.

    Two models with the same `model_hash` may compute otherwise: with another base of the rotary embedding, epsilon of
    a norm, window of the attention, or number of experts.

    Args:
        model: the model.
        ignored: names of entries that are left out beside `NO_NUMBERS`, as these also inside of other entries.
    """

    def counted(entries: dict[str, Any]) -> dict[str, Any]:
        names = entries.keys() - NO_NUMBERS - set(ignored)
        return {name: counted(value) if isinstance(value := entries[name], dict) else value for name in names}

    entries = json.loads(model.config.to_json_string(use_diff=True))
    return str(Fingerprint(json.dumps(counted(entries), sort_keys=True)))


def equal(first: Any, second: Any) -> bool:
    """Return True if two values are tensors of the same shape, dtype and values."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    is_view = first.data_ptr() == second.data_ptr() and first.stride() == second.stride()
    return is_view or torch.equal(first.to(second.device), second)


def _plain_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a weight: itself, or the parts of a quantised one."""
    if hasattr(value, "__tensor_flatten__"):
        for inner in sorted(value.__tensor_flatten__()[0]):
            yield from _plain_tensors(f"{name}.{inner}", getattr(value, inner))
    elif isinstance(value, Tensor):
        yield name, value.detach()
    else:  # metadata of quantised modules
        text = repr(value).encode()
        yield name, torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(0)


def _digest(tensor: Tensor) -> tuple[str, bytes]:
    """Return the type in which values are hashed, and the sha256 of their bytes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = tensor.dtype
    if kind.is_floating_point:
        pieces = tensor.reshape(-1).split(CHUNK)
        fits = kind != torch.float64 or all(torch.equal(piece.float().double(), piece) for piece in pieces)
        kind = torch.float32 if fits else torch.float64
    digest = hashlib.sha256()
    for piece in tensor.reshape(-1).split(CHUNK):
        values = piece.to("cpu", kind).numpy()
        digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
    return str(kind).removeprefix("torch."), digest.digest()
