"""Linear CKA: representational similarity of two layers (Representation progression and aligned training, Eq. 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.cosine import centred, without_first

BLOCK = 1 << 20
"""Gram matrix elements held at a time (all layers together)."""
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
    features = _prepare([x, y])
    return _alignment(_products(features, 0, len(x)), features, debiased)[0, 1]


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
    layers = _prepare(features)
    return _alignment(_products(layers, 0, features.shape[1]), layers, debiased)


def few_samples(samples: int, width: int) -> bool:
    """Whether the bias dominates biased CKA: `N < 10 D`."""
    return samples < 10 * width


class Cka(Measure):
    """Debiased and biased CKA of every pair of layers over the shared sample of tokens, whose size is `count`."""

    name = "cka"
    units = dict.fromkeys(("debiased", "biased"), "1")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.reservoir = setup.reservoir("residual")

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        self.reservoir.observe(observation, "residual")

    def compute(self) -> dict[str, Tensor]:
        """`debiased` and `biased`, each `[views, L+1, L+1]`, and `count [2]`: all tokens, and without the first."""
        sample = self.reservoir.compute()
        later = without_first(sample)
        # First tokens are sorted to the front; the remaining Gram rows are the second view, so one pass gives both.
        order = later.long().argsort(stable=True)
        total, first = len(later), int((~later).sum())
        layers = _prepare(sample.features[order].transpose(0, 1))
        rest = _products(layers, first, total)
        views = [(rest + _products(layers, 0, first), layers)]
        if self.setup.first_tokens:
            views.append((rest, [layer[first:] for layer in layers]))
        return {
            "debiased": torch.stack([_alignment(*view, debiased=True) for view in views]),
            "biased": torch.stack([_alignment(*view, debiased=False) for view in views]),
            "count": torch.tensor([total, total - first]),
        }

    def rows(self) -> list[Row]:
        """Rows for every pair of layers 0..L."""
        values = {name: value.cpu() for name, value in self.compute().items()}
        counts = values.pop("count").tolist()
        layers = range(self.setup.num_layers + 1)
        return [
            self.row(name + suffix, value[view, layer, other], counts[view], layer, other)
            for view, suffix in enumerate(self.setup.views)
            for layer in layers
            for other in layers
            for name, value in values.items()
        ]


def _prepare(features: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Each layer's features `[N, D]` in float64, centred: CKA is unchanged, and Gram matrices lose fewer digits."""
    return [centred(layer, layer.mean(0, dtype=torch.float64)) for layer in features]


def _products(features: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """`[S, S]` sums of `K_ij L_ij` over `i != j` for all pairs of Gram matrices, with the smaller of `i, j` in
    start..stop.

    Only a block of rows of all Gram matrices, right of the diagonal, exists at a time.
    """
    samples = len(features[0])
    total = features[0].new_zeros(len(features), len(features))
    while start < stop:
        rows = min(stop - start, max(1, BLOCK // (len(features) * (samples - start))))
        block = torch.stack([x[start : start + rows] @ x[start:].T for x in features])  # [S, rows, N - start]
        flat = block.triu_(1).flatten(1)
        total += flat @ flat.T
        start += rows
    return 2 * total


def _alignment(products: Tensor, features: Sequence[Tensor], debiased: bool) -> Tensor:
    """`[S, S]` CKA from the off-diagonal products of the Gram matrices; the rest of HSIC follows from the features.

    Both estimates are `<K, L> - 2/a r_K . r_L + s_K s_L / b` with row sums `r` and their total `s`: the biased one with
    `a = N, b = N^2`, the unbiased one without the diagonals and with `a = N - 2, b = (N - 1)(N - 2)`.
    """
    samples = len(features[0])
    if samples < (4 if debiased else 2):
        return torch.full_like(products, torch.nan)
    diagonal = torch.stack([x.square().sum(1) for x in features])  # [S, N]
    row_sums = torch.stack([x @ x.sum(0) for x in features])
    if debiased:
        row_sums -= diagonal
        by_row, by_total = samples - 2, (samples - 1) * (samples - 2)
    else:
        products = products + diagonal @ diagonal.T
        by_row, by_total = samples, samples**2
    totals = row_sums.sum(1)
    correction = 2 / by_row * (row_sums @ row_sums.T)
    hsic = products - correction + torch.outer(totals, totals) / by_total
    own, terms = hsic.diagonal(), (products + correction).diagonal()
    norm = own.sqrt().where(own > NO_HSIC * terms, torch.nan)
    return (hsic / torch.outer(norm, norm)).clamp(-1.0, 1.0)
