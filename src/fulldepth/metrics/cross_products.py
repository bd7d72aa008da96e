"""HSIC over all tokens of any number, from streamed sums of products of the layers' states."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.metrics.accumulator import Accumulator
from fulldepth.metrics.base import POSITION_BITS, Observation, Setup
from fulldepth.metrics.hsic import LOUD, Estimates, Hsic, Sums, biased, unbiased

SUMS_BYTES = 2 << 30
"""Most bytes of the products, and a quarter of it of first tokens."""
FEWEST_GROUPS = 8
"""Fewest groups that the products are kept for; where fewer fit, tokens are sampled instead."""


class CrossProducts(Accumulator):
    r"""Sums over all tokens `i` of which HSIC of linear kernels is a function, for all layers `a`, `b`, by group.

    .. math:: \sum x_a, \; \sum |x_a|^2, \; \sum x_a |x_b|^2, \; \sum |x_a|^2 |x_b|^2, \; C_{ab} = \sum x_a x_b^T;
        \quad \sum_{i \ne j} K_{ij} L_{ij} = \|C_{ab}\|_F^2 - \sum |x_a|^2 |x_b|^2

    Sums are in float64. Products are in float32, of states that are centred for each batch, except those of outliers.
    First tokens are kept as they are. Groups share a sum where memory lacks.

    Args:
        setup: sizes.
    """

    tokens: Tensor
    sums: Tensor
    squares: Tensor
    cubes: Tensor
    quartics: Tensor
    products: Tensor
    first: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup, self.groups = setup, groups_that_fit(setup)
        layers, width = setup.num_layers + 1, setup.width
        for name, shape in {
            "tokens": (),
            "sums": (layers, width),
            "squares": (layers,),
            "cubes": (layers, layers, width),
            "quartics": (layers, layers),
            "products": (layers * (layers + 1) // 2, width, width),
        }.items():
            self.add(name, (self.groups, *shape), device=setup.device)
        kept = setup.num_sequences if setup.first_tokens else 0
        self.add("first", (kept, layers, width), dtype=torch.float32, device=setup.device)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        owner = observation.keys >> POSITION_BITS
        alone = observation.first & self.setup.first_tokens
        tokens = observation.tokens
        self.first[owner[alone]] = tokens[:, alone].transpose(0, 1).to(self.first)
        group = self.setup.group_of.to(owner.device)[owner] % self.groups
        for number in group[~alone].unique().tolist():
            self._add(number, tokens[:, (group == number) & ~alone].to(self.products.device))

    def _add(self, group: int, x: Tensor) -> None:
        """Add tokens `[S, n, D]` to the sums of a group."""
        squares = _squares(x - x.mean(1, keepdim=True))
        loud = (squares > LOUD * squares.median(1, keepdim=True).values).any(0)
        centre = x[:, ~loud].double().mean(1).to(x)  # [S, D]
        x = x - centre[:, None]
        squares = _squares(x)
        quiet, outliers = x[:, ~loud], x[:, loud].double()
        c, n = centre.double(), x.shape[1]
        sums = x.double().sum(1)
        moved = sums + n * c  # sum of the states themselves
        turned = c.new_zeros(len(c), *c.shape)  # C_ab c_b
        rows = self.products[group].split([*range(len(c), 0, -1)])
        for a, row in enumerate(rows):
            products = torch.matmul(quiet[a].T, quiet[a:])  # [S - a, D, D]
            if len(outliers[a]):
                products = products.double() + torch.matmul(outliers[a].T, outliers[a:])
            turned[a, a:] = torch.bmm(products, c[a:, :, None].to(products))[..., 0].double()
            turned[a:, a] = torch.matmul(c[a].to(products), products).double()
            row += products
            left = torch.stack([sums[a], c[a]], 1).expand(len(row), -1, -1)
            row.baddbmm_(left, torch.stack([c[a:], moved[a:]], 1))
        norms, plain = c.square().sum(1), squares.sum(1)
        total = plain + 2 * (sums * c).sum(1) + n * norms
        cubes = torch.stack([squares @ layer.double() for layer in x])  # [a, b, D]
        across = torch.einsum("ad,abd->ab", c, cubes)
        norm_of = torch.outer(total, norms)
        self.tokens[group] += n
        self.sums[group] += moved
        self.squares[group] += total
        self.cubes[group] += (
            cubes + 2 * turned + norms[None, :, None] * sums[:, None] + c[:, None] * total[None, :, None]
        )
        self.quartics[group] += (
            squares @ squares.T
            + 2 * (across + across.T)
            + 4 * torch.einsum("ad,abd->ab", c, turned)
            + norm_of
            + norm_of.T
            - n * torch.outer(norms, norms)
        )

    def compute(self) -> list[Estimates]:
        """Over all tokens, and without first ones if the setup tells them apart; groups that share a sum are one."""
        return [self._view(first) for first in ((True, False) if len(self.first) else (False,))]

    def _view(self, with_first: bool) -> Estimates:
        """One of `compute`."""
        names = ("tokens", "sums", "squares", "cubes", "quartics")
        parts = {name: getattr(self, name).clone() for name in names}  # [groups, ...]
        members = [self.first[:0].double()] * self.groups
        if with_first:
            group = self.setup.group_of.to(self.first.device) % self.groups
            members = [self.first[group == number].double() for number in range(self.groups)]  # [n, S, D]
            for number, x in enumerate(members):
                squares = x.square().sum(2)  # [n, S]
                parts["tokens"][number] += len(x)
                parts["sums"][number] += x.sum(0)
                parts["squares"][number] += squares.sum(0)
                parts["cubes"][number] += torch.einsum("nad,nb->abd", x, squares)
                parts["quartics"][number] += squares.T @ squares
        whole = {name: part.sum(0) for name, part in parts.items()}
        sums = {name: torch.cat([whole[name][None], whole[name] - part]) for name, part in parts.items()}
        norms = sums["products"] = torch.zeros_like(sums["quartics"])  # [1 + groups, S, S]: |C|^2
        turned = torch.zeros_like(norms)  # s_a C_ab s_b
        layers, at = norms.shape[-1], 0
        for a in range(layers):
            row = self.products[:, at : at + layers - a]  # [groups, S - a, D, D]
            at += layers - a
            everything = row.sum(0)
            everything += sum(torch.einsum("nd,nbe->bde", x[:, a], x[:, a:]) for x in members)
            s = sums["sums"]
            value = (torch.einsum("gd,bde->gbe", s[:, a], everything) * s[:, a:]).sum(2)
            norm = _inner(everything, everything).repeat(len(s), 1)
            for number, x in enumerate(members):
                part = row[number] + torch.einsum("nd,nbe->bde", x[:, a], x[:, a:]) if len(x) else row[number]
                norm[number + 1] += _inner(part, part) - 2 * _inner(everything, part)
                value[number + 1] -= ((s[number + 1, a] @ part) * s[number + 1, a:]).sum(1)
            norms[:, a, a:] = norms[:, a:, a] = norm
            turned[:, a, a:] = turned[:, a:, a] = value
        return _estimates(sums, turned)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """[n] inner products of matrices `[n, D, D]`."""
    return torch.linalg.vecdot(x.flatten(1), y.flatten(1))


def _squares(x: Tensor) -> Tensor:
    """[S, n] float64 squared norms of `[S, n, D]`."""
    return torch.stack([layer.double().square().sum(1) for layer in x])


def _estimates(sums: dict[str, Tensor], turned: Tensor) -> Estimates:
    """From sums `[1 + groups, ...]` over all tokens and without each group."""
    n, s, squares, quartics = (sums[name] for name in ("tokens", "sums", "squares", "quartics"))
    across = torch.einsum("gad,gabd->gab", s, sums["cubes"])
    norms = s.square().sum(2)
    hsic = unbiased(Sums(n, sums["products"] - quartics, turned - across - across.mT + quartics, norms - squares))
    whole = Hsic(hsic.values[0], hsic.terms[0])
    without = Hsic(hsic.values[1:], hsic.terms[1:])
    return Estimates(int(n[0]), whole, without, biased(Sums(n[0], sums["products"][0], turned[0], norms[0])))


def groups_that_fit(setup: Setup) -> int:
    """Number of groups of which the products are kept; 0 if not all tokens can be read in this way."""
    layers = setup.num_layers + 1
    size = layers * (layers + 1) // 2 * setup.width**2 * 8
    groups = min(setup.groups, SUMS_BYTES // size)
    kept = setup.first_tokens * setup.num_sequences * layers * setup.width * 4
    return groups if groups >= min(setup.groups, FEWEST_GROUPS) and kept <= SUMS_BYTES // 4 else 0
