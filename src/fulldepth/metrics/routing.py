"""Weights of memory routers (LIME)."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup

SITE = "routing"


def retrieval_weight(routing: Tensor, counted: Tensor | None = None) -> Tensor:
    r"""Weight of each earlier representation in what every head of a layer retrieves, averaged over tokens.

    .. math:: w_{h,m} = \operatorname{mean}_t \alpha_{t,h,m}
        \qquad \text{(kv: } w_{h,m} = \textstyle\sum_{h'} W_{h,m,h'} \text{)}

    The weights of static and dynamic routers are distributions: those of a head sum to 1. The weights of a kv router
    are unconstrained; the result is their signed sum over the source's heads, and `retrieval_share` normalises it.

    Args:
        routing: weights of the router of layer r: static `[H, r]`, dynamic `[B, T, H, r]`, kv `[H, r, H]` (own head,
            source, source's head). Source m = 0..r-1 is the state `X_m`; for kv, the keys and values that layer m+1
            computes from its input. Attention without a memory reads `m = r-1`.
        counted: `[B, T]` bool, the tokens to average over; None = all. Used for dynamic routers only.

    Returns:
        `[H, r]` float64, unit 1.

    Raises:
        ValueError: if `routing` has another number of dimensions, or `counted` does not fit it.

    Source: "LIME: layer-integrated memory", Eq. 1 and Fig. 2; kv from its later public code.
    """
    return _by_head(routing, counted).mean(0)


def retrieval_share(routing: Tensor, counted: Tensor | None = None) -> Tensor:
    r"""Share of each earlier representation in what a head retrieves, by absolute weight; mean over tokens.

    .. math:: s_{h,m} = \operatorname{mean}_t \frac{|\alpha_{t,h,m}|}{\sum_j |\alpha_{t,h,j}|}
        \qquad \text{(kv: } |\alpha_{h,m}| = \textstyle\sum_{h'} |W_{h,m,h'}| \text{)}

    Equal to `retrieval_weight` if the weights are a distribution (static, dynamic).

    Args:
        routing: as in `retrieval_weight`.
        counted: as in `retrieval_weight`.

    Returns:
        `[H, r]` float64 in [0, 1], summing to 1 over sources; NaN for a head whose weights are all zero.

    Raises:
        ValueError: as `retrieval_weight`.
    """
    return _by_head(routing, counted, shares=True).mean(0)


def head_shares(w_o: Tensor, heads: int) -> Tensor:
    r"""Share of each query head: the norm of its slice of the output projection, over the sum of all norms.

    .. math:: p(h \mid r) = \frac{\|W^{(O)}_h\|_F}{\sum_{h'} \|W^{(O)}_{h'}\|_F}

    Args:
        w_o: the projection in torch's layout, `[D, H d_h]`: heads side by side along the inputs.
        heads: H, number of query heads.

    Returns:
        `[H]` float64, unit 1, summing to 1; NaN if the whole matrix is zero.

    Raises:
        ValueError: if `w_o` is not a matrix that splits into `heads` slices.

    Source: "LIME: layer-integrated memory", Sec. 5.2.
    """
    if w_o.ndim != 2 or heads < 1 or w_o.shape[1] % heads:
        raise ValueError(f"w_o must be [D, H d_h] with H = {heads} heads, got shape {tuple(w_o.shape)}")
    norms = w_o.detach().double().unflatten(1, (heads, -1)).norm(dim=(0, 2))
    return norms / norms.sum()


def expected_retrieval(weights: Tensor, shares: Tensor) -> Tensor:
    r"""Index of the representation that a layer retrieves, on average over heads.

    .. math:: E[m \mid r] = \sum_h p(h \mid r) \sum_{m=0}^{r-1} p(m \mid h, r) \, m

    The query heads of a group share the router of their key/value head, whose share is the sum of theirs. For attention
    without a memory the value is r-1.

    Args:
        weights: distributions over sources, `[..., H_kv, r]` (see `retrieval_share`).
        shares: `p(h|r)` of the query heads, `[H]` with H a multiple of `H_kv`; consecutive heads form a group.

    Returns:
        `[...]` float64 in [0, r-1], unit layers.

    Raises:
        ValueError: if the heads do not divide into groups.

    Source: "LIME: layer-integrated memory", Eq. 2.
    """
    if weights.ndim < 2 or shares.ndim != 1 or len(shares) % weights.shape[-2]:
        raise ValueError(
            f"expected weights [..., H_kv, r] and shares [H] with H a multiple of H_kv, got {tuple(weights.shape)} and "
            f"{tuple(shares.shape)}"
        )
    grouped = shares.double().unflatten(0, (weights.shape[-2], -1)).sum(1)
    sources = torch.arange(weights.shape[-1], dtype=torch.float64, device=weights.device)
    return (weights.double() @ sources) @ grouped.to(weights.device)


def _by_head(routing: Tensor, counted: Tensor | None, shares: bool = False) -> Tensor:
    """[N, H, r] weights, or shares of absolute weights, of each counted token; N = 1 if all tokens share them.

    The weights of a kv router are summed over the source's heads.
    """
    if routing.ndim not in (2, 3, 4):
        raise ValueError(f"routing must be [H, r], [B, T, H, r] or [H, r, H], got shape {tuple(routing.shape)}")
    weights = (routing.abs() if shares else routing).double()
    if routing.ndim < 4:
        weights = weights[None] if routing.ndim == 2 else weights.sum(-1)[None]
    elif counted is None:
        weights = weights.flatten(0, 1)
    elif counted.shape != routing.shape[:2]:
        raise ValueError(f"counted must be {tuple(routing.shape[:2])}, got {tuple(counted.shape)}")
    else:
        weights = weights[counted.to(routing.device)]
    return weights / weights.sum(-1, keepdim=True) if shares else weights


class RetrievalWeight(Measure):
    """Mean retrieval weight of every source m (column `other`) in every layer r with a router, over heads and tokens.

    Site `routing` is the mean over key/value heads. `mean` is the signed weight, `share` the share of the absolute
    weights; they differ for kv routers only. Site `head_h` (h from 0) is one head: `mean` is its self-retrieval, the
    weight of m = r-1; `share` that of every source.
    """

    name = "retrieval_weight"
    units = dict.fromkeys(("mean", "share"), "1")
    sites = (SITE,)
    needs = frozenset({"routing"})
    masses: Tensor
    shares: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        for name in ("masses", "shares"):
            self.add_sum(name, setup.num_layers, setup.routed_heads, setup.num_layers)
        self.add_sum("counts", setup.num_layers)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        counted = observation.counted
        tokens = int(observation.counted.sum())
        for layer, routing in observation.coefficients[SITE].items() if tokens else ():
            for total, shares in ((self.masses, False), (self.shares, True)):
                weights = _by_head(routing, counted, shares)
                assert weights.shape[1:] == (self.setup.routed_heads, layer)  # `execution.verify` has checked this
                total[layer - 1, :, :layer] += (weights.sum(0) * (tokens / len(weights))).to(total)
            self.counts[layer - 1] += tokens

    def compute(self) -> dict[str, Tensor]:
        """`mean` and `share`, `[L, H, L]` by layer r, head, source m; `count` `[L]`, 0 for layers without a router."""
        counts = self.counts[:, None, None]
        return {"mean": self.masses / counts, "share": self.shares / counts, "count": self.counts.clone()}

    def rows(self) -> list[Row]:
        """Rows of both statistics: for each layer and source, and for each head."""
        values = self.compute()
        rows = []
        for statistic in self.units:
            for index in values["count"].nonzero().flatten().tolist():
                layer = index + 1
                count = int(values["count"][index])
                heads = values[statistic][index]
                for source, value in enumerate(heads[:, :layer].mean(0).tolist()):
                    rows.append(self.row(statistic, value, count, layer, source, SITE))
                first = 0 if statistic == "share" else index
                for head, weights in enumerate(heads[:, first:layer].tolist()):
                    for source, value in enumerate(weights, start=first):
                        rows.append(self.row(statistic, value, count, layer, source, f"head_{head}"))
        return rows


class ExpectedRetrieval(RetrievalWeight):
    """Expected source m of every layer r with a router, over tokens; heads are weighted by `Setup.head_shares`.

    p(m|h,r) is the share of the absolute weights (`retrieval_share`). Its mean over tokens is enough, because the
    expectation is linear in it.
    """

    name = "expected_retrieval"
    units = dict.fromkeys(("value",), "layers")
    needs = frozenset({"routing", "head_shares"})

    def rows(self) -> list[Row]:
        """One row for each layer with a router."""
        values = self.compute()
        return [
            self.row(
                "value", expected_retrieval(share, torch.tensor(heads, dtype=torch.float64)), count, layer, site=SITE
            )
            for layer, (share, count, heads) in enumerate(
                zip(values["share"], values["count"], self.setup.head_shares, strict=True), start=1
            )
            if count
        ]
