"""The displacement penalty inside a training step: no copy of a hidden state, and one gradient at a time.

Ordinary autograd would begin the backward pass with the gradients of all L+1 states at once. Here the forward pass
keeps references and three numbers per token, and each state's share is added when its own gradient arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.losses.jump_penalty import (
    Parts,
    Shares,
    check_states,
    displacement_parts,
    gradient_shares,
    jump_weights,
    mean_over_tokens,
    weighted_sum,
)


def token_count(states: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens that count in `states: [B, T, ...]`, at least 1, on their device."""
    count = torch.tensor(states.shape[0] * states.shape[1]) if mask is None else mask.sum()
    return count.to(states.device).clamp(min=1)


class Displacements:
    """Displacements of one forward pass, and their gradients for the backward pass to come.

    Args:
        states: `h_0..h_L`, `[B, T, D]`, the tensors that the model itself goes on with: a gradient reaches no copy.
        alpha: sharpness of the layers' weights (JREG Eq. 6).
        mask: `[B, T]` bool, True = counts; None = all.

    Raises:
        FulldepthError: as `jump_penalty`.
    """

    def __init__(self, states: Sequence[Tensor], alpha: float, mask: Tensor | None = None) -> None:
        check_states(states, mask, least=2)
        self._states: list[Tensor | None] = [state.detach() for state in states]
        self._versions = [state._version for state in states]
        self._weights = jump_weights(len(states) - 1, alpha).tolist()
        self._upstream: Tensor | None = None
        self._factor: Tensor | float = 0.0
        self._above: tuple[int, Shares] | None = None
        with torch.no_grad():
            self._parts: list[Parts] = []
            for before, after in pairwise(states):
                known = self._parts[-1].norm_current if self._parts else None
                self._parts.append(displacement_parts(before, after, known))
            home = states[-1].device
            self._mask = None if mask is None else mask.to(home)
            means = [mean_over_tokens(parts.displacement, mask).to(home) for parts in self._parts]
            pairs = zip(self._weights, means, strict=True)
            self.value = torch.stack([weight * mean for weight, mean in pairs if weight]).sum()
        me = weakref.ref(self)  # a hook that held this object would hold its own tensor
        for layer, state in enumerate(states):
            if state.requires_grad:
                state.register_hook(_adder(me, layer))

    def added_to(self, loss: Tensor, factor: Tensor | float) -> Tensor:
        """`loss + factor * penalty`; its backward pass brings the penalty's gradients into the states."""
        self._factor = factor
        combined: Tensor = _Carrier.apply(loss, self.value * factor, self)
        return combined

    def arm(self, upstream: Tensor) -> None:
        """The backward pass has begun: `upstream` is the gradient of the combined loss."""
        if torch.is_grad_enabled():
            raise FulldepthError("The displacement penalty has no second derivatives (create_graph=True).")
        if self._upstream is not None:
            raise FulldepthError(
                "The backward pass ran twice over one forward pass; the displacement penalty keeps its states for one."
            )
        self._upstream = upstream

    def add(self, layer: int, gradient: Tensor) -> Tensor | None:
        """The gradient of `h_layer` with the penalty's share; None (unchanged) outside the combined loss."""
        if self._upstream is None:
            return None
        below, above = self._shares(layer), self._shares(layer + 1)
        own = [
            share.to(gradient.device)
            for share in (below and below.current, above and above.previous)
            if share is not None
        ]
        terms = [(self._state(layer), torch.stack(own).sum(0))] if own else []
        terms += [(self._state(layer - 1), below.other)] if below else []
        terms += [(self._state(layer + 1), above.other)] if above else []
        if layer + 1 < len(self._states):
            self._states[layer + 1] = None  # its own gradient came before: nobody reads it again
        self._above = None if below is None else (layer, below)
        return weighted_sum(terms, None if self._mask is None else ~self._mask, gradient) if terms else None

    def _shares(self, layer: int) -> Shares | None:
        """The factors of the gradient of one layer's displacement; None for a layer that has none."""
        if not 1 <= layer < len(self._states) or self._weights[layer - 1] == 0:
            return None
        if self._above is not None and self._above[0] == layer:
            return self._above[1]
        assert self._upstream is not None
        parts = self._parts[layer - 1]
        scale = (self._upstream * self._factor).to(parts.cos.device) * self._weights[layer - 1]
        weight = scale / token_count(parts.cos, self._mask)
        if self._mask is not None:
            weight = weight * self._mask.to(weight.device)
        return gradient_shares(parts, weight)

    def _state(self, index: int) -> Tensor:
        state = self._states[index]
        if state is None:
            raise FulldepthError(f"The gradients of the states arrived out of order at h_{index}.")
        if state._version != self._versions[index]:
            raise FulldepthError(f"h_{index} was overwritten in place between the forward and the backward pass.")
        return state


class _Carrier(torch.autograd.Function):
    """Adds a number to the loss and tells the displacements when, and how strongly, the backward pass begins."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, owner: Displacements) -> Tensor:
        ctx.owner = owner
        return loss + value.to(loss.device, loss.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.owner.arm(gradients[0])
        return gradients[0], None, None


def _adder(owner: weakref.ref[Displacements], layer: int) -> Callable[[Tensor], Tensor | None]:
    def add(gradient: Tensor) -> Tensor | None:
        alive = owner()
        return None if alive is None else alive.add(layer, gradient)

    return add
