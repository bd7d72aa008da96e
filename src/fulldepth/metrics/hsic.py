"""HSIC of every pair of layers, from their linear Gram matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 23
"""Gram matrix elements held at a time (all layers together)."""
LOUD = 100.0
"""Squared norm, over the median's, from which a token counts as an outlier when features are centred."""
PART = 128
"""Tokens that are converted to float64 at a time."""
CANCELS = 1e-2
"""In float32 a layer's HSIC with itself must be at least this fraction of the terms whose difference it is."""


class Hsic(NamedTuple):
    """HSIC of every pair of layers over one set of tokens, up to the same factor for all pairs."""

    values: Tensor
    """[S, S] float64; NaN with too few tokens."""
    terms: Tensor
    """[S] size of the terms whose difference a layer's HSIC with itself is: below their rounding, it is 0."""
    tokens: int


class Layer(NamedTuple):
    """A layer's tokens, centred over all of them and scaled to unit mean square, as Gram matrices are made of them."""

    features: Tensor
    """[N, D], in the precision of the products."""
    squares: Tensor
    """[N] float64: diagonal of the Gram matrix."""
    row_sums: tuple[Tensor, Tensor]
    """Row sums of the Gram matrix, [N], and of the one without the first tokens, [N - F]; float64."""
    scale: Tensor
    """0-d: what the Gram matrix was divided by."""


def hsic_of_views(features: Tensor, later: Tensor, debiased: bool, index: Tensor | None = None) -> tuple[Hsic, Hsic]:
    r"""HSIC of every pair of layers, over all tokens and over those that are not the first of their sequence.

    .. math:: \langle K, L \rangle - \frac{2}{a} r_K \cdot r_L + \frac{s_K s_L}{b}

    with row sums :math:`r` and their total :math:`s`. The biased estimate has :math:`a = N, b = N^2`; the unbiased one
    has the diagonals set to zero, :math:`a = N - 2, b = (N - 1)(N - 2)`, and is divided by :math:`N (N - 3)`. Products
    are in float32 (float64 for float64 features), and in float64 for all layers if one loses more than two digits by
    cancellation; everything else is in float64.

    Args:
        features: `[S, N, D]`.
        later: `[N]` bool: False for first tokens.
        debiased: the unbiased estimate.
        index: `[n]` which of the `N` tokens to read; None = all.
    """
    index = torch.arange(len(later), device=later.device) if index is None else index
    # First tokens are sorted to the front; the remaining Gram rows are the second view, so one pass gives both.
    later = later[index]
    index = index[later.long().argsort(stable=True)].to(features.device)
    first = int((~later).sum())

    def found(dtype: torch.dtype) -> tuple[Hsic, Hsic]:
        # One allocation for all layers: many smaller ones stay with the process when they are freed.
        room = features.new_empty(len(features), len(index), features.shape[2], dtype=dtype)
        for copy, layer in zip(room, features, strict=True):
            for some, tokens in zip(copy.split(PART), index.split(PART), strict=True):
                some.copy_(layer[tokens])
        return _hsic(room, first, debiased)

    if features.dtype != torch.float64:
        quick = found(torch.float32)
        if not any(bool((hsic.values.diagonal() < CANCELS * hsic.terms).any()) for hsic in quick):
            return quick
    return found(torch.float64)


def hsic_of(features: Sequence[Tensor], debiased: bool, dtype: torch.dtype = torch.float64) -> Hsic:
    """HSIC of every pair of representations of the same tokens, `[N, D]` each, with products in `dtype` or better."""
    return _hsic([layer.to(torch.promote_types(dtype, layer.dtype), copy=True) for layer in features], 0, debiased)[0]


def _hsic(features: Sequence[Tensor] | Tensor, first: int, debiased: bool) -> tuple[Hsic, Hsic]:
    """Over all tokens and without the `first` ones, with products in the features' precision; they are overwritten."""
    layers = [_layer(layer, first) for layer in features]
    total = len(layers[0].features)
    rest = _products(layers, first, total)
    whole = rest if not first else rest + _products(layers, 0, first)
    return _assemble(whole, layers, 0, debiased), _assemble(rest, layers, first, debiased)


