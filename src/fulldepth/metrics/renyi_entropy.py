"""Matrix-based Renyi entropy of the token states of a sequence (LIME, Sec. 5.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.reservoir import EMPTY, priority

PRESET = "plain"
ALPHAS = (0.5, 1.0, 2.0)
LAYERS_AT_ONCE = 8
"""Number of layers converted to float64 at a time."""


def renyi_entropy(z: Tensor, alpha: float = 1.0, preset: str = PRESET) -> Tensor:
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
        preset: key of `PRESETS`. Values of different presets or orders are not comparable.

    Returns:
        `[...]` float64 in nats, in [0, log min(T, D)] (`wei` and `skean`: normalised to [0, 1]); NaN if all (prepared)
        states are zero or one is not finite.

    Raises:
        ValueError: if the preset is unknown, alpha is negative, or `z` has fewer than two dimensions.

    Source: "LIME: layer-integrated memory", Sec. 5.3; for the presets see `PRESETS`.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; available: {', '.join(PRESETS)}")
    if not alpha >= 0:
        raise ValueError(f"alpha must be at least 0, got {alpha}")
    if z.ndim < 2 or not z.shape[-2:].numel():
        raise ValueError(f"z must be [..., T, D] with T, D >= 1, got shape {tuple(z.shape)}")
    convention = PRESETS[preset]
    entropy = _entropy(_spectrum(convention.prepare(z.double())), alpha)
    return entropy / convention.unit(*z.shape[-2:])


class Preset(NamedTuple):
    """A convention: preprocessing of the states, and the divisor of the entropy as a function of T and D."""

    prepare: Callable[[Tensor], Tensor]
    unit: Callable[[int, int], float]


def _standardise(z: Tensor) -> Tensor:
    """Z-score every feature over the tokens, and over the samples if the axis before the token axis exists."""
    over = (-3, -2) if z.ndim > 2 else (-2,)
    correction = min(1, math.prod(z.shape[axis] for axis in over) - 1)  # a single token has deviation 0
    return (z - z.mean(over, keepdim=True)) / (z.std(over, correction=correction, keepdim=True) + 1e-5)


def _centre_and_normalise(z: Tensor) -> Tensor:
    """Subtract the mean token, then scale every token to unit length; tokens equal to the mean become zero."""
    centred = z - z.mean(-2, keepdim=True)
    norms = centred.norm(dim=-1, keepdim=True)
    rounding = 1e-14 * z.norm(dim=-1, keepdim=True)
    return (centred / norms).where(norms > rounding, 0.0)


PRESETS: dict[str, Preset] = {
    "plain": Preset(lambda z: z, lambda tokens, width: 1.0),
    "lime-code": Preset(_standardise, lambda tokens, width: 1.0),
    "wei": Preset(_centre_and_normalise, lambda tokens, width: math.log(width)),
    "skean": Preset(_centre_and_normalise, lambda tokens, width: math.log(min(tokens, width))),
}
"""Conventions of the literature.

- `plain`: the papers' formula, natural logarithm, no preprocessing.
- `lime-code`: LIME's public code. Every feature is z-scored over samples and tokens (eps 1e-5), `[..., B, T, D]`; a
  single sequence, `[T, D]`, is z-scored over its own tokens. That code uses alpha = 0.5.
- `wei`: Wei et al., "Diff-eRank" and "Matrix-Entropy". Tokens centred and scaled to unit length, alpha = 1, divided by
  log D (the maximum, 1, needs T > D).
- `skean`: Skean et al., "Layer by Layer". As `wei` but divided by log min(T, D), that code's default. That code also
  sets negative entries of the Gram matrix to 0, which makes the entropy too high; this step is omitted here, so
  published values are higher.
"""


def _spectrum(z: Tensor) -> Tensor:
    """[..., min(T, D)] eigenvalues of `Z Z^T` over their sum; NaN if all are zero or `z` is not finite."""
    gram = z.mT @ z if z.shape[-2] > z.shape[-1] else z @ z.mT
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


class RenyiEntropy(Measure):
    """Mean entropy over sequences, of the residual stream in layers 0..L and the value states in layers 1..L.

    All positions except padding are used, regardless of the token policy. At most `Setup.entropy_sequences` sequences
    are used, chosen by a seeded hash of their index; a sequence whose entropy is NaN (all states zero) is excluded.
    """

    name = "renyi_entropy"
    units = dict.fromkeys([f"mean:{PRESET}:{alpha:g}" for alpha in ALPHAS], "nats")
    sites = ("residual", "value")
    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("sums", len(self.sites), setup.num_layers + 1, len(ALPHAS))
        self.add_sum("counts", len(self.sites), setup.num_layers + 1)
        self.threshold = EMPTY
        if setup.entropy_sequences < setup.num_sequences:
            ranks = priority(torch.arange(setup.num_sequences), setup.seed).sort().values
            self.threshold = int(ranks[setup.entropy_sequences])

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        mask = observation.attention_mask
        chosen = (priority(observation.sequence, self.setup.seed) < self.threshold).to(mask.device) & mask.any(1)
        for index, site in enumerate(self.sites):
            if site not in observation.states:
                continue
            for sequence in chosen.nonzero().flatten().tolist():
                self._add(index, observation.states[site][:, sequence, mask[sequence]])

    def _add(self, site: int, z: Tensor) -> None:
        """Add the states of one sequence, [S, T, D], for the last S of layers 0..L."""
        prepare, unit = PRESETS[PRESET]
        shares = torch.cat([_spectrum(prepare(part.double())) for part in z.split(LAYERS_AT_ONCE)])
        entropy = torch.stack([_entropy(shares, alpha) for alpha in ALPHAS], dim=1) / unit(*z.shape[-2:])  # [S, alphas]
        valid = entropy.isfinite().all(1, keepdim=True)
        self.sums[site, -len(z) :] += entropy.where(valid, 0.0).to(self.sums)
        self.counts[site, -len(z) :] += valid[:, 0].to(self.counts)

    def compute(self) -> tuple[Tensor, Tensor]:
        """[2, L+1, alphas] mean entropy at the two sites, and [2, L+1] numbers of sequences."""
        return self.sums / self.counts[..., None], self.counts.clone()

    def rows(self) -> list[Row]:
        """Rows for every captured site, layer and order."""
        means, counts = self.compute()
        rows = []
        for index, site in enumerate(self.sites):
            if not counts[index].any():
                continue
            for layer in range(index, self.setup.num_layers + 1):  # value states begin with layer 1
                count = int(counts[index, layer])
                for statistic, value in zip(self.units, means[index, layer].tolist(), strict=True):
                    rows.append(self.row(statistic, value, count, layer, site=site))
        return rows
