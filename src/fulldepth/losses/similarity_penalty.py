"""Similarity regulariser: penalises the angle between every layer and the last one (Aligned training, App. B.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fulldepth.hf import Anatomy, Classifier
from fulldepth.losses.aligned_loss import layer_weights
from fulldepth.losses.jump_penalty import mean_displacement
from fulldepth.losses.term import Context, Term, check_states, recomputed, statistics_dtype


class SimilarityPenalty(Term):
    """Cosine distance of every layer to the last one (App. B.3).

    In classifiers of texts and images it compares the state that the head reads (usually that of [CLS]), in other
    models every token that counts.
    """

    name = "similarity"
    sites = ("residual",)
    weights: Literal["linear", "uniform", "sum"] | list[float] | tuple[float, ...] = "linear"
    """Weights of the layers: linear (2l / (L (L+1))), uniform (1/L), sum (1), or L numbers."""

    def check(self, anatomy: Anatomy) -> None:
        """Check that there is one weight per layer."""
        layer_weights(self.weights, anatomy.num_layers)

    def value(self, context: Context) -> Tensor:
        """Compute `similarity_penalty` of the residual stream."""
        states = context.states["residual"][1:]
        classifier = self._pooling(context)
        if classifier is None:
            return similarity_penalty(states, self.weights, context.mask)
        mask = classifier.sample_mask(context.batch, context.task.counted(context.batch, states[-1]))
        features = [classifier.feature(state, mask) for state in states]  # L of [B, D]
        return similarity_penalty(features, self.weights)

    def factor(self, context: Context, device: torch.device) -> Tensor | float:
        """Return the batch's share of the step's tokens, or of its samples where samples are compared."""
        return super().factor(context, device) if self._pooling(context) is None else context.portion.share

    def _pooling(self, context: Context) -> Classifier | None:
        """Return the head whose input is compared; None where tokens are compared."""
        return context.classifier if context.task.classifies else None


def similarity_penalty(
    hidden_states: Sequence[Tensor], weights: str | Sequence[float] = "linear", mask: Tensor | None = None
) -> Tensor:
    r"""Weighted sum of the mean cosine distances between every layer and the last.

    .. math:: L_{sim} = \sum_{l=1}^{L} \lambda_l \, \mathrm{mean}_{tokens} \left(1 - \cos(h_l, h_L)\right)
        \in \left[0, 2 \sum_{l=1}^{L-1} \lambda_l\right]

    The upper end is 2 (L - 1) / (L + 1) with linear weights, 2 (L - 1) / L with uniform ones, and 2 (L - 1) with
    `"sum"`; it is reached where all layers before the last are opposite to it.
    Unweighted: the objective multiplies it by beta. Gradients flow through both states. The last term is 0 by
    construction and omitted. States are not copied, as in `jump_penalty`.

    Args:
        hidden_states: residual stream `h_1, ..., h_L`, each `[B, T, D]` (or `[B, D]`), possibly on several devices.
        weights: `"linear"` for `2l / (L(L+1))`, `"uniform"` for `1/L`, `"sum"` for 1, or L numbers of at
            least 0.
        mask: `[B, T]` (or `[B]`), True (or 1) = counts. Other positions have no effect, even if they are NaN.

    Returns:
        Scalar, unit 1, float32 (float64 for float64 states), on the device of the last state. A zero vector has no
        direction: as in `fulldepth.metrics.displacement`, the mean excludes such tokens, and their gradient is 0. 0 if
        no token counts.

    Raises:
        FulldepthError: for an empty list of states, mismatched shapes, invalid weights or an invalid mask.

    Source: "Representation progression and aligned training", App. B.3 (cosine-similarity regulariser).
    """
    check_states(hidden_states, mask)
    last = hidden_states[-1]
    total = last[:0].sum(dtype=statistics_dtype(last))  # a 0 in the graph, also for a single layer
    for weight, state in zip(layer_weights(weights, len(hidden_states))[:-1], hidden_states[:-1], strict=True):
        if weight:
            total = total + 2 * weight * recomputed(mean_displacement, state, last, mask)
    return total
