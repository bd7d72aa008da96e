"""Effect of removing a part of a layer on the later layers and on the prediction (Csordás et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fulldepth.metrics.base import POSITION_BITS, Estimated, Setup
from fulldepth.metrics.reservoir import Reservoir, priority
from fulldepth.metrics.standard_errors import Estimate, EstimateArray, influence_of_ratio, standard_error

SCOPES = ("all", "future")
"""`all`: a part is removed at every position. `future`: only at positions before t, and effects are read from t on."""
STRIDE = 8
"""The positions t of the scope `future` are multiples of this number."""
SHARE = 0.9
"""Share of positions below the quantile `q90`."""
OVER_LAYERS = "_of_layers"
"""End of the names of means over all layers that are removed in turn."""


def relative_change(update: Tensor, changed: Tensor) -> Tensor:
    r"""Relative change of a layer's update when a part of an earlier layer is removed, per token.

    .. math:: E_{s, l}(t) = \frac{\|d_l(t) - d'_l(t)\|}{\|d_l(t)\|}, \quad d_l = h_l - h_{l - 1}

    Args:
        update: update :math:`d_l` of layer l in the whole model, `[..., D]`.
        changed: update :math:`d'_l` of layer l without the part of layer s, same shape.

    Returns:
        `[...]`, unit 1, in [0, inf]; 0 = the update is the same, 1 = the change is as long as the update. NaN where
        both updates are exactly zero, inf where only `update` is. float32, or float64 for updates in float64: norms in
        half precision would overflow.

    Raises:
        ValueError: if the shapes differ.

    Source: Csordás, Manning, Potts, "Do Language Models Use Their Depth Efficiently?", NeurIPS 2025, Sec. 3.2.
    """
    if update.shape != changed.shape:
        raise ValueError(
            f"update and changed must have one shape, got {tuple(update.shape)} and {tuple(changed.shape)}"
        )
    if update.dtype != torch.float64:
        update, changed = update.float(), changed.float()
    return torch.linalg.vector_norm(update - changed, dim=-1) / torch.linalg.vector_norm(update, dim=-1)


def draw_starts(lengths: Tensor, sequence: Tensor, number: int, seed: int) -> Tensor:
    """Draw the positions t of the scope `future` for every sequence.

    The candidates of a sequence with n tokens are the multiples of 8 below n: t = 8 means that a part is removed at the
    first eight tokens, and that effects are read from the ninth token on. The `number` candidates of smallest seeded
    hash of (sequence, t) are drawn, without replacement, so that the draw depends on neither batches nor other
    sequences. A sequence with fewer candidates gets all of them; one of at most 8 tokens has none, and no part in
    effects of the scope `future`.

    Args:
        lengths: `[B]` tokens of each sequence.
        sequence: `[B]` index of each sequence in the data.
        number: positions to draw.
        seed: seed of the draw.

    Returns:
        `[number, B]` int64: positions t in ascending order, then 0 where a sequence has no further one.
    """
    candidates = torch.arange(STRIDE, max(int(lengths.max()), STRIDE + 1), STRIDE)  # [C]
    ranks = priority((sequence.cpu()[:, None] << POSITION_BITS) | candidates, seed)  # [B, C]
    absent = torch.iinfo(torch.int64).max
    ranks = ranks.where(candidates < lengths.cpu()[:, None], absent)
    order = ranks.argsort(dim=1)[:, :number]
    drawn = candidates[order].where(ranks.gather(1, order) < absent, absent).sort(dim=1).values
    starts = torch.zeros(len(lengths), number, dtype=torch.int64)
    starts[:, : drawn.shape[1]] = drawn.where(drawn < absent, 0)
    return starts.T


@dataclass(frozen=True)
class Removals:
    """Changes in a batch, at N positions that are read, when one part of every layer is removed in turn."""

    part: str
    """`layer`, `attention` or `mlp`."""
    scope: str
    """One of `SCOPES`."""
    keys: Tensor
    """[N] int64: the sequence of each position, shifted by `POSITION_BITS`, plus a number that is unique in it."""
    later: Tensor
    """[P, N] relative changes of the updates of layer l without the part of layer s, for the pairs of `pairs`."""
    divergence: Tensor | None = None
    """[L, N] divergence of the predictions in nats; None for a model without predictions at every position."""
    output_change: Tensor | None = None
    """[L, N] Euclidean norm of the change of the predicted probabilities."""
    loss_added: Tensor | None = None
    """[L, M] loss added in nats at the positions with a target, in the scope `all`."""
    owners: Tensor | None = None
    """[M] int64: the sequence of each position with a target."""


def pairs(num_layers: int) -> Tensor:
    """[2, P] int64 pairs of 0-based layers s < l, sorted: s is removed and l is later."""
    return torch.triu_indices(num_layers, num_layers, 1)


class LayerEffect(Estimated):
    """Effects of removing a part of each layer in turn on the updates of later layers and on the prediction.

    The site of a row is the part that is removed, `layer` is s, `other` is l. Means, maxima and their counts are over
    all positions read: in the scope `future` over all pairs of a drawn t and a position from t on. Quantiles are over a
    seeded sample of them (`reservoir_tokens`; times the number of drawn t in the scope `future`), exact if all fit.

    The means' standard errors come from sums per group of clusters. The error of the quantile is Woodruff's: the
    cluster-robust error of the share of positions below the quantile, mapped back through the empirical distribution.
    Maxima have none. `later_all` and `later_future` are means of `mean_all` and `mean_future` over the later layers.
    Statistics that end in `_of_layers` are means over the removed layers.
    """

    name = "layer_effect"
    optional = True
    needs = frozenset({"interventions"})
    units: ClassVar[Mapping[str, str]] = {
        **{f"{name}_{scope}": "1" for name in ("mean", "q90", "max", "later", "output_change") for scope in SCOPES},
        **{f"standard_error_of_{name}_{scope}": "1" for name in ("mean", "q90", "later") for scope in SCOPES},
        **{f"{prefix}divergence_{scope}": "nats" for prefix in ("", "standard_error_of_") for scope in SCOPES},
        **{
            f"{prefix}{name}_{scope}{OVER_LAYERS}": unit
            for prefix in ("", "standard_error_of_")
            for name, unit in (("later", "1"), ("divergence", "nats"))
            for scope in SCOPES
        },
        "loss_added": "nats",
        "standard_error_of_loss_added": "nats",
    }
    sums: Tensor
    counts: Tensor
    largest: Tensor
    loss_sums: Tensor
    loss_counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        layers = setup.num_layers
        parts = len(setup.effect_parts)
        self.pairs = pairs(layers)
        # the last index: 0 = the prediction, 1..L = the update of that layer
        self.add_grouped("sums", parts, 2, layers, layers + 1)
        self.add_grouped("counts", parts, 2, layers, layers + 1)
        self.add("largest", (parts, 2, layers, layers + 1), reduce="max", device=setup.device)
        self.add_grouped("loss_sums", parts, layers)
        self.add_grouped("loss_counts", parts, layers)
        shape = (self.pairs.shape[1],)
        dtype = torch.float64 if setup.double else torch.float32
        kept_positions = setup.effect_tokens or setup.reservoir_tokens
        self.samples = nn.ModuleList(
            Reservoir(kept_positions * draws, shape, setup.seed, setup.device, dtype)
            for _ in setup.effect_parts
            for draws in (1, setup.effect_positions)
        )
        """The samples of positions of each part and scope."""

    def update(self, removals: Removals) -> None:
        """Add one batch."""
        device = self.sums.device
        part = self.setup.effect_parts.index(removals.part)
        scope = SCOPES.index(removals.scope)
        removed, later = self.pairs.to(device)
        weights = self._groups_of(removals.keys >> POSITION_BITS)  # [N, G]
        self._add(removals.later, weights, part, scope, removed, later + 1)
        self.samples[2 * part + scope].update(removals.later.T, removals.keys)  # type: ignore[operator]
        if removals.divergence is not None and removals.output_change is not None:
            layers = torch.arange(self.setup.num_layers, device=device)
            self._add(removals.divergence, weights, part, scope, layers, torch.zeros_like(layers))
            self.largest[part, scope, :, 0] = torch.maximum(
                self.largest[part, scope, :, 0], _largest(removals.output_change.to(device))
            )
        if removals.loss_added is not None and removals.owners is not None:
            values = removals.loss_added.to(device).double()
            finite = values.isfinite()
            weights = self._groups_of(removals.owners)
            self.loss_sums[:, part] += (values.where(finite, 0.0) @ weights).T
            self.loss_counts[:, part] += (finite.double() @ weights).T

    def _groups_of(self, sequence: Tensor) -> Tensor:
        """[N, G] float64: 1 in the column of the group of each sequence `[N]`."""
        group = self.setup.group_of[sequence.cpu()]
        return one_hot(group, self.setup.groups).double().to(self.sums.device)

    def _add(self, values: Tensor, weights: Tensor, part: int, scope: int, removed: Tensor, later: Tensor) -> None:
        """Add finite `values [K, N]` with `weights [N, G]` to the sums of K pairs; of updates, also to the maxima."""
        values = values.to(self.sums.device).double()
        finite = values.isfinite()
        values = values.where(finite, 0.0)
        self.sums[:, part, scope, removed, later] += (values @ weights).T
        self.counts[:, part, scope, removed, later] += (finite.double() @ weights).T
        if bool((later > 0).all()):
            before = self.largest[part, scope, removed, later]
            self.largest[part, scope, removed, later] = torch.maximum(before, _largest(values))

    def compute(self) -> list[Estimate]:
        """Numbers of every part, scope and removed layer that was measured, then means over the removed layers."""
        counts = self.counts.sum(0)
        means = self.sums.sum(0) / counts  # [parts, 2, L, L+1]
        influences = influence_of_ratio(self.sums, self.counts)  # [G, parts, 2, L, L+1]
        pairs = EstimateArray.of(means, counts, influences)
        later = EstimateArray.of(
            means[..., 1:].nanmean(-1), counts[..., 1:].amax(-1), influences[..., 1:].nanmean(-1)
        )  # [parts, 2, L]
        divergence = EstimateArray.of(means[..., 0], counts[..., 0], influences[..., 0])  # [parts, 2, L]
        loss_counts = self.loss_counts.sum(0)
        of_loss = influence_of_ratio(self.loss_sums, self.loss_counts)
        loss = EstimateArray.of(self.loss_sums.sum(0) / loss_counts, loss_counts, of_loss)  # [parts, L]
        largest = self.largest.cpu()
        numbers: list[Estimate] = []
        for part, site in enumerate(self.setup.effect_parts):
            for scope, name in enumerate(SCOPES):
                numbers += self._of_pairs(pairs, part, scope)
                for removed in range(self.setup.num_layers):
                    at = (part, scope, removed)
                    layer = removed + 1
                    change = float(largest[*at, 0])
                    count = int(divergence.counts[at])
                    numbers += [
                        later.at(at, f"later_{name}", layer, site),
                        divergence.at(at, f"divergence_{name}", layer, site),
                        Estimate(f"output_change_{name}", change, count, layer, site=site),
                    ]
                    if name == "all":
                        numbers.append(loss.at((part, removed), "loss_added", layer, site))
        for statistic, by_layer in (("later", later), ("divergence", divergence)):
            values, _, _, of_groups = by_layer
            measured_layers = values.isfinite().sum(-1)
            over_layers = EstimateArray.of(values.nanmean(-1), measured_layers, of_groups.nanmean(-2).movedim(-1, 0))
            numbers += [
                over_layers.at((part, scope), f"{statistic}_{name}{OVER_LAYERS}", site=site)
                for part, site in enumerate(self.setup.effect_parts)
                for scope, name in enumerate(SCOPES)
            ]
        return [number for number in numbers if number.count]

    def _of_pairs(self, pairs: EstimateArray, part: int, scope: int) -> Iterator[Estimate]:
        """Yield the mean, quantile and maximum of every pair of layers; their influences are too many to store."""
        name = SCOPES[scope]
        quantile, error = self._quantiles(2 * part + scope)
        for index, (removed, later) in enumerate(self.pairs.T.tolist()):
            at = (part, scope, removed, later + 1)
            mean = Estimate(
                f"mean_{name}",
                float(pairs.values[at]),
                int(pairs.counts[at]),
                removed + 1,
                later + 1,
                self.setup.effect_parts[part],
                float(pairs.errors[at]),
            )
            yield mean
            yield mean._replace(statistic=f"q90_{name}", value=float(quantile[index]), error=float(error[index]))
            yield mean._replace(statistic=f"max_{name}", value=float(self.largest[at]), error=math.nan)

    def _quantiles(self, index: int) -> tuple[Tensor, Tensor]:
        """[P] quantiles of a sample of positions, and their standard errors."""
        sample = self.samples[index].compute()  # type: ignore[operator]
        group = self.setup.group_of[sample.keys.cpu() >> POSITION_BITS]
        columns = [sampled_quantile(part, group, self.setup.groups) for part in sample.features.cpu().split(256, 1)]
        if not columns:
            return torch.empty(0), torch.empty(0)
        quantile, error = (torch.cat(values) for values in zip(*columns, strict=True))
        return quantile, error


def _largest(values: Tensor) -> Tensor:
    """[K] float64 largest value of each row of `[K, N]`, 0 for N = 0."""
    return values.double().amax(1) if values.shape[1] else values.new_zeros(len(values), dtype=torch.float64)


def sampled_quantile(values: Tensor, group: Tensor, groups: int, share: float = SHARE) -> tuple[Tensor, Tensor]:
    r"""Quantile of every column of a sample, and its cluster-robust standard error (Woodruff 1952).

    .. math:: \mathrm{SE}(q) = \frac{Q(p + \mathrm{SE}(\hat p)) - Q(p - \mathrm{SE}(\hat p))}{2}

    :math:`\hat p` is the share of values up to the quantile :math:`q = Q(p)`, with the error of a ratio of sums per
    group of clusters.

    Args:
        values: `[N, K]`; values that are not finite are left out.
        group: `[N]` int64 group of clusters of each row.
        groups: G.
        share: p.

    Returns:
        Quantile and standard error, `[K]` float64 each, interpolated linearly (numpy's default); NaN without values,
        and for errors with too few groups.
    """
    values = values.double()
    finite = values.isfinite()
    ordered = values.where(finite, math.inf).sort(dim=0).values
    counts = finite.sum(0)
    quantile = _interpolated(ordered, counts, torch.full_like(counts, share, dtype=torch.float64))
    members = one_hot(group, groups).double().T  # [G, N]
    below = members @ (finite & (values <= quantile)).double()
    error_of_share = standard_error(influence_of_ratio(below, members @ finite.double()))  # [K]
    ends = [_interpolated(ordered, counts, (share + sign * error_of_share).clamp(0, 1)) for sign in (-1, 1)]
    return quantile, (ends[1] - ends[0]) / 2


def _interpolated(ordered: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    """[K] quantiles of the first `counts: [K]` values of sorted columns `[N, K]`; NaN where there is none."""
    if not len(ordered):
        return torch.full_like(share, torch.nan)
    rank = share.nan_to_num(0.0) * (counts - 1).clamp(min=0)
    below = ordered.gather(0, rank.floor().long()[None])[0]
    above = ordered.gather(0, rank.ceil().long()[None])[0]
    return torch.lerp(below, above, rank - rank.floor()).where((counts > 0) & ~share.isnan(), torch.nan)
