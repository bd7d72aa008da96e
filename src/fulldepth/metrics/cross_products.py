"""HSIC over all tokens of any number, from streamed sums of products of the layers' states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulldepth.metrics.base import POSITION_BITS, Observation, Setup
from fulldepth.metrics.hsic import LOUD, Estimates, Hsic, Sums, biased, unbiased
from fulldepth.metrics.reservoir import Accumulator

SUMS_BYTES = 2 << 30
"""Most bytes of the products, and a quarter of it of first tokens."""
FEWEST_GROUPS = 8
"""Fewest groups that the products are kept for; where fewer fit, tokens are sampled instead."""


class CrossProducts(Accumulator):
    r"""Sums over all tokens `i` of which HSIC of linear kernels is a function, for all layers `a`, `b`, by group.

    .. math:: \sum x_a, \; \sum |x_a|^2, \; \sum x_a |x_b|^2, \; \sum |x_a|^2 |x_b|^2, \; C_{ab} = \sum x_a x_b^T;
        \quad \sum_{i \ne j} K_{ij} L_{ij} = \|C_{ab}\|_F^2 - \sum |x_a|^2 |x_b|^2

    Sums are in float64. Products are in float32, of states minus the mean of the first batch, except those of outliers:
    HSIC is the same for any such `centre`. First tokens are kept as they are. Groups share a sum where memory lacks.

    Args:
        setup: sizes.
    """

    centre: Tensor
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
        self.add("centre", (layers, width), device=setup.device)
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
        x = tokens[:, ~alone].to(self.products.device)
        if not x.shape[1]:
            return
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if not bool(self.tokens.any()):
            loud = _loud(_squares(x - x.mean(1, keepdim=True)))
            self.centre.copy_(x[:, ~loud].double().mean(1).to(x))
        x = x - self.centre[:, None].to(x)
        squares = _squares(x)
        loud = _loud(squares)
        group = (self.setup.group_of.to(owner.device)[owner[~alone]] % self.groups).to(x.device)
        for number in group.unique().tolist():
            index = group == number
            self._add(number, x[:, index], squares[:, index], loud[index])

    def _add(self, group: int, x: Tensor, squares: Tensor, loud: Tensor) -> None:
        """Add centred tokens `[S, n, D]` with their squared norms `[S, n]` to the sums of a group."""
        quiet, outliers = (x[:, ~loud], x[:, loud].double()) if bool(loud.any()) else (x, x[:, :0].double())
        for a, row in enumerate(self.products[group].split([*range(len(x), 0, -1)])):
            row += torch.matmul(quiet[a].T, quiet[a:])  # [S - a, D, D]
            if len(outliers[a]):
                row += torch.matmul(outliers[a].T, outliers[a:])
        for a, layer in enumerate(x):
            states = layer.double()
            self.sums[group, a] += states.sum(0)
            self.cubes[group, a] += squares @ states  # [b, D]
        self.tokens[group] += x.shape[1]
        self.squares[group] += squares.sum(1)
        self.quartics[group] += squares @ squares.T

    def _sync_dist(self, *arguments: Any, **options: Any) -> None:
        """Sum over processes, each of which has a centre of its own: of states as they are."""
        for group in range(self.groups):
            self._move(group)
        self.centre.zero_()
        super()._sync_dist(*arguments, **options)

    def _move(self, group: int) -> None:
        """The sums of a group, of states without a centre."""
        c, n, sums, squares = self.centre, self.tokens[group], self.sums[group].clone(), self.squares[group].clone()
        moved, norms = sums + n * c, c.square().sum(1)
        turned = c.new_zeros(len(c), *c.shape)  # C_ab c_b
        for a, row in enumerate(self.products[group].split([*range(len(c), 0, -1)])):
            turned[a, a:] = torch.bmm(row, c[a:, :, None])[..., 0]
            turned[a:, a] = torch.matmul(c[a], row)
            left = torch.stack([sums[a], c[a]], 1).expand(len(row), -1, -1)
            row.baddbmm_(left, torch.stack([c[a:], moved[a:]], 1))
        total = squares + 2 * (sums * c).sum(1) + n * norms
        across = torch.einsum("ad,abd->ab", c, self.cubes[group])
        norm_of = torch.outer(total, norms)
        self.quartics[group] += (
            2 * (across + across.T)
            + 4 * torch.einsum("ad,abd->ab", c, turned)
            + norm_of
            + norm_of.T
            - n * torch.outer(norms, norms)
        )
        self.cubes[group] += 2 * turned + norms[None, :, None] * sums[:, None] + c[:, None] * total[None, :, None]
        self.sums[group], self.squares[group] = moved, total

    def compute(self) -> list[Estimates]:
        """Over all tokens, and without first ones if the setup tells them apart; groups that share a sum are one."""
        rest = {name: getattr(self, name) for name in ("tokens", "sums", "squares", "cubes", "quartics")}
        x = self._firsts()  # [groups, k, S, D]
        views = [_left_out(rest)] if not x.shape[1] else [_left_out(self._with_first(rest, x)), _left_out(rest)]
        layers, at = len(self.centre), 0
        norms = [torch.zeros_like(view["quartics"]) for view in views]  # [1 + groups, S, S]: |C|^2
        turned = [torch.zeros_like(norm) for norm in norms]  # s_a C_ab s_b
        for a in range(layers):
            row = self.products[:, at : at + layers - a]  # [groups, S - a, D, D]
            at += layers - a
            xa, xb = x[:, :, a], x[:, :, a:]
            wholes = [row.sum(0)]
            if x.shape[1]:
                wholes.insert(0, wholes[0] + torch.einsum("gkd,gkbe->bde", xa, xb))
            # Each sum of a group is read three times: its norm, its inner products with all, its products with vectors.
            flat = row.flatten(2)
            own = torch.linalg.vector_norm(flat, dim=2).square()  # [groups, S - a]
            inner = torch.bmm(flat.transpose(0, 1), torch.stack([whole.flatten(1) for whole in wholes], 2))
            vectors = torch.cat([torch.stack([view["sums"][1:, a:] for view in views], 3), xb.permute(0, 2, 3, 1)], 3)
            products = torch.stack(
                [torch.bmm(*pair) for pair in zip(row, vectors, strict=True)]
            )  # [groups, S - a, D, .]
            for number, (view, whole) in enumerate(zip(views, wholes, strict=True)):
                s = view["sums"]
                norm, across = own, inner[..., number].T
                value = torch.einsum("gd,gbd->gb", s[1:, a], products[..., number])
                if number < len(views) - 1:  # with the first tokens
                    norm = norm + 2 * torch.einsum("gkd,gbdk->gb", xa, products[..., len(views) :])
                    alike = xa @ xa.mT  # [groups, k, k]
                    norm = norm + torch.stack([(alike * (y @ y.mT)).sum((1, 2)) for y in xb.unbind(2)], 1)
                    across = across + torch.einsum("gkbe,gkbe->gb", torch.einsum("gkd,bde->gkbe", xa, whole), xb)
                    value = value + torch.einsum("gkd,gd,gkbe,gbe->gb", xa, s[1:, a], xb, s[1:, a:])
                total = torch.linalg.vector_norm(whole.flatten(1), dim=1).square()
                norm = torch.cat([total[None], total - 2 * across + norm])
                full = (torch.einsum("gd,bde->gbe", s[:, a], whole) * s[:, a:]).sum(2)
                full[1:] -= value
                norms[number][:, a, a:] = norms[number][:, a:, a] = norm
                turned[number][:, a, a:] = turned[number][:, a:, a] = full
        return [_estimates({**views[n], "products": norms[n]}, turned[n]) for n in range(len(views))]

    def _firsts(self) -> Tensor:
        """`[groups, k, S, D]` centred first tokens of each group, filled up with zeros."""
        group = (self.setup.group_of.to(self.first.device) % self.groups)[: len(self.first)]
        most = int(group.bincount().max()) if len(group) else 0
        result = self.centre.new_zeros(self.groups, most, *self.centre.shape)
        for number in range(self.groups):
            members = self.first[group == number].double() - self.centre
            result[number, : len(members)] = members
        return result

    def _with_first(self, rest: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        """The sums per group with those of the first tokens."""
        squares = x.square().sum(3)  # [groups, k, S]
        group = (self.setup.group_of.to(self.first.device) % self.groups)[: len(self.first)]
        added = {
            "tokens": group.bincount(minlength=self.groups),
            "sums": x.sum(1),
            "squares": squares.sum(1),
            "cubes": torch.einsum("gkad,gkb->gabd", x, squares),
            "quartics": squares.mT @ squares,
        }
        return {name: part + added[name] for name, part in rest.items()}


def _left_out(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """`[1 + groups, ...]` sums over all tokens and without each group, from those of each group."""
    return {name: torch.cat([part.sum(0)[None], part.sum(0) - part]) for name, part in parts.items()}


def _loud(squares: Tensor) -> Tensor:
    """[n] bool: tokens that are outliers in any layer, from squared norms `[S, n]`."""
    return (squares > LOUD * squares.median(1, keepdim=True).values).any(0)


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
