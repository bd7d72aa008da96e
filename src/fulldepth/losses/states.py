"""What every penalty needs of hidden states: checks, the dtype of statistics, blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError

CPU_BLOCK = 1 << 18
"""Numbers worked on at a time on a CPU, so that they stay in its cache."""
ACCELERATOR_BLOCK = 1 << 23
"""The same elsewhere: enough to fill an accelerator, little beside a model's activations."""


def statistics_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where a tensor is, else float32: what sums and norms of these tensors are computed in."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def blocks(count: int, size: int, device: torch.device) -> Iterator[slice]:
    """Slices that together cover `count` items of `size` numbers each, as many at a time as suits the device."""
    room = CPU_BLOCK if device.type == "cpu" else ACCELERATOR_BLOCK
    step = max(1, room // max(1, size))
    return (slice(start, start + step) for start in range(0, count, step))


def check_states(hidden_states: Sequence[Tensor], mask: Tensor | None, least: int, dimensions: int = 0) -> None:
    """Refuse fewer than `least` states, states that are not `[..., D]` of one shape, and a mask that does not fit.

    Args:
        hidden_states: what was given.
        mask: what was given.
        least: how many states there must be.
        dimensions: how many each must have (0: any number from 2).
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
