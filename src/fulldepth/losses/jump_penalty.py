"""Jump-suppressing regulariser: penalises the angular displacement of late layers (JREG, Eq. 5-6).

The mean displacement is a differentiable function here, and its gradient is part of a model's backward pass. Formula
and treatment of zero vectors are those of `fulldepth.metrics.displacement`: zero vectors have no direction, are
excluded from means, and have gradient 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.losses.term import Context, Term, check_states, nodes_of, recomputed, statistics_dtype
from fulldepth.metrics import displacement


class JumpPenalty(Term):
    """JREG's displacement penalty, Eq. 5-6."""

    name = "jump"
    sites = ("residual",)
    alpha: Annotated[float, Field(ge=0)] = 1.0
    """Sharpness of the layers' weights; infinity = the last layer only."""

    def value(self, context: Context) -> Tensor:
        """Compute `jump_penalty` of the residual stream."""
        return jump_penalty(context.states["residual"], self.alpha, context.mask)

    def apply(self, loss: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Add the term; if each state is a tensor of the model that the loss depends on, its gradients are added as
        theirs arrive.

        See `Displacements`. A tree may leave out a layer's output, and a loss of all layers the last layer's.
        """
        states = context.states["residual"]
        if not (context.states.holds_the_stream and all_reached(loss, states)):
            return super().apply(loss, context)
        displacements = Displacements(states, self.alpha, context.mask)
        factor = self.weight * self.factor(context, states[-1].device)
        return displacements.added_to(loss, factor), displacements.value


def all_reached(loss: Tensor, states: Sequence[Tensor]) -> bool:
    """Return True if the backward pass of a loss gives each of the states that have a gradient one."""
    waiting = {state.grad_fn for state in states if state.grad_fn is not None}
    for node in nodes_of(loss):
        waiting.discard(node)
        if not waiting:
            return True
    return not waiting


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
        weight * recomputed(mean_displacement, *pair, mask).to(hidden_states[-1].device)
        for weight, pair in zip(weights, pairwise(hidden_states), strict=True)
        if weight
    ]
    return torch.stack(terms).sum()


def jump_weights(num_layers: int, alpha: float = 1.0) -> Tensor:
    """`[L]` float64: weights of layers 1..L in the penalty, `softmax(alpha * (1..L))` (JREG, Eq. 5).

    Args:
        num_layers: L, at least 1.
        alpha: at least 0; `inf` gives the last layer weight 1.

    Returns:
        The weights, which sum to 1.

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


def mean_displacement(previous: Tensor, current: Tensor, mask: Tensor | None) -> Tensor:
    """Mean displacement (a scalar) of the tokens that count and have a direction; 0 if there are none."""
    dtype = statistics_dtype(previous, current)
    before = previous.to(current.device, dtype)
    after = current.to(dtype)
    with torch.no_grad():  # NaN states have a direction, so that they show in the loss
        counted = (before.norm(dim=-1) != 0) & (after.norm(dim=-1) != 0)  # [B, T]
        if mask is not None:
            counted &= mask.to(current.device, torch.bool)
    before, after = (state.where(counted[..., None], 1.0) for state in (before, after))
    return displacement(before, after).masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


class Displacements:
    """Penalty of one forward pass whose gradients are added in its backward pass, state by state.

    Ordinary autograd would start the backward pass with the gradients of all L+1 states at once. Here each state's
    contribution is computed when its own gradient arrives, from two states at a time.

    Args:
        states: `h_0..h_L`, `[B, T, D]`, the model's tensors, because gradients do not reach copies.
        alpha: sharpness of the layers' weights, as in `jump_penalty`.
        mask: `[B, T]` bool, True = counts; None = all.

    Raises:
        FulldepthError: as `jump_penalty`.
    """

    def __init__(self, states: Sequence[Tensor], alpha: float = 1.0, mask: Tensor | None = None) -> None:
        with torch.no_grad():
            self.value = jump_penalty(states, alpha, mask)
        self._states: list[Tensor | None] = [state.detach() for state in states]
        self._versions = [state._version for state in states]
        self._weights = jump_weights(len(states) - 1, alpha).tolist()
        self._mask = mask
        self._upstream: Tensor | None = None
        self._from_above: Tensor | None = None
        self._next = len(states) - 1
        for layer, state in enumerate(states):
            if state.requires_grad:
                state.register_hook(partial(self._added, layer))

    def added_to(self, loss: Tensor, factor: Tensor | float) -> Tensor:
        """Return `loss + factor * penalty`; its backward pass adds the penalty's gradients to those of the states."""
        combined = loss + (self.value * factor).to(loss.device, loss.dtype)
        combined.register_hook(partial(self._begin, factor))
        return combined

    def _begin(self, factor: Tensor | float, upstream: Tensor) -> None:
        """Receive the gradient of the combined loss at the start of the backward pass."""
        if torch.is_grad_enabled():
            raise FulldepthError("The displacement penalty has no second derivatives (create_graph=True).")
        if self._upstream is not None:
            raise FulldepthError(
                "The backward pass ran twice over one forward pass; the displacement penalty stores its states for one."
            )
        self._upstream = upstream * factor

    def _added(self, layer: int, gradient: Tensor) -> Tensor | None:
        """Return the gradient of `h_layer` plus the penalty's; None (unchanged) outside the loss's backward pass."""
        if self._upstream is None or layer > self._next:  # a leaf in a later backward pass is above `_next`
            return None
        if layer < self._next:
            raise FulldepthError(
                f"The gradient of h_{layer} arrived before that of h_{self._next}; the displacement penalty needs the "
                "gradients of the states from the last layer to the first."
            )
        self._next = layer - 1
        added = self._from_above
        self._from_above = None
        if layer and self._weights[layer - 1]:
            pair = self._state(layer - 1).requires_grad_(), self._state(layer).requires_grad_()
            with torch.enable_grad():
                weighted = self._weights[layer - 1] * mean_displacement(*pair, self._mask)
            self._from_above, from_below = torch.autograd.grad(weighted, pair, self._upstream.to(weighted))
            added = from_below if added is None else added.to(from_below.device) + from_below
        self._states[layer] = None
        return None if added is None else (gradient + added.to(gradient.device)).to(gradient.dtype)

    def _state(self, index: int) -> Tensor:
        """Return a copy of `h_index` in the dtype of sums, or a view of it if it has this dtype."""
        state = self._states[index]
        assert state is not None
        if state._version != self._versions[index]:
            raise FulldepthError(
                f"h_{index}, which the displacement penalty reads, was overwritten in place between the forward and "
                "the backward pass."
            )
        return state.to(statistics_dtype(state)).detach()
