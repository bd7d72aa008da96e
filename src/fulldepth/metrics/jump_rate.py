"""Jump rate: increase of the displacement over the last layers (JREG, Eq. 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulldepth.core.thresholds import LARGE_JUMP
from fulldepth.core.uncertainty import independent, quantile
from fulldepth.metrics.base import Estimated, Observation, Setup, angular
from fulldepth.metrics.standard_errors import Estimate, EstimateArray, influence_of_ratio, standard_error


def jump_rate(psi: Tensor | Sequence[float], start: int = -1) -> float:
    r"""Accumulated increase of the mean displacement from layer `start` on, in per cent.

    .. math:: \zeta_l = 100 \sum_{k=l}^{L} \max(0, \Psi_k - \Psi_{k-1}), \quad 2 \le l \le L

    Args:
        psi: mean displacement of layers 1..L, `[L]`.
        start: the first layer `l` of the sum: a 1-based layer, at least 2, or a negative index from the end as in
            Python (-1 gives zeta_L, -2 zeta_{L-1}).

    Returns:
        Per cent, in [0, 100 (L - l + 1)]; 10 or more is a large jump.

    Raises:
        ValueError: if `start` is not a layer in 2..L, or `psi` is not one-dimensional.

    Source: "JREG: final-layer jumps", Eq. 3.
    """
    values = torch.as_tensor(psi, dtype=torch.float64)
    if values.ndim != 1:
        raise ValueError(f"psi must hold one mean displacement per layer, [L], got shape {tuple(values.shape)}")
    layers = len(values)
    layer = layers + 1 + start if start < 0 else start
    if not 2 <= layer <= layers:
        raise ValueError(f"start must name a layer in 2..{layers} (or its negative index), got {start}")
    return float(100 * values.diff()[layer - 2 :].clamp(min=0).sum())


def size_of_jump(value: float, noise: float = 0.0) -> str:
    """Return the verdict on a jump rate in per cent, rounded as printed. Within the noise there is none.

    Args:
        value: the jump rate, %.
        noise: largest difference that is not measurable, %: `uncertainty.reach` times the standard error.
    """
    if value > 0 and 0 < abs(value - LARGE_JUMP) <= noise:
        return f"not measurably above or below {LARGE_JUMP:g} %, from which a jump is large"
    return "a large jump" if round(value, 1) >= LARGE_JUMP else "no large jump" if value > 0 else "no jump"


def growth(value: float, noise: float = 0.0) -> str:
    """Describe a positive jump rate as a growth of the displacement, with the verdict on it."""
    amount = f"{value / 100:.3f}" if round(value, 1) > 0 else "less than 0.001"
    rate = f"{value:.1f} %" if round(value, 1) > 0 else "less than 0.1 %"
    return f"{amount} (jump rate {rate}): {size_of_jump(value, noise)}"


def describe_jump(value: float, noise: float = 0.0) -> str:
    """Describe zeta_L, in per cent, in a sentence; 0 = the last layer displaces at most as much as the one before."""
    if value <= 0:
        return "The last layer displaces no more than the one before: no jump."
    return f"The last layer's displacement exceeds that of the one before by {growth(value, noise)}."


class JumpRate(Estimated):
    """zeta_l for every layer l = 2..L, from the mean displacements of the residual stream, with its standard error.

    The error is that of the sum over the differences whose 95 % interval (Student's t) reaches above 0. A jackknife of
    the clamped sum would be 0, or nearly so, where a difference is below 0 by chance.
    """

    name = "jump_rate"
    units = dict.fromkeys(("value", "standard_error"), "%")
    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_grouped("sums", setup.num_layers)
        self.add_grouped("counts", setup.num_layers)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        psi = angular(observation.cosines.diagonal(offset=1, dim1=1, dim2=2).double())  # [N, L]
        valid = psi.isfinite()
        member = observation.weights_by_group(self.setup)[..., 0]  # [N, G]
        self.sums += (member.T @ psi.where(valid, 0.0)).to(self.sums.device)
        self.counts += (member.T @ valid.double()).to(self.counts)

    def compute(self) -> list[Estimate]:
        """zeta_2..zeta_L."""
        counts = self.counts.sum(0)
        psi = self.sums.sum(0) / counts
        layers = range(2, len(psi) + 1)
        values = torch.tensor([jump_rate(psi, layer) for layer in layers], dtype=torch.float64)
        rates = EstimateArray.of(values, counts.min(), self._influence(psi))
        return [rates.at((layer - 2,), "value", layer) for layer in layers]

    def _influence(self, mean: Tensor) -> Tensor:
        """[G, L-1] influences on zeta_2..zeta_L, for the `mean` displacement `[L]`."""
        psi = influence_of_ratio(self.sums, self.counts)  # [G, L]
        steps = psi.diff(dim=1)
        far = quantile(independent(self.counts[:, -1].cpu())) * standard_error(steps)
        rises = mean.cpu().diff() + far > 0  # [L-1]
        return 100 * (steps * rises).flip(1).cumsum(1).flip(1)
