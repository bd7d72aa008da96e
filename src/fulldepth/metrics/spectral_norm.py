"""Spectral norm of the weight matrices inside every block (Hopscotch, analysis)."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from fulldepth.metrics.base import Measure, Row, Setup

DENSE = 512
"""Up to this smaller dimension the full eigenvalue problem is solved; above it, Lanczos finds the largest value."""


def spectral_norm(weight: Tensor) -> Tensor:
    r"""The largest singular value of a matrix, in [0, inf).

    .. math:: \|W\|_2 = \max_{\|v\| = 1} \|W v\| = \sqrt{\lambda_{\max}(W^\top W)}

    In float64; by ARPACK with a fixed start vector for large matrices. Invariant to transposition.

    Args:
        weight: a matrix, `[m, n]`, of a floating-point type.

    Returns:
        0-d float64 on the CPU, in the weights' unit; NaN if a weight is not finite.

    Raises:
        ValueError: if `weight` is not a matrix of floating-point numbers with at least one element.

    Source: "Hopscotch", analysis of the projections.
    """
    if weight.ndim != 2 or not weight.numel() or not weight.is_floating_point():
        raise ValueError(f"expected a floating-point matrix [m, n], got {weight.dtype} {tuple(weight.shape)}")
    weight = weight.detach().double()
    scale = weight.abs().max()
    if not scale.isfinite() or scale == 0:
        return (scale * torch.nan if scale else scale).cpu()
    tall = weight.div(scale) if len(weight) >= weight.shape[1] else weight.T.div(scale)
    if tall.shape[1] <= DENSE:
        largest = torch.linalg.eigvalsh(tall.T @ tall)[-1].clamp(min=0)
    else:
        largest = torch.tensor(_largest_eigenvalue(tall), dtype=torch.float64)
    return (largest.sqrt().cpu() * scale.cpu()).double()


def _largest_eigenvalue(tall: Tensor) -> float:
    """Largest eigenvalue of `tall^T tall`; the matrix stays on its device, the Lanczos vectors on the CPU."""

    def product(vector: np.ndarray) -> np.ndarray:
        moved = torch.tensor(vector.ravel(), dtype=torch.float64, device=tall.device)
        return (tall.T @ (tall @ moved)).cpu().numpy()

    size = tall.shape[1]
    gram = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    # the eigenvalue's error is of the order of the squared residual, so 1e-8 gives full precision
    return float(eigsh(gram, k=1, which="LA", v0=start, tol=1e-8, return_eigenvectors=False)[0])


class SpectralNorm(Measure):
    """Spectral norm of every projection named in `Setup.projections`, in layers 1..L.

    For the projections of E experts, `[E, m, n]`, the `mean` and the `max` over experts, with `count` = E. `update`
    takes weights, not batches; the matrices may be distributed over processes.
    """

    name = "spectral_norm"
    units = dict.fromkeys(("value", "mean", "max"), "1")
    sites = ()
    needs = frozenset({"weights"})
    sums: Tensor
    counts: Tensor
    expert_sums: Tensor
    experts: Tensor
    maxima: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        shape = (len(setup.projections), setup.num_layers)
        for name in ("sums", "counts", "expert_sums", "experts"):
            self.add_sum(name, *shape)
        self.add("maxima", shape, reduce="max", device=setup.device)

    def update(self, site: str | int, layer: int, weight: Tensor) -> None:
        """Add one matrix `[m, n]`, or the matrices of all experts `[E, m, n]`.

        Args:
            site: the projection's name or index.
            layer: 1-based.
            weight: its weight.
        """
        index = self.setup.projections.index(site) if isinstance(site, str) else site
        if not 1 <= layer <= self.setup.num_layers:
            raise ValueError(f"layer must lie in 1..{self.setup.num_layers}, got {layer}")
        at = (index, layer - 1)
        if weight.ndim < 3:
            self.sums[at] += spectral_norm(weight).to(self.sums)
            self.counts[at] += 1
            return
        norms = torch.stack([spectral_norm(matrix) for matrix in weight]).to(self.sums)
        self.expert_sums[at] += norms.sum()
        self.experts[at] += len(norms)
        self.maxima[at] = torch.maximum(self.maxima[at], norms.max())

    def compute(self) -> dict[tuple[str, int, str], tuple[float, int]]:
        """(projection, layer, statistic) -> value and number of matrices, for the projections that were added."""
        norms = {}
        for index, layer in (self.counts + self.experts).nonzero().tolist():
            at = (index, layer)
            where = (self.setup.projections[index], layer + 1)
            if experts := int(self.experts[at]):
                norms[*where, "mean"] = (float(self.expert_sums[at]) / experts, experts)
                norms[*where, "max"] = (float(self.maxima[at]), experts)
            else:
                norms[*where, "value"] = (float(self.sums[at] / self.counts[at]), 1)
        return norms

    def rows(self) -> list[Row]:
        """One row for each matrix, two for each stack of experts."""
        return [
            self.row(statistic, value, count, layer, site=site)
            for (site, layer, statistic), (value, count) in self.compute().items()
        ]
