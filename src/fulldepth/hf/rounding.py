"""Comparison of states and logits that may differ by rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest accepted error (rounding) in each precision, relative to the largest entry."""
COMPARED_AT_ONCE = 1 << 22
"""Entries of two tensors that are compared in float64 at a time."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest expected entry; computed in float64, a part at a time."""
    actual, expected = torch.broadcast_tensors(actual, expected.to(actual.device))
    parts = zip(actual.flatten().split(COMPARED_AT_ONCE), expected.flatten().split(COMPARED_AT_ONCE), strict=True)
    largest = [((a.double() - b.double()).abs().max(), b.abs().max().double()) for a, b in parts]
    difference, scale = torch.tensor(largest, dtype=torch.float64).amax(0).tolist()
    return float(difference / max(scale, 1e-30))


def check_close(claim: str, actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, hint: str = "") -> None:
    """Raise an error if states differ by more than rounding.

    Args:
        claim: the beginning of the error, such as `layer 3 misses the model's own state`.
        actual: any shape.
        expected: the same shape.
        dtype: precision of the computation; None = that of `expected`.
        hint: the end of the error.

    Raises:
        FulldepthError: if they differ, or either has NaN.
    """
    error = relative_error(actual, expected)
    if not error <= TOLERANCE[dtype or expected.dtype]:  # also raises for NaN
        raise FulldepthError(f"{claim} by {error:.1e} (relative){hint}")


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two states are equal up to rounding; False for NaN."""
    if actual.shape != expected.shape:
        return False
    return relative_error(actual, expected) <= TOLERANCE.get(expected.dtype, TOLERANCE[torch.float32])
