"""Maximum mean discrepancy between the hidden states of a model and of a reference model (Hopscotch, analysis)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fulldepth.metrics.base import OfLayers


def mmd(x: Tensor, y: Tensor, bandwidth: float | None = None) -> Tensor:
    r"""Squared maximum mean discrepancy (V-statistic) with a Gaussian kernel, in [0, 2].

    .. math::
        \frac{1}{N^2} \sum_{i,j} k(x_i, x_j) + \frac{1}{M^2} \sum_{i,j} k(y_i, y_j)
        - \frac{2}{NM} \sum_{i,j} k(x_i, y_j), \quad k(a, b) = e^{-\|a - b\|^2 / 2 s^2}

    Computed in float64 with up to three `(N + M)^2` matrices in memory (`mmd_bytes`): 403 MB for N = M = 2048.

    Args:
        x: first sample, `[N, D]`.
        y: second sample, `[M, D]`.
        bandwidth: s; None = the median distance over all pairs i < j of the pooled sample. For s = 0 (more than half
            of the pairs coincide) the kernel is its limit: 1 for equal points, else 0.

    Returns:
        0-d float64, unit 1; 0 for identical samples.

    Raises:
        ValueError: if the shapes do not match, a sample is empty, or the bandwidth is negative.

    Source: "Hopscotch", analysis of the hidden states.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or not (len(x) and len(y)):
        raise ValueError(f"expected x [N, D] and y [M, D], neither empty, got {tuple(x.shape)} and {tuple(y.shape)}")
    if bandwidth is not None and not bandwidth >= 0:
        raise ValueError(f"the bandwidth must not be negative, got {bandwidth}")
    squared = _squared_distances(torch.cat([x.double(), y.double().to(x.device)]))
    if bandwidth is None:
        pairs = torch.ones_like(squared, dtype=torch.bool).triu_(1)
        bandwidth = float(np.median(squared[pairs].sqrt_().cpu()))
    kernel = squared.div_(-2 * bandwidth**2).exp_() if bandwidth else (squared == 0).double()
    n = len(x)
    within = kernel[:n, :n].mean() + kernel[n:, n:].mean()
    return (within - kernel[:n, n:].mean() - kernel[n:, :n].mean()).clamp(min=0)


def mmd_bytes(points: int) -> int:
    """Most bytes that `mmd` holds for so many points in both samples: the distances, and twice their upper triangle
    with its mask while the median is found.
    """
    return 3 * 8 * points**2


def _squared_distances(points: Tensor) -> Tensor:
    """[P, P] squared distances of the rows of `points [P, D]`; exactly 0 for rows that are equal up to rounding."""
    points = points - points.mean(0)  # same distances, less cancellation
    norms = points.square().sum(1)
    squared = points @ points.T
    squared.mul_(-2).add_(norms[:, None]).add_(norms)
    rounding = 4 * math.sqrt(points.shape[1]) * torch.finfo(torch.float64).eps
    for row, norm in zip(squared, norms, strict=True):  # row by row, to avoid a second P x P matrix
        row.masked_fill_(row <= rounding * (norm + norms), 0.0)
    return squared


class Mmd(OfLayers):
    """Squared MMD of layers 0..L between the measured model and the reference model, on the same sampled tokens.

    States of a folded checkpoint are multiplied by `Setup.stream_scale`: a Gaussian kernel sees the scale of a stream.
    """

    name = "mmd"
    sites = ("residual", "reference")
    needs = frozenset({"reference"})

    def compute(self) -> tuple[list[float], int]:
        """Squared MMD of layers 0..L, and the number of tokens."""
        measured, reference = (self.setup.reservoir(site).compute().features for site in self.sites)  # [N, L+1, D]
        if not len(measured):
            return [], 0
        layers = range(self.setup.num_layers + 1)
        unscaled = (1.0,) * len(layers)
        scale, reference_scale = (self.setup.stream_scale.get(site, unscaled) for site in self.sites)
        values = [
            float(
                mmd(scale[layer] * measured[:, layer].double(), reference_scale[layer] * reference[:, layer].double())
            )
            for layer in layers
        ]
        return values, len(measured)
