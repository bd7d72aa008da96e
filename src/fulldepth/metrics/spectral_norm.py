"""Spectral norm of the weight matrices inside every block (Hopscotch, analysis)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

import torch
from torch import Tensor

from fulldepth.core.threads import map_threads
from fulldepth.metrics.base import Measure, Row, Setup

DENSE = 128
"""Smaller dimension up to which the full eigenvalue problem is solved; above it, Lanczos finds the largest value."""
STEPS = 512
"""Most Lanczos steps, after which the full eigenvalue problem is solved."""
CERTAIN = 2e-15
"""Largest accepted bound of the relative error of the eigenvalue."""


def spectral_norm(weight: Tensor) -> Tensor:
    r"""The largest singular value of a matrix, in [0, inf).

    .. math:: \|W\|_2 = \max_{\|v\| = 1} \|W v\| = \sqrt{\lambda_{\max}(W^\top W)}

    Computed in float64, by Lanczos iterations with a fixed start vector until the bound of the error of the eigenvalue,
    :math:`\|r\|^2 / (\theta_1 - \theta_2)` with the residual :math:`r` and the Ritz values :math:`\theta`, is below
    rounding. Small matrices, and those for which the iterations do not converge, are solved as a full eigenvalue
    problem. Singular values that agree to 4e-9 may be taken for one, with an error of less than their distance.
    Invariant to transposition.

    Args:
        weight: a matrix, `[m, n]`, of a floating-point type.

    Returns:
        0-d float64 on the CPU, in the weights' unit; NaN if a weight is not finite.

    Raises:
        ValueError: if `weight` is not a matrix of floating-point numbers with at least one element.

    Source: "Hopscotch", analysis of the projections; for the bound, Parlett, "The Symmetric Eigenvalue Problem",
    Theorem 11.7.1.
    """
    if weight.ndim != 2 or not weight.numel() or not weight.is_floating_point():
        raise ValueError(f"expected a floating-point matrix [m, n], got {weight.dtype} {tuple(weight.shape)}")
    weight = weight.detach()
    scale = weight.abs().max().double()
    if not scale.isfinite() or scale == 0:
        return (scale * torch.nan if scale else scale).cpu()
    tall = (weight if len(weight) >= weight.shape[1] else weight.T).double()
    if not 1e-100 < scale < 1e100:
        tall = tall / scale
    else:
        scale = torch.ones_like(scale)
    width = tall.shape[1]
    largest = _lanczos(tall) if width > DENSE else None
    if largest is None:
        largest = float(torch.linalg.eigvalsh(tall.T @ tall)[-1].clamp(min=0))
    return torch.tensor(largest, dtype=torch.float64).sqrt() * scale.cpu()


def _lanczos(tall: Tensor) -> float | None:
    """Return the largest eigenvalue of `tall^T tall` by Lanczos steps with full orthogonalisation; None if uncertain.

    The second Ritz value is at most the second eigenvalue, so the gap between the two values is read only after the
    first has converged.
    """
    width = tall.shape[1]
    start = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(tall)
    basis = tall.new_zeros(STEPS + 1, width)
    basis[0] = start / torch.linalg.vector_norm(start)
    projected = torch.zeros(STEPS, STEPS, dtype=torch.float64)
    for step in range(min(STEPS, width)):
        known = basis[: step + 1]
        image = torch.mv(tall.T, torch.mv(tall, known[-1]))
        along = torch.mv(known, image)
        image -= torch.mv(known.T, along)
        image -= torch.mv(known.T, torch.mv(known, image))
        norm = float(torch.linalg.vector_norm(image))
        projected[step, step] = float(along[-1])
        if step % 4 == 3:
            values, vectors = torch.linalg.eigh(projected[: step + 1, : step + 1])
            largest = values[-1].item()
            second = values[-2].item()
            residual = norm * abs(float(vectors[-1, -1]))
            gap = largest - second
            if residual < gap / 2 and residual**2 <= CERTAIN * gap * largest:
                return largest
        if norm == 0:
            return None
        projected[step, step + 1 : step + 2] = norm
        projected[step + 1 : step + 2, step] = norm
        basis[step + 1] = image / norm
    return None


class SpectralNorm(Measure):
    """Spectral norm of every projection named in `Setup.projections`, in layers 1..L.

    For the projections of E experts, `[E, m, n]`, the `mean` and the `max` over experts, with `count` = E. `update`
    takes weights, not batches; they may be distributed over processes.
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

    def update(self, matrices: Iterable[tuple[str, int, Tensor]]) -> None:
        """Add matrices `[m, n]`, or the matrices of all experts `[E, m, n]`, several at a time in threads.

        Args:
            matrices: projection, layer (from 1) and weight.
        """
        matrices = iter(matrices)
        while part := list(islice(matrices, torch.get_num_threads())):  # few, because packed weights are unpacked
            stacks = [weight if weight.ndim > 2 else weight[None] for *_, weight in part]
            norms = torch.stack(map_threads(spectral_norm, chain(*stacks), *stacks)).to(self.sums)
            for (site, layer, weight), values in zip(part, norms.split([*map(len, stacks)]), strict=True):
                at = (self.setup.projections.index(site), layer - 1)
                sums, counts = (self.expert_sums, self.experts) if weight.ndim > 2 else (self.sums, self.counts)
                sums[at] += values.sum()
                counts[at] += len(values)
                self.maxima[at] = torch.maximum(self.maxima[at], values.max())

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
