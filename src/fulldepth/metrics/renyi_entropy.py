"""Matrix-based Renyi entropy of the token states of a sequence (LIME, Sec. 5.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fulldepth.metrics.base import Means, Observation, Place, Setup
from fulldepth.metrics.reservoir import EMPTY, priority
from fulldepth.threads import map_threads
from fulldepth.uncertainty import deal

PRESET = "plain"
"""Part of the statistics' names: the papers' formula, of states that are not prepared as in some public codes."""
ALPHAS = (0.5, 1.0, 2.0)
LAYERS_AT_ONCE = 4
"""Number of layers of a sequence that one thread converts to float64 at a time."""


def renyi_entropy(z: Tensor, alpha: float = 1.0) -> Tensor:
    r"""Matrix-based Renyi entropy of each sequence's states.

    .. math::
        S_\alpha(Z) = \frac{1}{1 - \alpha} \log \sum_i \left( \frac{\lambda_i(K)}{\operatorname{tr} K} \right)^\alpha,
        \quad K = Z Z^\top

    with the limits `-sum p log p` at alpha = 1, `log rank` at 0 and `-log max p` at infinity. Computed in float64 from
    the smaller of the T x T and D x D eigenproblems (they share their non-zero eigenvalues); eigenvalues below
    `min(T, D)` units of rounding count as zero. Entries of `K` are not clamped.

    Args:
        z: states of T tokens, `[..., T, D]`.
        alpha: order, at least 0; `math.inf` is allowed.

    Returns:
        `[...]` float64 in nats, in [0, log min(T, D)]; NaN if all states are zero or one is not finite.

    Raises:
        ValueError: if alpha is negative, or `z` has fewer than two dimensions.

    Source: "LIME: layer-integrated memory", Sec. 5.3.
    """
    if not alpha >= 0:
        raise ValueError(f"alpha must be at least 0, got {alpha}")
    if z.ndim < 2 or not z.shape[-2:].numel():
        raise ValueError(f"z must be [..., T, D] with T, D >= 1, got shape {tuple(z.shape)}")
    return _entropy(_spectrum(_gram(z.double())), alpha)


def _gram(z: Tensor) -> Tensor:
    """The smaller of `Z Z^T` and `Z^T Z`, which share their non-zero eigenvalues."""
    return z.mT @ z if z.shape[-2] > z.shape[-1] else z @ z.mT


def _spectrum(gram: Tensor) -> Tensor:
    """[..., n] eigenvalues of `gram [..., n, n]` over their sum; NaN if all are zero or it is not finite."""
    finite = gram.isfinite().flatten(-2).all(-1, keepdim=True)
    values = torch.linalg.eigvalsh(gram.where(finite[..., None], 0.0))
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
    values = values.where((values > rounding) & finite, 0.0)
    return values / values.sum(-1, keepdim=True)


def _entropy(shares: Tensor, alpha: float) -> Tensor:
    """[...] Renyi entropy in nats of `shares [..., n]`, which sum to 1."""
    if alpha == 0:
        entropy = (shares > 0).double().sum(-1).log().where(shares[..., 0].isfinite(), torch.nan)
    elif alpha == 1:
        entropy = torch.special.entr(shares).sum(-1)
    elif math.isinf(alpha):
        entropy = -shares.amax(-1).log()
    else:
        entropy = (alpha * shares.log()).logsumexp(-1) / (1 - alpha)
    return entropy.clamp(min=0)


class RenyiEntropy(Means):
    """Mean entropy over sequences, of the residual stream in layers 0..L and the value states in layers 1..L, with its
    standard error.

    All positions except padding are used, regardless of the token policy. At most `Setup.entropy_sequences` sequences
    are used, chosen by a seeded hash of their index; a sequence whose entropy is NaN (all states zero) is excluded.
    """

    name = "renyi_entropy"
    units = dict.fromkeys(
        [f"{kind}:{PRESET}:{alpha:g}" for kind in ("mean", "standard_error") for alpha in ALPHAS], "nats"
    )
    sites = ("residual", "value")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_grouped("sums", len(self.sites), setup.num_layers + 1, len(ALPHAS))
        self.add_grouped("counts", len(self.sites), setup.num_layers + 1, 1)
        ranks = priority(torch.arange(setup.num_sequences), setup.seed)
        self.threshold = EMPTY
        if setup.entropy_sequences < setup.num_sequences:
            self.threshold = int(ranks.sort().values[setup.entropy_sequences])
        self.chosen = (ranks < self.threshold).nonzero().flatten()
        """Indices of the sequences used, ascending."""
        of = setup.clusters or range(setup.num_sequences)
        self.group_of = torch.zeros(max(setup.num_sequences, 1), dtype=torch.int64)
        self.group_of[self.chosen] = torch.from_numpy(deal([of[index] for index in self.chosen.tolist()]))

    def update(self, observation: Observation) -> None:
        """Add one batch."""

        def entropies(z: Tensor) -> Tensor:  # [S, alphas], of one sequence's states in some layers, [S, T, D]
            shares = _spectrum(_gram(z.double()))
            return torch.stack([_entropy(shares, alpha) for alpha in ALPHAS], dim=1)

        mask = observation.attention_mask
        chosen = (priority(observation.sequence, self.setup.seed) < self.threshold).to(mask.device) & mask.any(1)
        rows = chosen.nonzero().flatten().tolist()
        groups = self.group_of[observation.sequence.cpu()].tolist()
        for index, site in enumerate(self.sites):
            if site in observation.states and rows:
                states = observation.states[site]
                parts = [part for row in rows for part in states[:, row, mask[row]].split(LAYERS_AT_ONCE)]
                entropy = torch.cat(map_threads(entropies, parts, states)).split(len(states))
                for row, values in zip(rows, entropy, strict=True):  # [S, alphas], of the last S of layers 0..L
                    valid = values.isfinite().all(1, keepdim=True)
                    self.sums[groups[row], index, -len(values) :] += values.where(valid, 0.0).to(self.sums)
                    self.counts[groups[row], index, -len(values) :] += valid.to(self.counts)

    def places(self, counts: Tensor) -> Iterator[Place]:
        """Every captured site, layer and order; value states have no layer 0."""
        for index, site in enumerate(self.sites):
            for layer in range(index, self.setup.num_layers + 1) if counts[index].any() else ():
                for order, alpha in enumerate(ALPHAS):
                    yield Place((index, layer, order), layer, f":{PRESET}:{alpha:g}", site)
