"""Reads what a head predicts from states, a few rows at a time: only what a caller asks for is kept of the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fulldepth.hf import Classifier

CPU_BYTES = 1 << 24
"""Bytes of logits that exist at once on a CPU."""
DEVICE_BYTES = 1 << 29
"""Bytes of logits that exist at once on an accelerator."""
TILE_BYTES = 1 << 21
"""Bytes of a tile of logits on a CPU, few enough to stay in its cache."""
TILE_ROWS = 512
"""Maximum number of rows of such a tile."""

Reduce = Callable[[Tensor, Any], Sequence[Tensor]]
"""Maps the logits `[n, V]` of some rows and their targets to what is kept of them, tensors `[n, ...]`."""


@torch.no_grad()
def read_predictions(
    classifier: Classifier | None,
    states: Tensor,
    targets: Tensor | None,
    reduce: Reduce,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Apply a head to states, and keep of the logits of every row what `reduce` keeps.

    Args:
        classifier: final norm and head; None: `states` are the logits that a model's own forward pass gave.
        states: `[N, D]`, for heads that pool `[N, T, D]`, or logits `[N, V]`.
        targets: `[N]`, handed to `reduce` on the device of the logits; None if it needs none.
        reduce: called with the logits of some rows and their targets; must not depend on which rows come together.
        mask: `[N, T]`, for heads that pool.

    Returns:
        The tensors that `reduce` gives, of all rows: `[N, ...]` each.
    """
    parts = []
    for rows, _, logits in tiles(classifier, states, mask):
        parts.append(reduce(logits, None if targets is None else targets[rows].to(logits.device)))
    return tuple(column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True))


def tiles(
    classifier: Classifier | None, states: Tensor, mask: Tensor | None = None, *, by_class: bool = False
) -> Iterator[tuple[slice, int, Tensor]]:
    """Logits of states, as many at a time as the budget allows: rows, first class, logits `[n, C]`.

    There is at least one tile, also without any row.

    Args:
        classifier: as for `read_predictions`.
        states: as for `read_predictions`.
        mask: as for `read_predictions`.
        by_class: whether a tile may hold some of the classes only, which is faster on a CPU. The caller may overwrite
            such a tile; the next one does.
    """
    if classifier is None:
        yield from ((rows, 0, states[rows]) for rows in row_parts(None, states))
        return
    device = classifier.device or states.device
    states = states.to(device)
    if not classifier.per_token:
        assert mask is not None, "a head that pools reads a mask"
        yield slice(0, len(states)), 0, classifier.sequences(states, mask.to(device)).clone()
        return
    if not by_class or classifier.classes is None:
        yield from ((rows, 0, classifier.tokens(states[rows])) for rows in row_parts(classifier, states))
        return
    prepared = classifier.prepare(states)
    classes = classifier.classes
    if device.type == "cpu":
        height = min(TILE_ROWS, max(1, len(states)))
        width = min(classes, max(1, TILE_BYTES // (height * _bytes_of_logit(states))))
        parts = _slices(len(states), height)
    else:
        parts = row_parts(classifier, states)
        width = classes
    room = prepared.new_empty(len(prepared[parts[0]]) * width)
    for first in range(0, classes, width):
        tile = classifier.tile(slice(first, first + width))
        yield from ((rows, first, tile(prepared[rows], room)) for rows in parts)


def row_parts(classifier: Classifier | None, states: Tensor) -> list[slice]:
    """Slices of the rows of states, each as large as the budget of logits allows; an empty one if there are no rows."""
    classes = states.shape[-1] if classifier is None else classifier.classes or classifier.anatomy.vocab_size or 1
    budget = CPU_BYTES if states.device.type == "cpu" else DEVICE_BYTES
    return _slices(len(states), max(1, budget // (classes * _bytes_of_logit(states))))


def _slices(rows: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, max(1, rows), step)]


def _bytes_of_logit(states: Tensor) -> int:
    """Bytes of a logit as it is reduced: at least float32."""
    return max(4, states.element_size())


def widened(logits: Tensor) -> Tensor:
    """The logits in float32, or in float64 if they are."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def log_probabilities(logits: Tensor) -> Tensor:
    """[N, V] log-probabilities in nats, float32 (float64 for float64 logits)."""
    return functional.log_softmax(widened(logits), dim=-1)


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """[N] cross-entropy of the targets in nats, in the precision of `log_probabilities`."""
    return functional.cross_entropy(widened(logits), targets, reduction="none")
