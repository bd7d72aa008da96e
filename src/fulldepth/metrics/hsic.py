"""HSIC of every pair of layers, from their linear Gram matrices, with and without each group of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 23
"""Gram matrix elements held at a time (all layers together)."""
LOUD = 100.0
"""Ratio of a token's squared norm to the median, above which features are centred robustly."""
PART = 128
"""Tokens that are converted to float64 at a time."""
PASSES = 40
"""Cost of reading a group's products of channels, in operations for each of their elements."""
CANCELS = 1e-2
"""Smallest ratio of a layer's HSIC with itself to the terms it is a difference of, for which float32 is used."""


class Hsic(NamedTuple):
    """HSIC of every pair of layers over one set of tokens."""

    values: Tensor
    """[..., S, S] float64; NaN with too few tokens."""
    terms: Tensor
    """[..., S] size of the terms whose difference is a layer's HSIC with itself, which is 0 below their rounding."""


class Estimates(NamedTuple):
    """Both estimates of HSIC over one set of tokens."""

    tokens: int
    debiased: Hsic
    without: Hsic
    """The debiased estimate without each group of tokens, [G, S, S]."""
    biased: Hsic


class Sums(NamedTuple):
    r"""Sums over tokens from which HSIC is computed, for Gram matrices `K`, `L` of all pairs of layers."""

    tokens: Tensor
    """[...] float64: N."""
    products: Tensor
    r"""[..., S, S]: :math:`\sum_{i \ne j} K_{ij} L_{ij}`."""
    rows: Tensor
    """[..., S, S]: inner products of the row sums of `K` and `L`, without their diagonals."""
    totals: Tensor
    """[..., S]: sum of `K` without its diagonal."""


def unbiased(sums: Sums) -> Hsic:
    r"""The unbiased estimate, of Gram matrices whose diagonals are set to zero.

    .. math:: \mathrm{HSIC}_1 = \frac{1}{N(N-3)} \Big( \sum_{i \ne j} K_{ij} L_{ij} - \frac{2}{N-2} r_K \cdot r_L
        + \frac{s_K s_L}{(N-1)(N-2)} \Big)

    with row sums :math:`r` and their total :math:`s`. It is a U-statistic: its expectation over samples of any size is
    that of the population, and over uniform samples of a set of tokens that of the set.

    Source: Song et al., "Feature Selection via Dependence Maximization" (2012), Eq. 5.
    """
    n = sums.tokens
    return _hsic_of(sums, 4, n - 2, (n - 1) * (n - 2), n * (n - 3))


def biased(sums: Sums) -> Hsic:
    r"""The biased estimate, from sums that include the diagonals.

    It is the formula of `unbiased` with :math:`1/N^2` for the first factor, :math:`N` for :math:`N - 2` and :math:`N^2`
    for :math:`(N - 1)(N - 2)`.
    """
    n = sums.tokens
    return _hsic_of(sums, 2, n, n**2, n**2)


def _hsic_of(sums: Sums, fewest: int, by_row: Tensor, by_total: Tensor, divisor: Tensor) -> Hsic:
    """HSIC from its terms and their divisors; NaN for fewer than `fewest` tokens."""
    divisor = divisor.where(sums.tokens >= fewest, torch.nan)
    rows = sums.rows * (2 / by_row)[..., None, None]
    totals = sums.totals[..., :, None] * sums.totals[..., None, :] / by_total[..., None, None]
    terms = (sums.products + rows).diagonal(dim1=-2, dim2=-1)
    return Hsic((sums.products - rows + totals) / divisor[..., None, None], terms / divisor[..., None])


class LayerSums(NamedTuple):
    """A layer's tokens, centred and scaled to unit mean square, from which its Gram matrix is computed."""

    features: Tensor
    """[N, D], in the precision of the products."""
    squares: Tensor
    """[N] float64: diagonal of the Gram matrix."""
    scale: Tensor
    """0-d: divisor of the Gram matrix."""


