"""Jump-suppressing regulariser: penalises the angular displacement of late layers (JREG, Eq. 5-6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.losses.displacement import Displacements, mean_displacement
from fulldepth.losses.term import Context, Term, check_states


class JumpPenalty(Term):
    """JREG's displacement penalty, Eq. 5-6."""

    name = "jump"
    sites = ("residual",)
    alpha: Annotated[float, Field(ge=0)] = 1.0
    """Sharpness of the layers' weights; infinity = the last layer only."""

    def value(self, context: Context) -> Tensor:
        """`jump_penalty` of the residual stream."""
        return jump_penalty(context.states["residual"], self.alpha, context.mask)

    def apply(self, loss: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """If the states are the model's own tensors, gradients are added as they arrive (see `Displacements`)."""
        if not context.states.holds_the_stream:
            return super().apply(loss, context)
        states = context.states["residual"]
        weights = jump_weights(len(states) - 1, self.alpha).tolist()
        displacements = Displacements(states, weights, context.mask)
        factor = self.weight * context.token_share(states[-1].device)
        return displacements.added_to(loss, factor), displacements.value


def jump_penalty(hidden_states: Sequence[Tensor], alpha: float = 1.0, mask: Tensor | None = None) -> Tensor:
    r"""Weighted mean displacement of all layers, in [0, 1].

    .. math:: L_{disp} = \sum_{l=1}^{L} w_l \, \mathrm{mean}_{tokens} \Psi_l, \quad
        \Psi_l = 1 - \frac{1 + \cos(h_{l-1}, h_l)}{2}, \quad w = \mathrm{softmax}(\alpha \cdot (1, \dots, L))

    Unweighted: the objective multiplies it by lambda (1 in the paper). For the backward pass it keeps references to the
    states and three numbers per token; states are not copied.

    Args:
        hidden_states: residual stream `h_0, ..., h_L`, each `[B, T, D]`, the last one before the final norm, possibly
            on several devices.
        alpha: sharpness of the layer weights, at least 0; 0 is uniform, `inf` the last layer only.
        mask: `[B, T]`, True (or 1) = counts. Other positions have no effect, even if they are NaN.

    Returns:
        Scalar, unit 1, float32 (float64 for float64 states), on the device of the last state. A zero vector has no
        direction: as in `fulldepth.metrics.displacement`, the mean excludes such tokens, and their gradient is 0. 0 if
        no token counts.

    Raises:
        FulldepthError: for fewer than two states, mismatched shapes, an `alpha` below 0, or an invalid mask.

    Source: "JREG: final-layer jumps", Eq. 2, 5 and 6; final layer only: Appendix D.
    """
    check_states(hidden_states, mask, least=2)
    weights = jump_weights(len(hidden_states) - 1, alpha).tolist()
    terms = [
        weight * mean_displacement(previous, current, mask).to(hidden_states[-1].device)
        for weight, previous, current in zip(weights, hidden_states[:-1], hidden_states[1:], strict=True)
        if weight
    ]
    return torch.stack(terms).sum()


def jump_weights(num_layers: int, alpha: float = 1.0) -> Tensor:
    """`[L]` float64: weights of layers 1..L in the penalty, `softmax(alpha * (1..L))` (JREG, Eq. 5).

    Args:
        num_layers: L, at least 1.
        alpha: at least 0; `inf` gives the last layer weight 1.

    Raises:
        FulldepthError: if `num_layers` is below 1, or `alpha` is negative or NaN.
    """
    if num_layers < 1:
        raise FulldepthError(f"the jump penalty needs at least one layer, got {num_layers}")
    if not alpha >= 0:
        raise FulldepthError(f"alpha of the jump penalty must be at least 0 (inf: last layer only), got {alpha}")
    before_last = torch.arange(1 - num_layers, 1, dtype=torch.float64)
    if math.isinf(alpha):
        return (before_last == 0).double()
    return torch.softmax(alpha * before_last, 0)
