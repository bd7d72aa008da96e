"""Samples as arrays, for modules that are no transformers models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fulldepth.data.batches import id_bytes
from fulldepth.data.sequences import Batch, Sequences
from fulldepth.errors import FulldepthError
from fulldepth.files import Fingerprint
from fulldepth.targets import IGNORE
from fulldepth.uncertainty import distinct, identity, sample

EXPECTED = (
    "(inputs, labels) as two arrays of one length, inputs alone, or a data set with a length whose items are "
    "(input, label) or an input"
)


def prepare_arrays(data: Any, *, max_sequences: int = 256, seed: int = 0) -> Sequences:
    """Samples of a plain module as sequences without tokens.

    Args:
        data: `(inputs, labels)`: two arrays or tensors of one length N, `[N, ...]` and `[N]` whole numbers (negative =
            no label); inputs alone; a map-style data set whose items are `(input, label)` or an input; or a
            `DataLoader`, whose data set is read.
        max_sequences: at most this many samples; of more a uniform sample is taken, by number.
        seed: seed of the sample.

    Raises:
        FulldepthError: if the data are of another form, empty, or labels are no classes.
    """
    name = type(data).__name__ if not isinstance(data, tuple | list) else "arrays"
    data = data.dataset if isinstance(data, DataLoader) else data
    data = data.tensors if isinstance(data, TensorDataset) else data
    parts = (data,) if isinstance(data, np.ndarray | Tensor) else data
    if isinstance(parts, tuple | list) and parts and all(isinstance(part, np.ndarray | Tensor) for part in parts):
        if len(parts) > 2 or parts[0].ndim < 2 or any(len(part) != len(parts[0]) for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise FulldepthError(f"The data are {len(parts)} arrays of shape {shapes}. Expected {EXPECTED}.")
        chosen = sample(range(len(parts[0])), max_sequences, seed)
        inputs, *known = (torch.as_tensor(part)[chosen] for part in parts)
        labels = known[0] if known else torch.full((len(chosen),), IGNORE)
    elif not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, str | bytes | dict):
        raise FulldepthError(f"The data are of type {type(data).__name__}. Expected {EXPECTED}.")
    else:
        items = [data[index] for index in sample(range(len(data)), max_sequences, seed)]
        pairs = [item if isinstance(item, tuple | list) and len(item) == 2 else (item, IGNORE) for item in items]
        try:
            inputs = torch.stack([torch.as_tensor(given) for given, _ in pairs]) if pairs else torch.zeros(0)
            labels = torch.tensor([int(label) for _, label in pairs], dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise FulldepthError(f"Items of the data are not of one shape: {error}. Expected {EXPECTED}.") from error
    if not len(inputs):
        raise FulldepthError(f"The data hold no sample. Expected {EXPECTED}.")
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        shape = tuple(labels.shape)
        raise FulldepthError(f"Labels are whole numbers, one for each sample; got {labels.dtype} of shape {shape}.")
    inputs, labels = inputs.detach().cpu(), labels.to(torch.int64).cpu()
    labels = labels.where(labels >= 0, IGNORE)
    fingerprint = Fingerprint("arrays", str(inputs.dtype), str(tuple(inputs.shape)))
    fingerprint.add(_bytes(inputs))
    fingerprint.add(id_bytes(labels))
    classes = labels[labels != IGNORE]
    return Sequences(
        name=name,
        kind="arrays",
        task="classification",
        hash=str(fingerprint),
        examples=labels.tolist(),
        collate=partial(_collate, inputs, labels),
        lengths=[0] * len(inputs),
        num_targets=len(classes),
        num_classes=int(classes.max()) + 1 if len(classes) else None,
        clusters=[int(name) for name in distinct([identity(_bytes(row)) for row in inputs])],
        unit="row",
    )


def _bytes(values: Tensor) -> bytes:
    return values.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""


def _collate(inputs: Tensor, labels: Tensor, indices: Sequence[int]) -> Batch:
    chosen = torch.tensor(list(indices), dtype=torch.int64)
    known = bool((labels != IGNORE).any())
    return Batch({"inputs": inputs[chosen]}, None, chosen, labels=labels[chosen] if known else None)
