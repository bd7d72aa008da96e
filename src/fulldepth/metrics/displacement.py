"""Displacement of the residual stream by a layer (JREG, Eq. 2), and norm of the stream over that of the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from fulldepth.metrics.base import Means, Observation, Place, Setup, angular, cosine
from fulldepth.metrics.standard_errors import EstimateArray

BINS = 1 << 15
"""Histogram bins for the percentiles. Those of displacements are uniform in sqrt(displacement): finest near 0."""
LARGEST = 14.0
"""Norm ratios beyond `exp(-14)` and `exp(14)` are counted in the outermost bins, which are uniform in the logarithm."""
PERCENTILES = {"p05": 0.05, "p50": 0.50, "p95": 0.95}


def displacement(h_in: Tensor, h_out: Tensor) -> Tensor:
    r"""Angular displacement of every token, in [0, 1].

    .. math:: \Psi_l = 1 - \frac{1 + \cos(h_{l-1}, h_l)}{2}

    0 = same direction, 1/2 = orthogonal, 1 = opposite; invariant to positive scaling of either state.

    States that are not float64 are read in float32, whose squares hold norms from 1e-16 to 1e18. Beyond, values lose
    digits, and soon they are NaN, 0 or infinite: give such states in float64.

    Args:
        h_in: residual stream before the layer, `[..., D]`.
        h_out: residual stream after the layer (before the final norm), same shape.

    Returns:
        `[...]`, unit 1; NaN where a state is zero, because it has no direction, or so small or large that its squares
        are zero or infinite in float32. Means of displacements, in measures and penalties, exclude such tokens.

    Raises:
        ValueError: if the shapes differ.

    Source: "JREG: final-layer jumps", Eq. 2.
    """
    h_in, h_out = _of_one_shape(h_in, h_out)
    return angular(cosine((h_in * h_out).sum(-1), h_in.norm(dim=-1), h_out.norm(dim=-1)))


def _of_one_shape(h_in: Tensor, h_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return both states in float32, or in float64 if they are float64."""
    if h_in.shape != h_out.shape:
        raise ValueError(f"h_in and h_out must have one shape, got {tuple(h_in.shape)} and {tuple(h_out.shape)}")
    return (h_in, h_out) if h_in.dtype == torch.float64 else (h_in.float(), h_out.float())


class Displacement(Means):
    """Mean, its standard error over sequences, standard deviation and percentiles of every layer's displacement.

    Percentiles come from a histogram of `sqrt(psi)` with 2^15 bins: within `2^-14 * sqrt(psi)` of the exact ones.
    Site `final_normed` is layer L again, with the final norm applied to `h_L`.
    """

    name = "displacement"
    units = dict.fromkeys(("mean", "standard_error", "std", "p05", "p50", "p95"), "1")
    sites = ("residual", "final_normed")
    squares: Tensor
    histogram: Tensor

    def __init__(self, setup: Setup) -> None:
        layers = setup.num_layers + 1  # the last row is layer L after the final norm
        super().__init__(setup, layers, 2)
        self.add_sum("squares", layers, 2)
        self.add_sum("histogram", 2, layers, BINS, dtype=torch.int64)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        adjacent = observation.cosines.diagonal(offset=1, dim1=1, dim2=2)  # [N, L]
        if "final_normed" in observation.states:
            normed = observation.features("final_normed")[0]
            last = 1 - 2 * displacement(observation.tokens[-2], normed)
        else:
            last = torch.full_like(adjacent[:, 0], torch.nan)
        cosines = torch.cat([adjacent, last[:, None]], dim=1).T.double()  # [L+1, N]
        psi = angular(cosines).to(self.sums.device)
        self.add_tokens(psi, observation)
        valid = psi.isfinite()
        psi = psi.where(valid, 0.0)
        weights = observation.view_weights.to(psi.device)
        self.squares += psi.square() @ weights
        _count(self.histogram, psi.sqrt(), valid, weights)

    def further(self, means: EstimateArray) -> dict[str, Tensor]:
        """Standard deviation and percentiles."""
        std = (self.squares.cpu() / means.counts - means.values.square()).clamp(min=0).sqrt()
        return {"std": std} | _percentiles(self.histogram, torch.square)

    def places(self, counts: Tensor) -> Iterator[Place]:
        """Layers 1..L in every view, each view with layer L after the final norm, if it was captured."""
        layers = self.setup.num_layers
        for place in super().places(counts):
            yield place
            if place.layer == layers and counts[layers, place.at[1]]:
                yield place._replace(at=(layers, place.at[1]), site="final_normed")


