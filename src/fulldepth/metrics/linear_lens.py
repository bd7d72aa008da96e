r"""Linear lens: a fixed map from each layer's state to the last layer's, by ridge regression, before norm and head.

.. math:: A_l, b_l = \arg\min \sum_n |h_n^{(L)} - A h_n^{(l)} - b|^2 + \lambda_l |A|^2, \qquad
    \lambda_l = s_l \, \tfrac{1}{D} \operatorname{tr} C_l

:math:`C_l` are the sums of products of the centred states of layer l. The strength :math:`s_l`, one of `STRENGTHS`,
leaves the smallest squared error on documents that are held out of the first fit; the map is then fitted on all of
them. At the last layer it is the identity.

The plain lens reads a rotated state as ignorance; a fixed map undoes what does not depend on the token.

Source: Din et al., "Jump to Conclusions" (2023, arXiv 2303.09435), `mat`; Belrose et al., "Eliciting Latent Predictions
from Transformers with the Tuned Lens" (2023, arXiv 2303.08112), which trains such maps by gradient descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fulldepth.metrics.base import Observation, Setup
from fulldepth.metrics.lens import LensAccuracy, LensLoss, LensMean
from fulldepth.metrics.reservoir import CPU, Accumulator
from fulldepth.metrics.standard_errors import Estimate, EstimateArray, influence_of_ratio

STRENGTHS = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
"""Ridges that are tried, as multiples of the mean eigenvalue of the sums of products."""
GAIN = "gain"
EARLY_GAIN = "gain_of_early_layers"
ERROR_OF = "standard_error_of_"
PARTS = 2
"""Parts of the fitting documents: those of the first fit, and those held out to choose the ridge."""


class Moments(NamedTuple):
    """Sums over N positions of a layer's states x and the last layer's states y, float64."""

    number: Tensor
    """N."""
    x: Tensor
    """[D]."""
    y: Tensor
    """[D]."""
    xx: Tensor
    """[D, D] sum of x x'."""
    xy: Tensor
    """[D, D] sum of x y'."""
    yy: Tensor
    """Sum of y' y."""

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Self:
        """The sums of states `x` and `y`, `[N, D]` each."""
        x = x.double()
        y = y.double()
        return cls(torch.tensor(float(len(x))).to(x), x.sum(0), y.sum(0), x.T @ x, x.T @ y, y.square().sum())

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Mean x and mean y, `[D]` each."""
        return self.x / self.number, self.y / self.number

    def about(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three sums of products of x and y less the given `[D]` each: `[D, D]`, `[D, D]` and a number."""
        shift = torch.outer(self.x, x)
        xx = self.xx - shift - shift.T + self.number * torch.outer(x, x)
        xy = self.xy - torch.outer(x, self.y) - torch.outer(self.x, y) + self.number * torch.outer(x, y)
        return xx, xy, self.yy - 2 * y @ self.y + self.number * y @ y


def ridge_of(products: Tensor, strength: float) -> Tensor:
    """The ridge of a strength: its multiple of the mean eigenvalue of `products [D, D]`; above 0."""
    return (strength * products.diagonal().mean()).clamp(min=1e-300)


def linear_map(moments: Moments, strength: float) -> tuple[Tensor, Tensor, float]:
    """The map from a layer's states to the last layer's, by ridge regression with an intercept.

    Args:
        moments: sums over pairs of a layer's state x and the last layer's state y.
        strength: the ridge as a multiple of the mean eigenvalue of the products of x.

    Returns:
        Weight `[D, D]` and offset `[D]`, float64, such that `x @ weight + offset` is the prediction; and the ridge.
    """
    x, y = moments.means
    products, cross, _ = moments.about(x, y)
    ridge = ridge_of(products, strength)
    factor = torch.linalg.cholesky(products + ridge * torch.eye(len(products)).to(products))
    weight = torch.cholesky_solve(cross, factor)
    return weight, y - x @ weight, float(ridge)


