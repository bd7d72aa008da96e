"""Retrieval weight: weights of a memory router on the keys and values of earlier layers (LIME, Fig. 2 and 3)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup

SITE = "routing"
STATISTICS = ("mean", "share")


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
    return signed_mass(routing, counted).mean(0)


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
    return absolute_share(routing, counted).mean(0)


def signed_mass(routing: Tensor, counted: Tensor | None = None) -> Tensor:
    """[N, H, r] float64: the weights of each counted token (N = 1 if all tokens share them), kv heads summed."""
    chosen = _tokens(routing, counted)
    return chosen.sum(-1) if routing.ndim == 3 else chosen


def absolute_share(routing: Tensor, counted: Tensor | None = None) -> Tensor:
    """[N, H, r] float64: absolute weights over their sum, of each counted token."""
    size = _tokens(routing, counted).abs()
    size = size.sum(-1) if routing.ndim == 3 else size
    return size / size.sum(-1, keepdim=True)


def _tokens(routing: Tensor, counted: Tensor | None) -> Tensor:
    """[N, ...] float64 weights of the counted tokens; N = 1 if all tokens share them."""
    if routing.ndim not in (2, 3, 4):
        raise ValueError(f"routing must be [H, r], [B, T, H, r] or [H, r, H], got shape {tuple(routing.shape)}")
    if routing.ndim != 4:
        return routing.double()[None]
    if counted is None:
        return routing.double().flatten(0, 1)
    if counted.shape != routing.shape[:2]:
        raise ValueError(f"counted must be {tuple(routing.shape[:2])}, got {tuple(counted.shape)}")
    return routing[counted.to(routing.device)].double()


def routers(observation: Observation, setup: Setup) -> Iterator[tuple[int, Tensor]]:
    """Layer and weights of every router, checked against `Setup.routed_heads` and the layer's number of sources.

    Raises:
        ValueError: if a router's number of sources or heads does not match.
    """
    for layer, routing in observation.coefficients[SITE].items():
        heads, sources = routing.shape[:2] if routing.ndim == 3 else routing.shape[-2:]
        if (heads, sources) != (setup.routed_heads, layer):
            raise ValueError(
                f"the router of layer {layer} gives {heads} heads and {sources} sources, expected "
                f"{setup.routed_heads} and {layer}"
            )
        yield layer, routing


class RetrievalWeight(Measure):
    """Mean retrieval weight of every source m (column `other`) in every layer r with a router, over heads and tokens.

    Site `routing` is the mean over key/value heads; site `head_h` (h from 0) is that head's self-retrieval, the weight
    of m = r-1. `mean` is the signed weight, `share` the share of the absolute weights; they differ for kv routers only.
    """

    name = "retrieval_weight"
    units = dict.fromkeys(STATISTICS, "1")
    sites = (SITE,)
    needs = frozenset({"routing"})
    masses: Tensor
    shares: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        shape = (setup.num_layers, setup.routed_heads, setup.num_layers)
        self.add_sum("masses", *shape)
        self.add_sum("shares", *shape)
        self.add_sum("counts", setup.num_layers)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        tokens = int(observation.counted.sum())
        for layer, routing in routers(observation, self.setup):
            for total, weights in ((self.masses, signed_mass), (self.shares, absolute_share)):
                shared = tokens if routing.ndim != 4 else 1  # one matrix holds for all tokens
                total[layer - 1, :, :layer] += (weights(routing, observation.counted).sum(0) * shared).to(total)
            self.counts[layer - 1] += tokens

    def compute(self) -> dict[str, Tensor]:
        """`mean` and `share`, `[L, H, L]` by layer r, head, source m; `count` `[L]`, 0 for layers without a router."""
        counts = self.counts[:, None, None]
        return {"mean": self.masses / counts, "share": self.shares / counts, "count": self.counts.clone()}

    def rows(self) -> list[Row]:
        """For both statistics, one row for each layer and source, and one for each layer and head."""
        values = self.compute()
        rows = []
        for statistic in STATISTICS:
            for index in values["count"].nonzero().flatten().tolist():
                layer, count, heads = index + 1, int(values["count"][index]), values[statistic][index]
                for source, value in enumerate(heads[:, :layer].mean(0).tolist()):
                    rows.append(self.row(statistic, value, count, layer, source, SITE))
                for head, value in enumerate(heads[:, index].tolist()):
                    rows.append(self.row(statistic, value, count, layer, index, f"head_{head}"))
        return rows