def _layer(x: Tensor, first: int) -> Layer:
    """Centre, scale and round in place: HSIC is the same for any centre, and Gram matrices lose fewer digits.

    A centre may be rounded, because the difference of close numbers is exact.
    """
    before = _squares(x)
    x -= (_sum(x) / len(x)).to(x)
    squares = _squares(x)
    noise = squares <= (4 * torch.finfo(x.dtype).eps) ** 2 * before
    middle = squares.median()
    if bool(squares.max() > LOUD * middle > 0):
        # Outliers move the mean far from all other tokens.
        weights = 1 / (squares + middle)
        x -= (_sum(x, weights) / weights.sum()).to(x)
        squares = _squares(x)
    x.masked_fill_(noise[:, None], 0.0)
    scale = squares.masked_fill_(noise, 0.0).mean()
    scale = scale.where(scale > 0, 1.0)
    x *= scale.rsqrt()
    row_sums = (_times(x, _sum(x)), _times(x[first:], _sum(x[first:])))
    return Layer(x, _squares(x), row_sums, scale)


def _squares(x: Tensor) -> Tensor:
    """[N] float64 squared norms."""
    return torch.cat([part.double().square().sum(1) for part in x.split(PART)])


def _sum(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """[D] float64 sum over tokens, weighted by `[N]`."""
    total = x.new_zeros(x.shape[1], dtype=torch.float64)
    for number, part in enumerate(x.split(PART)):
        part = part.double()
        total += part.sum(0) if weights is None else weights[number * PART : (number + 1) * PART] @ part
    return total


def _times(x: Tensor, vector: Tensor) -> Tensor:
    """[N] float64 products of the tokens with a vector `[D]`."""
    return torch.cat([part.double() @ vector for part in x.split(PART)])


def _products(layers: Sequence[Layer], start: int, stop: int) -> Tensor:
    """`[S, S]` float64 sums of `K_ij L_ij` over `i != j` for all pairs of Gram matrices, with the smaller of `i, j` in
    start..stop.

    Only a block of rows of all Gram matrices, right of the diagonal, exists at a time, in memory that all blocks share:
    blocks of different sizes would stay with the process when they are freed. Products are summed in float64 over rows,
    because float32 loses a digit over millions of them.
    """
    features = [layer.features for layer in layers]
    samples, count = len(features[0]), len(features)
    total = features[0].new_zeros(count, count, dtype=torch.float64)
    room = features[0].new_empty(max(BLOCK, count * samples))
    while start < stop:
        width = samples - start
        rows = min(stop - start, max(1, BLOCK // (count * width)))
        block = room[: rows * count * width].view(rows, count, width)
        for number, x in enumerate(features):
            torch.mm(x[start : start + rows], x[start:].T, out=block[:, number])
        block[..., :rows].transpose(0, 1).triu_(1)
        total += torch.bmm(block, block.mT).sum(0, dtype=torch.float64)
        start += rows
    return 2 * total


def _assemble(products: Tensor, layers: Sequence[Layer], first: int, debiased: bool) -> Hsic:
    """HSIC without the `first` tokens, from the off-diagonal products; see `hsic_of_views`."""
    squares = torch.stack([layer.squares[first:] for layer in layers])  # [S, N]
    row_sums = torch.stack([layer.row_sums[bool(first)] for layer in layers])
    samples = squares.shape[1]
    if samples < (4 if debiased else 2):
        empty = torch.full_like(products, torch.nan)
        return Hsic(empty, empty[0], samples)
    if debiased:
        row_sums = row_sums - squares
        by_row, by_total, divisor = samples - 2, (samples - 1) * (samples - 2), samples * (samples - 3)
    else:
        products = products + squares @ squares.T
        by_row, by_total, divisor = samples, samples**2, samples**2
    totals = row_sums.sum(1)
    correction = 2 / by_row * (row_sums @ row_sums.T)
    hsic = products - correction + torch.outer(totals, totals) / by_total
    scale = torch.stack([layer.scale for layer in layers]) / divisor**0.5
    return Hsic(hsic * torch.outer(scale, scale), (products + correction).diagonal() * scale.square(), samples)
