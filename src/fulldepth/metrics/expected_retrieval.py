"""Expected retrieval: mean index of the representation that a layer reads from the memory (LIME, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.retrieval_weight import SITE, absolute_share, routers


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
    return _depth(weights.double()) @ grouped.to(weights.device)


def _depth(weights: Tensor) -> Tensor:
    """[..., H] mean source index of `weights [..., H, r]`."""
    return weights @ torch.arange(weights.shape[-1], dtype=weights.dtype, device=weights.device)


class ExpectedRetrieval(Measure):
    """Expected source m of every layer r with a router, over tokens; heads are weighted by `Setup.head_shares`.

    For kv routers p(m|h,r) is the share of the absolute weights (`retrieval_share`).
    """

    name = "expected_retrieval"
    units = dict.fromkeys(("value",), "layers")
    sites = (SITE,)
    needs = frozenset({"routing", "head_shares"})
    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("sums", setup.num_layers)
        self.add_sum("counts", setup.num_layers)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        tokens = int(observation.counted.sum())
        for layer, routing in routers(observation, self.setup):
            shares = torch.tensor(self.setup.head_shares[layer - 1], dtype=torch.float64)
            sources = expected_retrieval(absolute_share(routing, observation.counted), shares)
            shared = tokens if routing.ndim != 4 else 1  # one matrix holds for all tokens
            self.sums[layer - 1] += (sources.sum() * shared).to(self.sums)
            self.counts[layer - 1] += tokens

    def compute(self) -> dict[str, Tensor]:
        """`value` and `count`, each `[L]`: layers 1..L, NaN and 0 for layers without a router."""
        return {"value": self.sums / self.counts, "count": self.counts.clone()}

    def rows(self) -> list[Row]:
        """One row for each layer with a router."""
        values = self.compute()
        return [
            self.row("value", values["value"][index], count, index + 1, site=SITE)
            for index, count in enumerate(values["count"])
            if count
        ]