def hsic_of_views(
    features: Tensor, later: Tensor, group: Tensor, groups: int, advance: Callable[[float], None] = lambda done: None
) -> tuple[Estimates, Estimates]:
    """HSIC of every pair of layers, over all tokens and over those that are not the first of their sequence.

    Products are in float32 (float64 for float64 features), and in float64 for all layers if one loses more than two
    digits by cancellation; everything else is in float64.

    Args:
        features: `[S, N, D]`.
        later: `[N]` bool: False for first tokens.
        group: `[N]` int64 in 0..groups-1: the group of each token.
        groups: G.
        advance: called with the share of the products that are done, which falls to 0 if they are repeated in float64.
    """
    device = features.device
    runs = (group + groups * later).to(device)  # first tokens come first, then by group, so one pass gives every sum
    order = runs.argsort(stable=True)

    def estimates(dtype: torch.dtype) -> tuple[Estimates, Estimates]:
        # One allocation for all layers: many smaller ones stay with the process when they are freed.
        ordered = features.new_empty(features.shape, dtype=dtype)
        for copy, layer in zip(ordered, features, strict=True):
            for part, tokens in zip(copy.split(PART), order.split(PART), strict=True):
                part.copy_(layer[tokens])
        return _estimates(ordered, runs[order], groups, advance)

    if features.dtype != torch.float64:
        quick = estimates(torch.float32)
        hsics = [hsic for view in quick for hsic in (view.debiased, view.biased)]
        if not any(bool((hsic.values.diagonal() < CANCELS * hsic.terms).any()) for hsic in hsics):
            return quick
    return estimates(torch.float64)


def hsic_of(features: Sequence[Tensor]) -> Estimates:
    """HSIC of every pair of representations of the same tokens, `[N, D]` each, with products in float64."""
    copies = [layer.to(torch.float64, copy=True) for layer in features]
    return _estimates(copies, torch.ones(len(copies[0]), dtype=torch.int64, device=copies[0].device), 1)[0]


def _estimates(
    features: Sequence[Tensor] | Tensor, runs: Tensor, groups: int, advance: Callable[[float], None] = lambda done: None
) -> tuple[Estimates, Estimates]:
    """Return the estimates over all tokens and without first tokens, with products in the features' precision.

    Args:
        features: `[N, D]` for each layer; overwritten.
        runs: `[N]`, ascending: the group of a first token; that of a later token plus `groups`.
        groups: G.
        advance: see `hsic_of_views`.
    """
    layers = [_layer(layer) for layer in features]
    products = None
    if _fewer_by_channels(layers, groups):
        products = _products_of_channels(layers, runs, groups, advance)
    if products is None:
        products = _products_of_tokens(layers, runs.tolist(), groups, advance)
    first = int((runs < groups).sum())
    rest = _assemble(products[1], layers, runs % groups, first)
    return (_assemble(products[0], layers, runs % groups, 0) if first else rest), rest


def _layer(x: Tensor) -> LayerSums:
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
    return LayerSums(x, _squares(x), scale)


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


def operations(samples: int, width: int, layers: int, groups: int) -> tuple[float, float]:
    """Operations of the products of tokens and of the products of channels, for S layers of N tokens and D channels.

    `N^2 S (D + S)` and `(N + PASSES G) D^2 S (S + 1)`: many tokens of few channels take fewer by channels.
    """
    by_tokens = float(samples**2 * layers * (width + layers))
    return by_tokens, float((samples + PASSES * groups) * width**2 * layers * (layers + 1))


def _fewer_by_channels(layers: Sequence[LayerSums], groups: int) -> bool:
    """Return True if the products of channels take fewer operations than those of tokens."""
    samples, width = layers[0].features.shape
    by_tokens, by_channels = operations(samples, width, len(layers), groups)
    return by_channels < by_tokens and all(layer.features.shape[1] == width for layer in layers)


