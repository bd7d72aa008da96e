"""Linear CKA: representational similarity of two layers (Representation progression and aligned training, Eq. 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.cosine import without_first
from fulldepth.metrics.hsic import Hsic, hsic_of, hsic_of_views
from fulldepth.metrics.hsic_blocks import HsicBlocks
from fulldepth.metrics.jackknife import leave_one_out, standard_error

NO_HSIC = 1e-13
"""A layer's HSIC with itself counts as 0 (rounding) below this fraction of the terms whose difference it is."""


def linear_cka(x: Tensor, y: Tensor, debiased: bool = False) -> Tensor:
    r"""Linear centred kernel alignment of two representations of the same `N` samples.

    .. math:: \mathrm{CKA} = \frac{\mathrm{HSIC}(K, L)}{\sqrt{\mathrm{HSIC}(K, K)\, \mathrm{HSIC}(L, L)}},
        \quad K = X X^T, \; L = Y Y^T

    With the biased HSIC (features centred) this is :math:`\|Y^T X\|_F^2 / (\|X^T X\|_F \|Y^T Y\|_F)`, which is far too
    high unless `N` is much larger than `D` and `E`: see `few_samples`. The debiased form uses the unbiased estimate

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
    return _ratio(hsic_of([x, y], debiased))[0, 1]


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
    return _ratio(hsic_of(list(features), debiased))


def few_samples(samples: int, width: int) -> bool:
    """Whether the bias dominates biased CKA: `N < 10 D`."""
    return samples < 10 * width


class Cka(Measure):
    """Debiased and biased CKA of every pair of layers; `count` is the number of tokens behind an estimate.

    The debiased estimate uses every counted token. If all of them fit into the shared sample, it is that of
    `linear_cka`. Otherwise the unbiased HSIC is averaged over blocks of sequences, weighted by their tokens (see
    `HsicBlocks`), and CKA is the ratio of these averages, with a standard error by a jackknife over groups of blocks.
    An average of unbiased estimates is unbiased whatever the size of the blocks. The biased estimate, whose bias
    depends on the number of tokens, uses the shared sample.

    Source: for the average, Nguyen, Raghu and Kornblith, "Do Wide and Deep Networks Learn the Same Things?" (ICLR
    2021), Eq. 3.
    """

    name = "cka"
    units = dict.fromkeys(("debiased", "biased", "standard_error_of_debiased"), "1")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.reservoir = setup.reservoir("residual")
        self.blocks = HsicBlocks(setup) if setup.num_tokens > setup.reservoir_tokens else None

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        self.reservoir.observe(observation, "residual")
        if self.blocks is not None:
            self.blocks.update(observation)

    def reset(self) -> None:
        """Remove all data."""
        super().reset()
        if self.blocks is not None:
            self.blocks.reset()

    def compute(self) -> dict[str, Tensor]:
        """`debiased`, `standard_error_of_debiased` (NaN without several blocks) and `biased`, each `[views, L+1, L+1]`;
        `count` and `count_biased`, `[views]`: all tokens, and without the first.
        """
        sample = self.reservoir.compute()
        features, later = sample.features.transpose(0, 1), without_first(sample)
        views = len(self.setup.views)
        biased = hsic_of_views(features, later, debiased=False)[:views]
        result = {
            "biased": torch.stack([_ratio(hsic) for hsic in biased]),
            "count_biased": torch.tensor([hsic.tokens for hsic in biased]),
        }
        if self.blocks is not None:
            return result | self._of_blocks(*self.blocks.compute())
        debiased = torch.stack([_ratio(hsic) for hsic in hsic_of_views(features, later, debiased=True)[:views]])
        error = torch.full_like(debiased, torch.nan)
        return result | {
            "debiased": debiased,
            "standard_error_of_debiased": error,
            "count": result["count_biased"],
        }

    @staticmethod
    def _of_blocks(hsic: Tensor, terms: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """The debiased statistics, from sums per group of blocks."""
        tokens = tokens.reshape(hsic.shape[:2])  # torchmetrics makes one number of a single element
        without, rest = leave_one_out(hsic), leave_one_out(terms)
        values, errors = [], []
        for view in range(hsic.shape[1]):
            value = _ratio(Hsic(hsic[:, view].sum(0), terms[:, view].sum(0), 0))
            replicates = [_ratio(Hsic(*pair, 0)) for pair in zip(without[:, view], rest[:, view], strict=True)]
            errors.append(standard_error(torch.stack(replicates)))
            values.append(value)
        return {
            "debiased": torch.stack(values),
            "standard_error_of_debiased": torch.stack(errors),
            "count": tokens.sum(0).long(),
        }

    def rows(self) -> list[Row]:
        """Rows for every pair of layers 0..L; no standard error without several blocks."""
        values = {name: value.cpu() for name, value in self.compute().items()}
        counts = {name: values.pop(name).reshape(-1).tolist() for name in ("count", "count_biased")}
        layers = range(self.setup.num_layers + 1)
        return [
            self.row(name + suffix, value, counts["count_biased" if name == "biased" else "count"][view], layer, other)
            for view, suffix in enumerate(self.setup.views)
            for layer in layers
            for other in layers
            for name in self.units
            if not math.isnan(value := float(values[name][view, layer, other])) or "error" not in name
        ]


def _ratio(hsic: Hsic) -> Tensor:
    """`[S, S]` CKA; NaN where a layer's HSIC with itself is not positive."""
    own = hsic.values.diagonal()
    norm = own.sqrt().where(own > NO_HSIC * hsic.terms, torch.nan)
    return (hsic.values / torch.outer(norm, norm)).clamp(-1.0, 1.0)
