"""Matrix-based Renyi entropy: over how many directions the tokens of a sequence spread (LIME, Sec. 5.3)."""

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
"""Layers whose float64 copies are held together."""


def renyi_entropy(z: Tensor, alpha: float = 1.0, preset: str = PRESET) -> Tensor:
    r"""Matrix-based Renyi entropy of each sequence's states.

    .. math::
        S_\alpha(Z) = \frac{1}{1 - \alpha} \log \sum_i \left( \frac{\lambda_i(K)}{\operatorname{tr} K} \right)^\alpha,
        \quad K = Z Z^\top

    with the limits `-sum p log p` at alpha = 1, `log rank` at 0 and `-log max p` at infinity. In float64, through the
    smaller of the T x T and D x D eigenproblems (they share their non-zero eigenvalues); eigenvalues below
    `min(T, D)` units of rounding count as zero. Entries of `K` are never clamped.

    Args:
        z: states of T tokens, `[..., T, D]`.
        alpha: order, at least 0; `math.inf` is allowed.
        preset: a convention of `PRESETS`. Values of different presets or orders are not comparable.

    Returns:
        `[...]` float64 in nats, in [0, log min(T, D)] (`wei` and `skean`: a share in [0, 1]); NaN where all (prepared)
        states are zero or one is not finite.

    Raises:
        ValueError: if the preset is unknown, alpha is negative, or `z` has fewer than two dimensions.

    Source: "LIME: layer-integrated memory", Sec. 5.3; the presets' sources stand beside them.
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
    """A convention: what happens to the states beforehand, and what (of T and D) the entropy is divided by."""

    prepare: Callable[[Tensor], Tensor]
    unit: Callable[[int, int], float]


def _standardise(z: Tensor) -> Tensor:
    """Z-score every feature over the tokens, and over the samples where the axis before the tokens' holds them."""
    over = (-3, -2) if z.ndim > 2 else (-2,)
    correction = min(1, math.prod(z.shape[axis] for axis in over) - 1)  # a lone token has deviation 0
    return (z - z.mean(over, keepdim=True)) / (z.std(over, correction=correction, keepdim=True) + 1e-5)


def _centre_and_normalise(z: Tensor) -> Tensor:
    """Subtract the mean token, then give every token unit length; a token at the mean stays zero."""
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
"""The conventions of the literature.

- `plain`: the papers' formula, natural logarithm, no preprocessing.
- `lime-code`: LIME's public code. Every feature is z-scored over samples and tokens (eps 1e-5), `[..., B, T, D]`; one
  sequence given alone, `[T, D]`, is z-scored over its own tokens. That code uses alpha = 0.5.
- `wei`: Wei et al., "Diff-eRank" and "Matrix-Entropy". Tokens centred and scaled to unit length, alpha = 1, divided by
  log D: 1 needs T > D.
- `skean`: Skean et al., "Layer by Layer". As `wei` but divided by log min(T, D), that code's default. It also sets the
  negative entries of the Gram matrix to 0, after which it is no Gram matrix any more and the entropy is too high; that
  step is left out here, so its published figures lie above these.
"""


def _spectrum(z: Tensor) -> Tensor:
    """[..., min(T, D)] eigenvalues of `Z Z^T` over their sum; NaN where all are zero or `z` is not finite."""
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

    Every position that is not padding takes part, whatever the token policy. At most `Setup.entropy_sequences`
    sequences are read, chosen by a seeded hash of their index; a sequence without entropy (all zero) is left out.
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
        """Add one sequence's states, [S, T, D]: the last S of layers 0..L."""
        prepare, unit = PRESETS[PRESET]
        shares = torch.cat([_spectrum(prepare(part.double())) for part in z.split(LAYERS_AT_ONCE)])
        entropy = torch.stack([_entropy(shares, alpha) for alpha in ALPHAS], dim=1) / unit(*z.shape[-2:])  # [S, alphas]
        valid = entropy.isfinite().all(1, keepdim=True)
        self.sums[site, -len(z) :] += entropy.where(valid, 0.0).to(self.sums)
        self.counts[site, -len(z) :] += valid[:, 0].to(self.counts)

    def compute(self) -> tuple[Tensor, Tensor]:
        """[2, L+1, alphas] mean entropy of the two sites, and [2, L+1] sequences behind it."""
        return self.sums / self.counts[..., None], self.counts.clone()

    def rows(self) -> list[Row]:
        """Rows for every site that was read, its layers and the orders."""
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
