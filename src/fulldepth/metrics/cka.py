"""Linear CKA: representational similarity of two layers (Representation progression and aligned training, Eq. 3)."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from fulldepth.metrics.base import POSITION_BITS, Influence, Measure, Observation, Row, Setup, later_than_first
from fulldepth.metrics.hsic import Hsic, hsic_of, hsic_of_views, operations
from fulldepth.metrics.standard_errors import influence_of_estimate, standard_error

NO_HSIC = 1e-13
"""Fraction of the terms of an HSIC below which a layer's HSIC with itself is rounding and counts as 0."""
STORED = 1 << 30
"""Most bytes of tokens stored for CKA alone."""
MOST_TOKENS = 1 << 15
"""Most tokens stored for CKA alone, because the time of HSIC grows with their square."""


def linear_cka(x: Tensor, y: Tensor, debiased: bool = False) -> Tensor:
    r"""Linear centred kernel alignment of two representations of the same `N` samples.

    .. math:: \mathrm{CKA} = \frac{\mathrm{HSIC}(K, L)}{\sqrt{\mathrm{HSIC}(K, K)\, \mathrm{HSIC}(L, L)}},
        \quad K = X X^T, \; L = Y Y^T

    With the biased HSIC (features centred) this is :math:`\|Y^T X\|_F^2 / (\|X^T X\|_F \|Y^T Y\|_F)`, which is far too
    high unless `N` is at least ten times as large as `D` and `E`. The debiased form uses the unbiased estimate

    .. math:: \mathrm{HSIC}_1 = \frac{1}{N(N-3)} \Big( \langle\tilde K, \tilde L\rangle
        + \frac{1^T \tilde K 1 \; 1^T \tilde L 1}{(N-1)(N-2)} - \frac{2}{N-2} 1^T \tilde K \tilde L 1 \Big)

    with the diagonals of the Gram matrices set to zero. Both are invariant to shifts, rotations and scaling of `x` and
    `y`.

    Args:
        x: `[N, D]`.
        y: `[N, E]`, the same samples.
        debiased: use the unbiased estimate.

    Returns:
        0-d float64, unit 1: in [0, 1]; debiased in [-1, 1], around 0 for independent representations. NaN if a
        representation is constant, if its estimated HSIC with itself is not positive, or, debiased, for fewer than 4
        samples.

    Raises:
        ValueError: if `x` and `y` are not matrices over the same samples.

    Source: "Representation progression and aligned training", Eq. 3; HSIC_1 of Song et al. 2012, Eq. 5.
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ValueError(f"x and y must be [N, D] and [N, E], got {tuple(x.shape)} and {tuple(y.shape)}")
    estimates = hsic_of([x, y])
    return _ratio(estimates.debiased if debiased else estimates.biased)[0, 1]


def cka_matrix(features: Tensor, debiased: bool = True) -> Tensor:
    """Linear CKA of every pair of layers, as one product of flattened Gram matrices.

    Args:
        features: states of every layer, `[L+1, N, D]`.
        debiased: use the unbiased estimate of HSIC (see `linear_cka`).

    Returns:
        `[L+1, L+1]` float64, unit 1, symmetric; range and NaN as `linear_cka`.

    Raises:
        ValueError: if `features` is not three-dimensional.
    """
    if features.ndim != 3:
        raise ValueError(f"features must be [L+1, N, D], got {tuple(features.shape)}")
    estimates = hsic_of(list(features))
    return _ratio(estimates.debiased if debiased else estimates.biased)


TRIALS = (256, 512)
"""Numbers of tokens from which the time of all tokens is forecast."""
FORECAST = 4
"""The time is forecast only if there are at least this many times the tokens of the larger trial."""


class Cka(Measure):
    """Debiased and biased CKA of every pair of layers; `count` is the number of tokens behind an estimate.

    Both estimates are over all counted tokens, as `linear_cka` computes them, whatever the order of the data. If the
    tokens exceed `STORED` bytes or `MOST_TOKENS`, the estimates are over a uniform sample, or over the shared sample if
    it is larger. The unbiased HSIC of the sample estimates that of all tokens without bias.

    The standard error is a jackknife over groups of clusters, and includes the error of the sample.
    """

    name = "cka"
    units = dict.fromkeys(("debiased", "biased", "standard_error_of_debiased"), "1")
    steps = 100

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        room = min(STORED // (4 * (setup.num_layers + 1) * setup.width), MOST_TOKENS)
        self.tokens = setup.reservoir("residual", max(setup.reservoir_tokens, min(room, setup.num_tokens)))

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        self.tokens.observe(observation, "residual")

    def compute(self) -> dict[str, Tensor]:
        """`debiased`, `standard_error_of_debiased` (NaN without several groups) and `biased`, each
        `[views, L+1, L+1]`; `influences`, `[G, L+1, L+1]`, of `debiased` over all tokens; `count`, `[views]`: all
        tokens, and without the first.
        """
        sample = self.tokens.compute()
        group = self.setup.group_of.to(sample.keys.device)[sample.keys >> POSITION_BITS]
        done = 0

        def advance(share: float) -> None:
            nonlocal done
            further = int(share * self.steps) - done
            if further > 0:
                done += further
                self.advance(further)

        later = later_than_first(sample.keys)
        estimates = hsic_of_views(sample.features.transpose(0, 1), later, group, self.setup.groups, advance)
        views = estimates[: len(self.setup.views)]
        influences = [influence_of_estimate(_ratio(view.without)) for view in views]
        return {
            "debiased": torch.stack([_ratio(view.debiased) for view in views]),
            "standard_error_of_debiased": torch.stack([standard_error(influence) for influence in influences]),
            "biased": torch.stack([_ratio(view.biased) for view in views]),
            "influences": influences[0],
            "count": torch.tensor([view.tokens for view in views]),
        }

    def forecast(self) -> float:
        """Estimate seconds from two trials on noise: the time grows with the operations of the products."""
        setup = self.setup
        count = min(self.tokens.capacity, self.setup.num_tokens)
        if count < FORECAST * TRIALS[-1]:
            return 0.0
        seconds = []
        generator = torch.Generator(setup.device).manual_seed(0)
        for tokens in TRIALS:
            noise = torch.randn(setup.num_layers + 1, tokens, setup.width, device=setup.device, generator=generator)
            numbers = torch.arange(tokens, device=setup.device)
            start = time.perf_counter()
            hsic_of_views(noise, numbers % 2 > 0, numbers % setup.groups, setup.groups)
            seconds.append(time.perf_counter() - start)
        first, second, all_tokens = (
            min(operations(tokens, setup.width, setup.num_layers + 1, setup.groups)) for tokens in (*TRIALS, count)
        )
        return max(0.0, seconds[0] + (seconds[1] - seconds[0]) * (all_tokens - first) / (second - first))

    def rows(self) -> list[Row]:
        """Rows for every pair of layers 0..L; no standard error without several groups."""
        values = {name: value.cpu() for name, value in self.compute().items()}
        counts = values["count"].reshape(-1).tolist()
        layers = range(self.setup.num_layers + 1)
        return [
            self.row(name + suffix, value, counts[view], layer, other)
            for view, suffix in enumerate(self.setup.views)
            for layer in layers
            for other in layers
            for name in self.units
            if not math.isnan(value := float(values[name][view, layer, other])) or "error" not in name
        ]

    def influences(self) -> list[Influence]:
        """Influences on `debiased` of every layer with the next and with the last, if an error is known."""
        values = self.compute()["influences"]
        last = self.setup.num_layers
        pairs = [pair for layer in range(last) for pair in dict.fromkeys([(layer, layer + 1), (layer, last)])]
        return [
            Influence(self.name, "residual", *pair, "debiased", values[:, *pair].tolist())
            for pair in pairs
            if bool(standard_error(values[:, *pair]).isfinite())
        ]


def _ratio(hsic: Hsic) -> Tensor:
    """`[..., S, S]` CKA; NaN where a layer's HSIC with itself is not positive."""
    with_itself = hsic.values.diagonal(dim1=-2, dim2=-1)  # [..., S]
    norm = with_itself.sqrt().where(with_itself > NO_HSIC * hsic.terms, torch.nan)
    return (hsic.values / (norm[..., :, None] * norm[..., None, :])).clamp(-1.0, 1.0)