def choose_strength(fitted: Moments, held_out: Moments) -> tuple[float, float]:
    """The strength whose map, fitted on one part, leaves the smallest squared error on the other.

    One eigendecomposition serves all strengths: in its basis the error is a quadratic form of the shrunk eigenvalues.

    Returns:
        One of `STRENGTHS`, and the share of the held-out squared distance to the fitted mean that is left.
    """
    x, y = fitted.means
    products, cross, _ = fitted.about(x, y)
    other_products, other_cross, distance = held_out.about(x, y)
    eigenvalues, basis = torch.linalg.eigh(products)  # [D], [D, D]
    projected = basis.T @ cross
    linear = (projected * (basis.T @ other_cross)).sum(1)  # [D]
    quadratic = (basis.T @ other_products @ basis) * (projected @ projected.T)  # [D, D]
    best = (STRENGTHS[0], float("inf"))
    for strength in STRENGTHS:
        shrunk = 1 / (eigenvalues.clamp(min=0) + ridge_of(products, strength))  # [D]
        left = float(distance - 2 * shrunk @ linear + shrunk @ quadratic @ shrunk)
        if left < best[1]:
            best = (strength, left)
    return best[0], best[1] / float(distance) if distance > 0 else 0.0


class LinearMaps:
    """Fitted maps of `K` layers. (This is no tuple, because torchmetrics changes tuples that `compute` returns.)

    Attributes:
        weights: [K, D, D]; float64, or the precision that they are applied in.
        offsets: [K, D].
        strengths: the chosen strength of each layer.
        ridges: the ridge of each layer, as in scikit-learn's `Ridge(alpha)`.
        unexplained: share of the squared distance to the mean that is left on the held-out part, by the first fit.
    """

    def __init__(
        self,
        weights: Tensor,
        offsets: Tensor,
        strengths: list[float],
        ridges: list[float],
        unexplained: list[float],
    ) -> None:
        self.weights = weights
        self.offsets = offsets
        self.strengths = strengths
        self.ridges = ridges
        self.unexplained = unexplained

    def __call__(self, states: Tensor) -> Tensor:
        """Apply the maps of layers 0..L-1 to states `[L+1, N, D]`; those of the last layer stay as they are.

        They are applied in float32 (float64 for float64 states); the result has the precision of the states.
        """
        precision = torch.promote_types(states.dtype, torch.float32)
        mapped = torch.empty_like(states)
        mapped[-1] = states[-1]
        for layer, (weight, offset) in enumerate(zip(self.weights, self.offsets, strict=True)):
            weight, offset = (part.to(states.device, precision) for part in (weight, offset))
            mapped[layer] = states[layer].to(precision) @ weight + offset
        return mapped

    def to(self, dtype: torch.dtype) -> LinearMaps:
        """The maps in another precision."""
        numbers = (self.strengths, self.ridges, self.unexplained)
        return LinearMaps(self.weights.to(dtype), self.offsets.to(dtype), *numbers)

    @classmethod
    def joined(cls, parts: Sequence[LinearMaps]) -> LinearMaps:
        """The maps of consecutive groups of layers as one."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.weights for part in parts]),
            torch.cat([part.offsets for part in parts]),
            [strength for part in parts for strength in part.strengths],
            [ridge for part in parts for ridge in part.ridges],
            [share for part in parts for share in part.unexplained],
        )


class MapSums(Accumulator):
    """The sums that the maps of `K` layers need, of both parts of the fitting documents.

    Args:
        layers: K.
        width: D.
        device: of the sums; needs float64.
    """

    counts: Tensor
    sums: Tensor
    products: Tensor
    cross: Tensor
    squares: Tensor

    def __init__(self, layers: int, width: int, device: torch.device = CPU) -> None:
        super().__init__()
        self.add("counts", (PARTS,), device=device)
        self.add("sums", (PARTS, layers + 1, width), device=device)
        self.add("products", (PARTS, layers, width, width), device=device)
        self.add("cross", (PARTS, layers, width, width), device=device)
        self.add("squares", (PARTS,), device=device)

    @staticmethod
    def bytes_of_layer(width: int) -> int:
        """Bytes of the two matrices that each layer adds in each part."""
        return PARTS * 2 * width * width * torch.float64.itemsize

    def update(self, states: Sequence[Tensor], last: Tensor, held_out: Tensor) -> None:
        """Add positions.

        Args:
            states: `[N, D]` of each of the layers.
            last: `[N, D]` of the last layer.
            held_out: `[N]` bool, True for positions of documents that choose the ridge.
        """
        for part in range(PARTS):
            in_part = held_out == bool(part)  # [N]
            y = last[in_part].to(self.sums)  # [n, D]
            self.counts[part] += len(y)
            self.sums[part, -1] += y.sum(0)
            self.squares[part] += y.square().sum()
            for layer, state in enumerate(states):
                x = state[in_part].to(self.sums)  # [n, D]
                self.sums[part, layer] += x.sum(0)
                self.products[part, layer].addmm_(x.T, x)
                self.cross[part, layer].addmm_(x.T, y)

    def moments(self, layer: int) -> tuple[Moments, Moments]:
        """The sums of one of the layers, by number from 0, in the first and in the held-out part."""
        first, second = (
            Moments(
                self.counts[part],
                self.sums[part, layer],
                self.sums[part, -1],
                self.products[part, layer],
                self.cross[part, layer],
                self.squares[part],
            )
            for part in range(PARTS)
        )
        return first, second

    def compute(self) -> LinearMaps:
        """Fit the map of every layer."""
        weights = []
        offsets = []
        strengths = []
        ridges = []
        unexplained = []
        for layer in range(self.products.shape[1]):
            first, held_out = self.moments(layer)
            strength, left = choose_strength(first, held_out)
            total = Moments(*(sums[0] + sums[1] for sums in zip(first, held_out, strict=True)))
            weight, offset, ridge = linear_map(total, strength)
            weights.append(weight)
            offsets.append(offset)
            strengths.append(strength)
            ridges.append(ridge)
            unexplained.append(left)
        return LinearMaps(torch.stack(weights), torch.stack(offsets), strengths, ridges, unexplained)


class LinearLensMean(LensMean):
    """Mean of one statistic of the linear lens, and its gain over the plain lens at the same positions.

    `gain` of a layer is positive where the linear lens is better, and 0 at the last layer. `gain_of_early_layers` is
    its mean over layers 1 to L // 2. Both have a paired standard error.
    """

    needs = frozenset({"targets", "fitted_maps"})
    optional = True
    plain: Tensor
    sign: int
    """1 where larger is better, else -1."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_grouped("plain", setup.num_layers + 1)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        self.counts += self.add_readout(self.sums, observation, observation.linear_lens)
        self.add_readout(self.plain, observation, observation.lens)

    def gains(self) -> tuple[Tensor, Tensor]:
        """Sums of the gain at layers 0..L, `[G, L+1]`, and of its mean over early layers, `[G]` (NaN without any)."""
        gain = self.sign * (self.sums - self.plain)
        return gain, gain[:, 1 : self.setup.num_layers // 2 + 1].mean(1)

    def compute(self) -> list[Estimate]:
        """Mean and gain of each layer 0..L, and the gain over early layers if there are any."""
        gain, early = self.gains()
        count = self.counts.sum()
        gains = EstimateArray.of(gain.sum(0) / count, count, influence_of_ratio(gain, self.counts))
        numbers = []
        for layer, mean in enumerate(super().compute()):
            numbers += [mean, gains.at((layer,), GAIN, layer)]
        if self.setup.num_layers > 1:
            early_gain = EstimateArray.of(early.sum() / count, count, influence_of_ratio(early, self.counts[:, 0]))
            numbers.append(early_gain.at((), EARLY_GAIN))
        return numbers


STATISTICS = ("mean", "standard_error", GAIN, ERROR_OF + GAIN, EARLY_GAIN, ERROR_OF + EARLY_GAIN)


class LinearLensAccuracy(LinearLensMean, LensAccuracy):
    r"""Accuracy of the last layer's classifier g on the mapped states of layers 0..L.

    .. math:: \frac{1}{N} \sum_i [\arg\max g(A_l h_i^{(l)} + b_l) = y_i]

    Source: Din et al. (2023), Sec. 4.
    """

    name = "linear_lens_accuracy"
    units = dict.fromkeys(STATISTICS, "1")
    sign = 1


class LinearLensLoss(LinearLensMean, LensLoss):
    """Cross-entropy of the last layer's classifier on the mapped states of layers 0..L, in nats.

    Source: Belrose et al. (2023), Sec. 2, with the map in closed form.
    """

    name = "linear_lens_loss"
    units = dict.fromkeys(STATISTICS, "nats")
    sign = -1
