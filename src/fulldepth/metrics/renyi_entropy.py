"""Matrix-based Renyi entropy of the token states of a sequence (LIME, Sec. 5.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.core.threads import map_threads
from fulldepth.core.uncertainty import deal
from fulldepth.metrics.base import Means, Observation, Place, Setup
from fulldepth.metrics.reservoir import priority

PRESET = "plain"
ALPHAS = (0.5, 1.0, 2.0)
LAYERS_AT_ONCE = 4
"""Number of layers of a sequence that one thread converts to float64 at a time."""


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
    return _entropy(_spectrum(_gram(convention.prepare(z.double()))), alpha) / convention.unit(*z.shape[-2:])


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
        places = (len(self.sites), setup.num_layers + 1)
        super().__init__(setup, *places, len(ALPHAS), counts=(*places, 1))
        order = priority(torch.arange(setup.num_sequences), setup.seed).argsort()
        self.chosen = order[: setup.entropy_sequences].sort().values
        """Indices of the sequences used, ascending."""
        clusters = setup.clusters or range(setup.num_sequences)
        groups = deal([clusters[index] for index in self.chosen.tolist()])
        self.group_of = dict(zip(self.chosen.tolist(), groups.tolist(), strict=True))

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        prepare, unit = PRESETS[PRESET]

        def entropies(z: Tensor) -> Tensor:  # [S, alphas], of one sequence's states in some layers, [S, T, D]
            shares = _spectrum(_gram(prepare(z.double())))
            return torch.stack([_entropy(shares, alpha) for alpha in ALPHAS], dim=1) / unit(*z.shape[-2:])

        mask = observation.attention_mask
        groups = {
            row: self.group_of[index]
            for row, index in enumerate(observation.sequence.tolist())
            if index in self.group_of and bool(mask[row].any())
        }
        for index, site in enumerate(self.sites):
            if site in observation.states and groups:
                states = observation.states[site]
                parts = [part for row in groups for part in states[:, row, mask[row]].split(LAYERS_AT_ONCE)]
                entropy = torch.cat(map_threads(entropies, parts, states)).split(len(states))
                # entropy: for each row [S, alphas], of the last S of layers 0..L
                for group, values in zip(groups.values(), entropy, strict=True):
                    valid = values.isfinite().all(1, keepdim=True)
                    self.sums[group, index, -len(values) :] += values.where(valid, 0.0).to(self.sums)
                    self.counts[group, index, -len(values) :] += valid.to(self.counts)

    def places(self, counts: Tensor) -> Iterator[Place]:
        """Every captured site, layer and order; value states have no layer 0."""
        for index, site in enumerate(self.sites):
            for layer in range(index, self.setup.num_layers + 1) if counts[index].any() else ():
                for order, alpha in enumerate(ALPHAS):
                    yield Place((index, layer, order), layer, f":{PRESET}:{alpha:g}", site)