def _products_of_channels(
    layers: Sequence[LayerSums], runs: Tensor, groups: int, advance: Callable[[float], None]
) -> Tensor | None:
    r"""`_products_of_tokens` from products of channels, of which each group has `[D, D]` for a pair of layers.

    With :math:`M_g = X_g^T Y_g` over the tokens of a group, :math:`\sum_{i \in g, j \in h} K_{ij} L_{ij} =
    \langle M_g, M_h \rangle`. The terms of i = j are subtracted.

    Returns:
        As `_products_of_tokens`; None if the difference loses more than two digits, as with one token far from all
        others.
    """
    features = [layer.features for layer in layers]
    count = len(features)
    width = features[0].shape[1]
    group = runs % groups
    first = int((runs < groups).sum())
    sizes = torch.stack([part.bincount(minlength=groups) for part in (group[:first], group[first:])]).tolist()
    starts = [sum(sizes[0][:number]) for number in range(groups)]
    of_first = [slice(start, start + size) for start, size in zip(starts, sizes[0], strict=True)]
    starts = [first + sum(sizes[1][:number]) for number in range(groups)]
    of_later = [slice(start, start + size) for start, size in zip(starts, sizes[1], strict=True)]
    total = features[0].new_zeros(2, 2, groups, count, count, dtype=torch.float64)
    products = features[0].new_empty(groups, width, width)
    same = torch.zeros_like(total)
    pairs = [(left_layer, right_layer) for left_layer in range(count) for right_layer in range(left_layer, count)]
    for done, (left_layer, right_layer) in enumerate(pairs, start=1):
        x, y = features[left_layer], features[right_layer]  # [N, D]
        for number, tokens in enumerate(of_later):
            torch.mm(x[tokens].T, y[tokens], out=products[number])
        later = products.sum(0)
        every = later + x[:first].T @ y[:first]
        # Sums of a row in the features' precision, of rows in float64.
        whole = torch.stack([later, every], dim=1)  # [D, 2, D]
        with_whole = torch.bmm(whole, products.permute(1, 2, 0)).sum(0, dtype=torch.float64)  # [2, G]
        with_itself = torch.linalg.vector_norm(products, dim=2).double().square().sum(1)  # [G]
        total[1, :, :, left_layer, right_layer] = torch.stack([with_whole[0], with_itself])
        total[0, :, :, left_layer, right_layer] = torch.stack([with_whole[1], with_itself])
        if first:
            added = ((x[:first] @ every) * y[:first]).sum(1, dtype=torch.float64)
            total[0, 0, :, left_layer, right_layer].index_add_(0, group[:first], added)
            for number, tokens in enumerate(of_first):
                between = ((x[tokens] @ products[number]) * y[tokens]).sum(dtype=torch.float64)
                total[0, 1, number, left_layer, right_layer] += 2 * between + _squared_product(x[tokens], y[tokens])
        squares = layers[left_layer].squares * layers[right_layer].squares
        for view, start in enumerate((0, first)):
            same[view, :, :, left_layer, right_layer] += torch.zeros_like(with_itself).index_add_(
                0, group[start:], squares[start:]
            )
        for sums in (total, same):
            sums[..., right_layer, left_layer] = sums[..., left_layer, right_layer]
        advance(done / len(pairs))
    remaining = (total - same).sum(2)[:, 0].diagonal(dim1=1, dim2=2)  # [2, S]
    if bool((remaining < CANCELS * same.sum(2)[:, 0].diagonal(dim1=1, dim2=2)).any()):
        return None
    return total - same


def _squared_product(x: Tensor, y: Tensor) -> Tensor:
    """Squared Frobenius norm of `x^T y`, for `[n, D]` each, from products of tokens or of channels, the fewer."""
    product = (x @ x.T) * (y @ y.T) if len(x) < x.shape[1] else (x.T @ y).square()
    return product.sum(dtype=torch.float64)


