"""Mean displacement of tokens as a differentiable function, and its gradient as part of a model's backward pass.

Formula and treatment of zero vectors are those of `fulldepth.metrics.displacement`: zero vectors have no direction,
are excluded from means, and have gradient 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fulldepth.errors import FulldepthError
from fulldepth.losses.term import check_states, statistics_dtype
from fulldepth.metrics import displacement


def mean_displacement(previous: Tensor, current: Tensor, mask: Tensor | None) -> Tensor:
    """Mean displacement of the masked tokens that have a direction, a scalar; 0 without any. The backward pass computes
    it again and keeps references to the states only.
    """
    mean: Tensor = checkpoint(_mean, previous, current, mask, use_reentrant=False, preserve_rng_state=False)
    return mean


def _mean(previous: Tensor, current: Tensor, mask: Tensor | None) -> Tensor:
    dtype = statistics_dtype(previous, current)
    before, after = previous.to(current.device, dtype), current.to(dtype)
    with torch.no_grad():  # NaN states have a direction, so that they show in the loss
        counted = (before.norm(dim=-1) != 0) & (after.norm(dim=-1) != 0)  # [B, T]
        if mask is not None:
            counted &= mask.to(current.device, torch.bool)
    before, after = (state.where(counted[..., None], 1.0) for state in (before, after))
    return displacement(before, after).masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


class Displacements:
    """The weighted mean displacements of one forward pass, whose gradients are added in its backward pass.

    Ordinary autograd would start the backward pass with the gradients of all L+1 states at once. Here each state's
    contribution is computed when its own gradient arrives, from two states at a time.

    Args:
        states: `h_0..h_L`, `[B, T, D]`, the model's own tensors: gradients do not reach copies.
        weights: weights of layers 1..L in the penalty.
        mask: `[B, T]` bool, True = counts; None = all.

    Raises:
        FulldepthError: as `jump_penalty`.
    """

    def __init__(self, states: Sequence[Tensor], weights: Sequence[float], mask: Tensor | None = None) -> None:
        check_states(states, mask, least=2)
        self._states: list[Tensor | None] = [state.detach() for state in states]
        self._versions = [state._version for state in states]
        self._weights, self._mask = weights, mask
        self._upstream: Tensor | None = None
        self._from_above: Tensor | None = None
        self._next = len(states) - 1
        with torch.no_grad():
            pairs = zip(weights, pairwise(states), strict=True)
            means = [weight * _mean(*pair, mask).to(states[-1].device) for weight, pair in pairs if weight]
            self.value = torch.stack(means).sum()
        for layer, state in enumerate(states):
            if state.requires_grad:
                state.register_hook(partial(self._added, layer))

    def added_to(self, loss: Tensor, factor: Tensor | float) -> Tensor:
        """`loss + factor * penalty`; its backward pass adds the penalty's gradients to those of the states."""
        combined = loss + (self.value * factor).to(loss.device, loss.dtype)
        combined.register_hook(partial(self._begin, factor))
        return combined

    def _begin(self, factor: Tensor | float, upstream: Tensor) -> None:
        """Called at the start of the backward pass with the gradient of the combined loss."""
        if torch.is_grad_enabled():
            raise FulldepthError("The displacement penalty has no second derivatives (create_graph=True).")
        if self._upstream is not None:
            raise FulldepthError(
                "The backward pass ran twice over one forward pass; the displacement penalty keeps its states for one."
            )
        self._upstream = upstream * factor

    def _added(self, layer: int, gradient: Tensor) -> Tensor | None:
        """Gradient of `h_layer` plus the penalty's; None (unchanged) outside the combined loss's backward pass."""
        if self._upstream is None or layer > self._next:  # the latter of a leaf in a later backward pass
            return None
        if layer < self._next:
            raise FulldepthError(f"The gradients of the states arrived out of order at h_{layer}.")
        self._next, added, self._from_above = layer - 1, self._from_above, None
        if layer and self._weights[layer - 1]:
            pair = self._state(layer - 1).requires_grad_(), self._state(layer).requires_grad_()
            with torch.enable_grad():
                weighted = self._weights[layer - 1] * _mean(*pair, self._mask)
            self._from_above, own = torch.autograd.grad(weighted, pair, self._upstream.to(weighted))
            added = own if added is None else added.to(own.device) + own
        self._states[layer] = None
        return None if added is None else (gradient + added.to(gradient.device)).to(gradient.dtype)

    def _state(self, index: int) -> Tensor:
        """A copy of `h_index` in the dtype of sums, or a view of the state if it has this dtype."""
        state = self._states[index]
        assert state is not None
        if state._version != self._versions[index]:
            raise FulldepthError(f"h_{index} was overwritten in place between the forward and the backward pass.")
        return state.to(statistics_dtype(state)).detach()
