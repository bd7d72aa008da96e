"""Standard errors of tensors of sums per group of clusters; the formulas are in `fulldepth.core.uncertainty`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.core import uncertainty


def leave_one_out(sums: Tensor) -> Tensor:
    """`[G, ...]`: for each group, the sum over all other groups, from sums per group `[G, ...]`."""
    return sums.sum(0) - sums


def influence_of_ratio(sums: Tensor, counts: Tensor) -> Tensor:
    """`[G, ...]` float64: influences on `sums.sum(0) / counts.sum(0)`, see `uncertainty.ratio_influence`."""
    return torch.from_numpy(uncertainty.ratio_influence(sums.cpu().numpy(), counts.cpu().numpy()))


def influence_of_estimate(without: Tensor) -> Tensor:
    """`[G, ...]` float64: influences on an estimate, from the estimates without each group, `[G, ...]`."""
    return torch.from_numpy(uncertainty.jackknife_influence(without.double().cpu().numpy()))


def standard_error(influence: Tensor) -> Tensor:
    """`[...]` float64: standard error, in the estimate's unit, from influences `[G, ...]`; NaN for too few groups."""
    return torch.from_numpy(uncertainty.error_of(influence.cpu().numpy()))


def influence_of_channel_mean(without: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    r"""Influences on, and standard error of, a mean over :math:`D` channels, from `C` evenly spaced ones.

    .. math:: \mathrm{SE}^2 = \frac{v}{D} + \left(1 - \frac{1}{D}\right) \max(0, c)

    :math:`v` is the mean jackknife variance of a channel, :math:`c` the mean jackknife covariance of two different
    channels. For `C = D` this is the plain standard error of the mean. For fewer, the influences are those of the mean
    over the `C` channels, scaled to the standard error.

    Args:
        without: estimates of the `C` channels without each group, `[G, ..., C]`.
        channels: D.

    Returns:
        Influences `[G, ...]` and standard error `[...]`, float64.
    """
    influence = influence_of_estimate(without)
    sampled = influence.shape[-1]
    of_mean = influence.mean(-1)
    plain = standard_error(of_mean)
    if sampled == channels or sampled < 2:
        return of_mean, plain
    variance = standard_error(influence).square().mean(-1)
    covariance = ((plain.square() - variance / sampled) / (1 - 1 / sampled)).clamp(min=0)
    error = (variance / channels + (1 - 1 / channels) * covariance).sqrt()
    return of_mean * (error / plain).nan_to_num(1.0), error


@dataclass(frozen=True)
class Mean:
    """A number of samples, with its standard error over clusters; None for fewer than three of them."""

    value: float
    error: float | None
    groups: float = 0
    """Number of groups of clusters for Student's t (`uncertainty.independent`)."""
    samples: int = 0

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of a difference of shares (`uncertainty.share_interval`); None without a standard error."""
        if self.error is None:
            return None
        return uncertainty.share_interval(self.value, self.error, self.groups, self.samples)

    @classmethod
    def of(cls, values: Tensor, cluster: Tensor) -> Mean:
        """Return the mean of `values: [N]`.

        Args:
            values: the number of each sample.
            cluster: `[N]` int64 identity of each sample's unit of independence (see `fulldepth.core.uncertainty`).
        """
        group = torch.from_numpy(uncertainty.deal(cluster.cpu().numpy()))  # [N]
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, values.double())
        weights = group.bincount()
        error = float(standard_error(influence_of_ratio(sums, weights)))
        groups = uncertainty.independent(weights.numpy())
        return cls(float(values.double().mean()), error if math.isfinite(error) else None, groups, len(values))


class Estimate(NamedTuple):
    """A number of a measure with its standard error and influences, from which its rows are made."""

    statistic: str
    value: float
    count: int  # type: ignore[assignment]  # the column's name, not tuple.count
    layer: int | None = None
    other: int | None = None
    site: str = "residual"
    error: float = math.nan
    """NaN if it is not known."""
    influences: list[float] | None = None
    """[G] influences of the groups of clusters; None if they are not stored."""


class EstimateArray(NamedTuple):
    """Numbers of one kind with their standard errors."""

    values: Tensor
    """[...]"""
    counts: Tensor
    """[...] number of samples behind each value."""
    errors: Tensor
    """[...] standard errors."""
    influences: Tensor
    """[..., G]"""

    @classmethod
    def of(cls, values: Tensor, counts: Tensor, influences: Tensor) -> EstimateArray:
        """Make the record from values, counts, which broadcast to them, and influences `[G, ...]`."""
        counts = counts.cpu().expand(values.shape)
        return cls(values.cpu(), counts, standard_error(influences), influences.movedim(0, -1))

    def at(self, index: tuple[int, ...], statistic: str, layer: int | None = None, site: str = "residual") -> Estimate:
        """Return the number at an index."""
        return Estimate(
            statistic,
            float(self.values[index]),
            int(self.counts[index]),
            layer,
            site=site,
            error=float(self.errors[index]),
            influences=self.influences[index].tolist(),
        )