def _products_of_tokens(
    layers: Sequence[LayerSums], runs: list[int], groups: int, advance: Callable[[float], None]
) -> Tensor:
    """Sums of `K_ij L_ij` over `i != j`, for all pairs of Gram matrices.

    Only a block of rows of all Gram matrices, right of the diagonal, exists at a time, in memory that all blocks share:
    blocks of different sizes would stay with the process when they are freed. Products are summed in float64 over rows,
    because float32 loses a digit over millions of them.

    Args:
        layers: features of each layer.
        runs: see `_estimates`.
        groups: G.
        advance: see `hsic_of_views`.

    Returns:
        `[2, 2, G, S, S]` float64. First axis: all tokens, and without first tokens. Second axis: the sum over `i` in
        a group and any `j`, and the sum over `i` and `j` in the group.
    """
    features = [layer.features for layer in layers]
    samples = len(features[0])
    count = len(features)
    total = features[0].new_zeros(2, 2, groups, count, count, dtype=torch.float64)
    room = features[0].new_empty(max(BLOCK, count * samples))
    ends = [i for i in range(1, samples + 1) if i == samples or runs[i] != runs[i - 1]]
    start = 0
    while start < samples:
        run = runs[start]
        end = next(end for end in ends if end > start)
        width = samples - start
        rows = min(end - start, max(1, BLOCK // (count * width)))
        block = room[: rows * count * width].view(rows, count, width)
        for number, x in enumerate(features):
            torch.mm(x[start : start + rows], x[start:].T, out=block[:, number])
        block[..., :rows].transpose(0, 1).triu_(1)
        left = start
        for right in (end for end in ends if end > start):
            tile = block[..., left - start : right - start]
            other = runs[left]
            pairs = torch.bmm(tile, tile.mT).sum(0, dtype=torch.float64)
            for sums in total[: 1 + (run >= groups)]:
                sums[0, run % groups] += pairs
                sums[0, other % groups] += pairs
                sums[1, run % groups] += 2 * pairs * (run % groups == other % groups)
            left = right
        start += rows
        advance(1 - ((samples - start) / samples) ** 2)
    return total


def _assemble(products: Tensor, layers: Sequence[LayerSums], group: Tensor, first: int) -> Estimates:
    """Return the estimates without the `first` tokens, from products `[2, G, S, S]` and each token's group `[N]`."""
    squares = torch.stack([layer.squares[first:] for layer in layers])  # [S, n]
    member = torch.nn.functional.one_hot(group[first:], products.shape[1]).double()  # [n, G]
    samples = squares.new_tensor(squares.shape[1])
    scale = torch.stack([layer.scale for layer in layers])

    def scaled(hsic: Hsic) -> Hsic:
        return Hsic(hsic.values * torch.outer(scale, scale), hsic.terms * scale.square())

    sums = [_sums_by_group(layer.features[first:], group[first:], products.shape[1]) for layer in layers]  # [D, G] each
    whole = torch.zeros_like(squares)  # sums of the Gram matrices' rows
    groups = products.shape[1]
    rest_rows = products.new_zeros(groups, len(layers), len(layers))
    rest_totals = products.new_zeros(groups, len(layers))
    for start in range(0, squares.shape[1], PART):
        part = slice(start, start + PART)
        of_layers = zip(layers, sums, strict=True)
        in_group = torch.stack(
            [layer.features[first:][part] @ layer_sums for layer, layer_sums in of_layers]
        ).double()  # [S, p, G]
        whole[:, part] = in_group.sum(2)
        rest = (whole[:, part] - squares[:, part])[..., None] - in_group
        rest = (rest * (1 - member[part])).permute(2, 0, 1)  # [G, S, p]
        rest_rows += rest @ rest.mT
        rest_totals += rest.sum(2)
    row_sums = whole - squares
    total = products[0].sum(0)
    left = total - 2 * products[0] + products[1]
    return Estimates(
        int(samples),
        scaled(unbiased(Sums(samples, total, row_sums @ row_sums.T, row_sums.sum(1)))),
        scaled(unbiased(Sums(samples - member.sum(0), left, rest_rows, rest_totals))),
        scaled(biased(Sums(samples, total + squares @ squares.T, whole @ whole.T, whole.sum(1)))),
    )


def _sums_by_group(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """[D, G] in the precision of `x [n, D]`: sum of the tokens of each group, added in float64; `group` is `[n]`."""
    total = x.new_zeros(groups, x.shape[1], dtype=torch.float64)
    for part, numbers in zip(x.split(PART), group.split(PART), strict=True):
        total.index_add_(0, numbers, part.double())
    return total.T.to(x.dtype)
