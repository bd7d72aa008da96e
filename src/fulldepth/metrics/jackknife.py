"""Standard errors over sequences, by a delete-group jackknife on sums that are accumulated per group of sequences.

Sequence `i` of the data set belongs to group `i % G`, with `G = min(n, 16)` groups for `n` sequences. A measure keeps
its sums per group; the sums over all groups give the estimate, the sums over all groups but one give a replicate. Sums
per group are additive, so the standard error does not depend on batches or processes. Sequences are treated as
independent: the standard error is too small if they are correlated, as windows cut from one document are.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUPS = 16
"""Maximum number of groups. With 16, a standard error is itself uncertain by about 18 per cent."""


def group_sizes(sequences: int) -> Tensor:
    """`[G]` float64: number of sequences in each group; `G = 1` for a single sequence."""
    groups = min(max(sequences, 1), GROUPS)
    return torch.tensor([float(len(range(group, sequences, groups))) for group in range(groups)], dtype=torch.float64)


def leave_one_out(sums: Tensor) -> Tensor:
    """`[G, ...]`: for each group, the sum over all other groups, from sums per group `[G, ...]`."""
    return sums.sum(0) - sums


def deviations(whole: Tensor, without: Tensor, sizes: Tensor) -> Tensor:
    r"""Jackknife deviation of every group; the squared standard error is the sum of their squares over groups.

    .. math:: \delta_j = \frac{\tilde\theta_j - \bar\theta}{\sqrt{G (h_j - 1)}}, \quad h_j = n / m_j, \quad
        \tilde\theta_j = h_j \hat\theta - (h_j - 1) \hat\theta_{-j}, \quad \bar\theta = \sum_j \tilde\theta_j / h_j

    Args:
        whole: the estimate on all sequences, `[...]`.
        without: the estimates without each group, `[G, ...]`.
        sizes: sequences in each group, :math:`m_j`, `[G]`; :math:`n` is their sum.

    Returns:
        `[G, ...]` float64; NaN for a single group, or if an estimate is NaN.

    Source: Busing, Meijer and van der Leeden, "Delete-m jackknife for unequal m", Statistics and Computing 9 (1999).
    """
    whole, without = whole.double(), without.double()
    if len(sizes) < 2:
        return torch.full_like(without, torch.nan)
    ratio = (sizes.sum() / sizes).to(without.device).view(-1, *[1] * whole.ndim)  # h_j
    pseudo = ratio * whole - (ratio - 1) * without
    centre = (pseudo / ratio).sum(0)
    return (pseudo - centre) / (len(sizes) * (ratio - 1)).sqrt()


def standard_error(whole: Tensor, without: Tensor, sizes: Tensor) -> Tensor:
    r"""Standard error of an estimate over sequences, by the delete-group jackknife.

    .. math:: \mathrm{SE}^2 = \frac{1}{G} \sum_j \frac{(\tilde\theta_j - \bar\theta)^2}{h_j - 1}

    With groups of equal size this is the usual :math:`\frac{G-1}{G} \sum_j (\hat\theta_{-j} - \bar\theta_{-})^2`; for a
    mean over groups of one sequence it is the sample standard deviation over :math:`\sqrt{n}`.

    Args:
        whole: see `deviations`.
        without: see `deviations`.
        sizes: see `deviations`.

    Returns:
        `[...]` float64, in the estimate's unit, at least 0; NaN for a single group, or if an estimate is NaN.
    """
    return deviations(whole, without, sizes).square().sum(0).sqrt()


def ratio_error(sums: Tensor, counts: Tensor, sizes: Tensor) -> Tensor:
    """Standard error of `sums.sum(0) / counts.sum(0)`, from sums and counts per group, `[G, ...]` each."""
    return standard_error(sums.sum(0) / counts.sum(0), leave_one_out(sums) / leave_one_out(counts), sizes)


def error_of_channel_mean(whole: Tensor, without: Tensor, sizes: Tensor, channels: int) -> Tensor:
    r"""Standard error of a mean over :math:`D` channels, from replicates of `C` evenly spaced ones.

    .. math:: \mathrm{SE}^2 = \frac{v}{D} + \left(1 - \frac{1}{D}\right) \max(0, c)

    :math:`v` is the mean jackknife variance of a channel, :math:`c` the mean jackknife covariance of two different
    channels. For `C = D` this is the plain standard error of the mean.

    Args:
        whole: estimates of the `C` channels, `[..., C]`.
        without: the same without each group, `[G, ..., C]`.
        sizes: sequences in each group, `[G]`.
        channels: D.

    Returns:
        `[...]` float64.
    """
    deviation = deviations(whole, without, sizes)
    sampled = whole.shape[-1]
    squared = deviation.mean(-1).square().sum(0)
    if sampled == channels or sampled < 2:
        return squared.sqrt()
    variance = deviation.square().sum(0).mean(-1)
    covariance = ((squared - variance / sampled) / (1 - 1 / sampled)).clamp(min=0)
    return (variance / channels + (1 - 1 / channels) * covariance).sqrt()