def _count(histogram: Tensor, places: Tensor, valid: Tensor, weights: Tensor) -> None:
    """Add a batch to histograms `[2, K, BINS]`, one for each view.

    Args:
        histogram: updated in place.
        places: `[K, N]` places of the values on an axis from 0 to 1, which the bins divide.
        valid: `[K, N]` bool, False for values that do not count.
        weights: `[N, 2]` 1 where a token belongs to the view, else 0.
    """
    rows = len(places)
    bins = (places.clamp(0, 1) * BINS).long().clamp(max=BINS - 1)
    bins += torch.arange(rows, device=places.device)[:, None] * BINS
    for view in range(2):
        counted = bins[valid & (weights[:, view] > 0)]
        histogram[view] += counted.bincount(minlength=rows * BINS).view(rows, BINS)


def _percentiles(histogram: Tensor, value_at: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Statistic -> `[K, 2]` percentiles of histograms `[2, K, BINS]`; `value_at` gives the value at a place."""
    return {name: _percentile(histogram, share, value_at).T for name, share in PERCENTILES.items()}


def _percentile(histogram: Tensor, share: float, value_at: Callable[[Tensor], Tensor]) -> Tensor:
    """[...] quantile of histograms `[..., BINS]`, interpolated linearly (numpy's default); NaN if empty."""
    cumulative = histogram.cumsum(-1)
    total = cumulative[..., -1:]
    rank = share * (total - 1).clamp(min=0).double()
    ends = []  # [..., 1] the values at the ranks below and above, with values spread evenly over their bin
    for whole in (rank.floor().long(), rank.ceil().long()):
        index = (cumulative <= whole).sum(-1, keepdim=True).clamp(max=BINS - 1)
        count = histogram.gather(-1, index)
        inside = (whole - cumulative.gather(-1, index) + count + 0.5).double() / count
        ends.append(value_at((index + inside.clamp(0, 1)) / BINS))
    below, above = ends
    return torch.lerp(below, above, rank - rank.floor()).where(total > 0, torch.nan)[..., 0]


def norm_ratio(h_in: Tensor, h_out: Tensor) -> Tensor:
    r"""Norm of the stream over the norm of the layer's update, per token.

    .. math:: r_l = \frac{\|h_{l-1}\|}{\|h_l - h_{l-1}\|}

    Large = the layer hardly changes the stream; 1 = the update's norm equals the input's.

    States that are not float64 are read in float32, whose squares hold norms of state and
    update from 1e-16 to 1e18. Beyond, values lose digits, and soon they are NaN, 0 or infinite: give such states in
    float64.

    Args:
        h_in: residual stream before the layer, `[..., D]`.
        h_out: residual stream after the layer, same shape.

    Returns:
        `[...]`, unit 1, in [0, inf]; inf where the update is exactly zero, NaN where the stream is zero too.

    Raises:
        ValueError: if the shapes differ.

    Source: "Representation progression and aligned training", Fig. 11.
    """
    h_in, h_out = _of_one_shape(h_in, h_out)
    # |y|^2 - 2xy + |x|^2 would suffer from cancellation for small updates.
    return torch.linalg.vector_norm(h_in, dim=-1) / torch.linalg.vector_norm(h_out - h_in, dim=-1)


class NormRatio(Means):
    """Mean norm ratio of every layer over tokens, with its standard error and percentiles; tokens whose update is
    exactly zero are excluded.

    Percentiles come from a histogram of the logarithm: within 0.1 % of the exact ones between `exp(-14)` and `exp(14)`.
    """

    name = "norm_ratio"
    units = dict.fromkeys(("mean", "standard_error", *PERCENTILES), "1")
    histogram: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("histogram", 2, setup.num_layers, BINS, dtype=torch.int64)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        tokens = observation.tokens
        # One layer at a time: faster than the difference of all layers at once, and with less memory.
        ratio = torch.stack([norm_ratio(h_in, h_out) for h_in, h_out in pairwise(tokens)])  # [L, N]
        ratio = ratio.double().to(self.sums.device)
        self.add_tokens(ratio, observation)
        valid = ratio.isfinite()
        places = (ratio.where(valid, 1.0).log() / LARGEST + 1) / 2
        _count(self.histogram, places, valid, observation.view_weights.to(ratio.device))

    def further(self, means: EstimateArray) -> dict[str, Tensor]:
        """Percentiles."""
        return _percentiles(self.histogram, lambda place: (LARGEST * (2 * place - 1)).exp())
