"""Cosine and angular displacement, shared by the measures and the penalties."""

from __future__ import annotations

from torch import Tensor


def cosine(product: Tensor, norm_x: Tensor, norm_y: Tensor) -> Tensor:
    r"""Cosine of the angle between two vectors, from their inner product and their norms.

    .. math:: \cos(x, y) = \frac{x \cdot y}{\|x\| \, \|y\|}

    Returns:
        In [-1, 1], of the broadcast shape; NaN where a norm is 0 (a zero vector has no direction).
    """
    return (product / (norm_x * norm_y)).clamp_(-1.0, 1.0)


def angular(cosine: Tensor) -> Tensor:
    """Displacement of a cosine, `1 - (1 + cos) / 2`, in [0, 1] (JREG, Eq. 2)."""
    return (1 - cosine) / 2
