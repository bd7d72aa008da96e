"""Spectral norm of the weight matrices inside every block (Hopscotch, analysis)."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from fulldepth.metrics.base import Measure, Row, Setup

DENSE = 512
"""Up to this smaller dimension the whole eigenvalue problem is solved; above it, Lanczos finds the largest value."""


def spectral_norm(weight: Tensor) -> Tensor:
    r"""The largest singular value of a matrix, in [0, inf).

    .. math:: \|W\|_2 = \max_{\|v\| = 1} \|W v\| = \sqrt{\lambda_{\max}(W^\top W)}

    In float64, by ARPACK from a fixed start where the matrix is large; a transposed layout changes nothing.

    Args:
        weight: a matrix, `[m, n]`, of a floating-point type.

    Returns:
        0-d float64 on the CPU, in the weights' unit; NaN where a weight is not finite.

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
    """The largest eigenvalue of `tall^T tall`; the matrix stays on its device, the Lanczos vectors on the CPU."""

    def product(vector: np.ndarray) -> np.ndarray:
        moved = torch.tensor(vector.ravel(), dtype=torch.float64, device=tall.device)
        return (tall.T @ (tall @ moved)).cpu().numpy()

    size = tall.shape[1]
    gram = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    # the value's error is of the order of the squared residual: 1e-8 is full precision
    return float(eigsh(gram, k=1, which="LA", v0=start, tol=1e-8, return_eigenvectors=False)[0])


class SpectralNorm(Measure):
    """Spectral norm of every projection named in `Setup.projections`, in layers 1..L.

    It sees weights, not batches; processes may share the matrices out among them.
    """

    name = "spectral_norm"
    units = dict.fromkeys(("value",), "1")
    sites = ()
    needs = frozenset({"weights"})
    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("sums", len(setup.projections), setup.num_layers)
        self.add_sum("counts", len(setup.projections), setup.num_layers)

    def update(self, site: str | int, layer: int, weight: Tensor) -> None:  # type: ignore[override]
        """Add one matrix: the projection's name or index, its 1-based layer, its weight `[m, n]`."""
        index = self.setup.projections.index(site) if isinstance(site, str) else site
        if not 1 <= layer <= self.setup.num_layers:
            raise ValueError(f"layer must lie in 1..{self.setup.num_layers}, got {layer}")
        self.sums[index, layer - 1] += spectral_norm(weight).to(self.sums)
        self.counts[index, layer - 1] += 1

    def compute(self) -> dict[tuple[str, int], float]:
        """(projection, layer) -> norm, for the matrices that were seen."""
        norms = self.sums / self.counts
        return {
            (self.setup.projections[index], layer + 1): float(norms[index, layer])
            for index, layer in self.counts.nonzero().tolist()
        }

    def rows(self) -> list[Row]:
        """One row for each matrix."""
        return [
            Row(self.name, site, layer, None, "value", value, 1, "1") for (site, layer), value in self.compute().items()
        ]

    @classmethod
    def memory(cls, setup: Setup) -> int:
        """Bytes held: a sum and a count per matrix."""
        return 16 * len(setup.projections) * setup.num_layers
