"""Shared by the penalties: checks of hidden states, dtype of statistics, blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError

CPU_BLOCK = 1 << 18
"""Elements per block on a CPU, small enough to stay in its cache."""
ACCELERATOR_BLOCK = 1 << 23
"""Elements per block on an accelerator: enough to fill it, few compared to a model's activations."""


def statistics_dtype(*tensors: Tensor) -> torch.dtype:
    """Dtype of sums and norms of these tensors: float64 if one of them is, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def blocks(count: int, size: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `count` items of `size` elements each, with a block size that suits the device."""
    room = CPU_BLOCK if device.type == "cpu" else ACCELERATOR_BLOCK
    step = max(1, room // max(1, size))
    return (slice(start, start + step) for start in range(0, count, step))


def check_states(hidden_states: Sequence[Tensor], mask: Tensor | None, least: int, dimensions: int = 0) -> None:
    """Raise an error for too few states, states that are not `[..., D]` of one shape, or a mask of another shape.

    Args:
        hidden_states: states to check.
        mask: mask to check.
        least: minimum number of states.
        dimensions: number of dimensions of each state (0: any number from 2).
    """
    if len(hidden_states) < least:
        raise FulldepthError(f"expected at least {least} hidden states, one per layer, got {len(hidden_states)}")
    shape, allowed = hidden_states[-1].shape, (dimensions,) if dimensions else range(2, 1 << 6)
    for index, state in enumerate(hidden_states):
        if not state.is_floating_point() or state.ndim not in allowed or state.shape != shape:
            raise FulldepthError(
                f"hidden states must be floating-point tensors [B, T, D] of one shape: number {index} is {state.dtype} "
                f"{tuple(state.shape)}, the last one {tuple(shape)}"
            )
    if mask is not None and (mask.is_floating_point() or mask.shape != shape[:-1]):
        raise FulldepthError(
            f"mask must be boolean (or 0 and 1) of shape {tuple(shape[:-1])}, got {mask.dtype} {tuple(mask.shape)}"
        )
