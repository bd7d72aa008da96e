"""Stream mixing: weights with which each of several residual streams is read, kept and written (Hyper-Connections)."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup

SITES = {"attention": "attention_mixing", "mlp": "mlp_mixing"}
"""Branch -> site of its connection's weights."""
STATISTICS = ("input", "kept", "given", "output")


def stream_mixing(mixing: Tensor, counted: Tensor | None = None) -> Tensor:
    r"""Weights of one connection per stream, averaged over tokens.

    A branch f between streams `h_1..h_n` reads and writes

    .. math:: x = \sum_i \alpha_{i0} h_i, \qquad h'_j = \beta_j f(x) + \sum_i \alpha_{ij} h_i

    For every stream i: `input` = `alpha_i0`, its weight in the branch's input; `kept` = `alpha_ii`, its weight in
    itself; `given` = the sum of `alpha_ij` over the other streams j, its weight in them; `output` = `beta_i`, the
    weight of the branch's output in it. The single stream of a pre-norm network has 1, 1, 0, 1.

    Args:
        mixing: the connection's weights `[alpha_i0, alpha_i1..alpha_in, beta_i]`, `[n, n + 2]`, or `[B, T, n, n + 2]`
            if they depend on the token.
        counted: `[B, T]` bool, the tokens to average over; None = all. Used for the second form only.

    Returns:
        `[n, 4]` float64, unit 1, any sign: columns in the order of `STATISTICS`.

    Raises:
        ValueError: if `mixing` has another shape, or `counted` does not fit it.

    Source: "Hyper-Connections" (arXiv 2409.19606), Sec. 2.
    """
    return _by_stream(mixing, counted).mean(0)


def _by_stream(mixing: Tensor, counted: Tensor | None) -> Tensor:
    """[N, n, 4] weights of each counted token; N = 1 if all tokens share them."""
    if mixing.ndim not in (2, 4) or mixing.shape[-1] != mixing.shape[-2] + 2:
        raise ValueError(f"mixing must be [n, n + 2] or [B, T, n, n + 2], got shape {tuple(mixing.shape)}")
    if mixing.ndim == 4 and counted is not None and counted.shape != mixing.shape[:2]:
        raise ValueError(f"counted must be {tuple(mixing.shape[:2])}, got {tuple(counted.shape)}")
    if mixing.ndim == 2:
        chosen = mixing[None]
    else:
        chosen = mixing.flatten(0, 1) if counted is None else mixing[counted.to(mixing.device)]
    chosen = chosen.double()
    between = chosen[..., 1:-1]
    kept = between.diagonal(dim1=-2, dim2=-1)
    return torch.stack([chosen[..., 0], kept, between.sum(-1) - kept, chosen[..., -1]], dim=-1)


class StreamMixing(Measure):
    """Mean weights of both connections of every layer over tokens.

    The sites are `attention_stream_i` and `mlp_stream_i`, i from 0.
    """

    name = "stream_mixing"
    units = dict.fromkeys(STATISTICS, "1")
    sites = tuple(SITES.values())
    needs = frozenset({"streams"})
    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("sums", len(SITES), setup.num_layers, setup.num_streams, len(STATISTICS))
        self.add_sum("counts", len(SITES), setup.num_layers)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        tokens = int(observation.counted.sum())
        for index, site in enumerate(SITES.values()):
            for layer, mixing in observation.coefficients[site].items():
                shared = tokens if mixing.ndim == 2 else 1  # one matrix holds for all tokens
                weights = _by_stream(mixing, observation.counted).sum(0) * shared
                self.sums[index, layer - 1] += weights.to(self.sums)
                self.counts[index, layer - 1] += tokens

    def compute(self) -> tuple[Tensor, Tensor]:
        """[2, L, n, 4] means and [2, L] counts: attention and MLP, layers 1..L, streams, statistics."""
        return self.sums / self.counts[..., None, None], self.counts.clone()

    def rows(self) -> list[Row]:
        """Four rows for each connection, stream and layer."""
        means, counts = self.compute()
        rows = []
        for index, layer in counts.nonzero().tolist():
            branch, count = list(SITES)[index], int(counts[index, layer])
            for stream, values in enumerate(means[index, layer].tolist()):
                for statistic, value in zip(STATISTICS, values, strict=True):
                    rows.append(self.row(statistic, value, count, layer + 1, site=f"{branch}_stream_{stream}"))
        return rows
