"""Displacement of tokens and its gradient in closed form, without copies of hidden states.

`mean_displacement` is a differentiable function of two states. `Displacements` is for training steps: ordinary autograd
would start the backward pass with the gradients of all L+1 states at once; here the forward pass keeps references and
three numbers per token, and each state's contribution is added when its own gradient arrives.

Formula and treatment of zero vectors are those of `fulldepth.metrics.displacement`: zero vectors have no direction,
are excluded from means, and have gradient 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fulldepth.errors import FulldepthError
from fulldepth.losses.term import blocks, check_states, statistics_dtype
from fulldepth.metrics.base import angular, cosine

Side = Literal["previous", "current"]


class Parts(NamedTuple):
    """Cosine and norms of every token's two states, each `[B, T]` float32 or float64."""

    cos: Tensor
    norm_previous: Tensor
    norm_current: Tensor

    @property
    def displacement(self) -> Tensor:
        """`[B, T]`: Psi, in [0, 1]; NaN where a state is zero."""
        return angular(self.cos)

    @property
    def directed(self) -> Tensor:
        """`[B, T]` bool: both states have a direction (True for NaN states, so that they show in the loss)."""
        return (self.norm_previous != 0) & (self.norm_current != 0)

    def counted(self, mask: Tensor | None) -> Tensor:
        """`[B, T]` bool: tokens of the mask that have a direction, over which means are taken."""
        return self.directed if mask is None else self.directed & mask.to(self.cos.device, torch.bool)


@torch.no_grad()
def displacement_parts(previous: Tensor, current: Tensor, norm_previous: Tensor | None = None) -> Parts:
    """Cosine of every token's two states and their norms, without gradient; see `displacement_gradient`.

    Args:
        previous: `[..., D]`, on any device.
        current: `[..., D]`.
        norm_previous: `[...]` norms of `previous`, if they are known.

    Returns:
        `(cos, norm_previous, norm_current)`, each `[...]` on the device of `current`, float32 (float64 if a state is).
        The cosine lies in [-1, 1] and is NaN where a state is zero.

    Source: "JREG: final-layer jumps", Eq. 2.
    """
    x, y = previous.reshape(-1, previous.shape[-1]), current.reshape(-1, current.shape[-1])
    device, dtype = current.device, statistics_dtype(previous, current)
    product, norm_x, norm_y = torch.empty(3, len(y), dtype=dtype, device=device)
    for rows in blocks(len(y), y.shape[-1], device):
        a, b = x[rows].to(device, dtype), y[rows].to(device, dtype)
        product[rows], norm_y[rows] = (a * b).sum(-1), torch.linalg.vector_norm(b, dim=-1)
        if norm_previous is None:
            norm_x[rows] = torch.linalg.vector_norm(a, dim=-1)
    if norm_previous is not None:
        norm_x.copy_(norm_previous.flatten())
    parts = (cosine(product, norm_x, norm_y), norm_x, norm_y)
    return Parts(*(part.view(current.shape[:-1]) for part in parts))


@torch.no_grad()
def displacement_gradient(
    previous: Tensor,
    current: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    weight: Tensor | float,
    wrt: Side,
) -> Tensor:
    r"""Gradient of `sum(weight * Psi)` with respect to one of the two states, in closed form.

    .. math:: \frac{\partial \Psi}{\partial x} = \frac{1}{2 |x|} \left(\cos \frac{x}{|x|} - \frac{y}{|y|}\right)

    Computed on blocks of rows, so that half-precision states are never copied to float32 as a whole.

    Args:
        previous: `[..., D]`.
        current: `[..., D]`.
        parts: result of `displacement_parts(previous, current)`.
        weight: `[...]` or a scalar. Where it is 0 the gradient is 0, even for NaN states.
        wrt: "previous" or "current".

    Returns:
        `[..., D]` with the dtype and device of that state; 0 where either state is zero.
    """
    own, other = (previous, current) if wrt == "previous" else (current, previous)
    shares = gradient_shares(Parts(*parts), weight)
    terms = [(own, shares.previous if wrt == "previous" else shares.current), (other, shares.other)]
    return weighted_sum(terms, shares.other == 0)


class Shares(NamedTuple):
    """Factors of the states in the gradient of `sum(weight * Psi)`, each `[...]`; see `displacement_gradient`."""

    previous: Tensor
    """Factor of the previous state in its own gradient."""
    current: Tensor
    """Factor of the current state in its own gradient."""
    other: Tensor
    """Factor of each state in the gradient of the other."""


@torch.no_grad()
def gradient_shares(parts: Parts, weight: Tensor | float) -> Shares:
    """The gradient's factors; 0 where the weight or a norm is 0."""
    cos, norm_x, norm_y = parts
    half = torch.as_tensor(weight, dtype=cos.dtype, device=cos.device).expand(cos.shape) / 2
    dead = (half == 0) | ~parts.directed
    other = (-half / norm_x).div_(norm_y).masked_fill_(dead, 0.0)
    half = half * cos
    previous, current = ((half / norm).div_(norm).masked_fill_(dead, 0.0) for norm in (norm_x, norm_y))
    return Shares(previous, current, other)


@torch.no_grad()
def weighted_sum(terms: Sequence[tuple[Tensor, Tensor]], dead: Tensor | None, base: Tensor | None = None) -> Tensor:
    """`base + sum(factor * state)`, block by block; half precision is summed in the dtype of the factors.

    Args:
        terms: states `[..., D]` and factors `[...]`.
        dead: `[...]` bool: positions where the result is `base`, even for NaN states.
        base: `[..., D]`; None = 0.

    Returns:
        `[..., D]` with the dtype and device of `base`, or else of the first state.
    """
    like = terms[0][0] if base is None else base
    result, device, dtype = like.new_empty(like.shape), like.device, terms[0][1].dtype
    flat, start = (None if x is None else x.reshape(-1, like.shape[-1]) for x in (result, base))
    rows_of = [(x.reshape(-1, x.shape[-1]), factor.reshape(-1, 1).to(device)) for x, factor in terms]
    dead = None if dead is None else dead.reshape(-1, 1).to(device)
    assert flat is not None
    for rows in blocks(len(flat), flat.shape[-1], device):
        before = flat.new_zeros((), dtype=dtype) if start is None else start[rows].to(dtype)
        total = before
        for state, factor in rows_of:
            total = torch.addcmul(total, state[rows].to(device, dtype), factor[rows])
        flat[rows] = total if dead is None else torch.where(dead[rows], before, total)
    return result


class _Displacement(torch.autograd.Function):
    """Psi of every token and whether it has a direction, `[..., D], [..., D] -> [...], [...]`; copies no state."""

    @staticmethod
    def forward(ctx: Any, previous: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        parts = displacement_parts(previous, current)
        ctx.save_for_backward(previous, current, *parts)
        directed = parts.directed
        ctx.mark_non_differentiable(directed)
        return parts.displacement, directed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        previous, current, *parts = ctx.saved_tensors
        sides: tuple[Side, Side] = ("previous", "current")
        return tuple(
            displacement_gradient(previous, current, Parts(*parts), gradient, side) if needed else None
            for side, needed in zip(sides, ctx.needs_input_grad, strict=True)
        )


def mean_displacement(previous: Tensor, current: Tensor, mask: Tensor | None) -> Tensor:
    """Mean displacement of the masked tokens that have a direction: a scalar, differentiable once; 0 without any."""
    psi, directed = _Displacement.apply(previous, current)
    return _mean(psi, directed if mask is None else directed & mask.to(psi.device, torch.bool))


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of the `values [B, T]` that count; 0 if none does. Values that do not count may be NaN."""
    return values.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


class Displacements:
    """Displacements of one forward pass, and their gradients for its backward pass.

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
        self._weights = list(weights)
        self._upstream: Tensor | None = None
        self._factor: Tensor | float = 0.0
        self._above: tuple[int, Shares] | None = None
        with torch.no_grad():
            self._parts: list[Parts] = []
            for before, after in pairwise(states):
                norm_before = self._parts[-1].norm_current if self._parts else None
                self._parts.append(displacement_parts(before, after, norm_before))
            last_device = states[-1].device
            self._mask = None if mask is None else mask.to(last_device, torch.bool)
            means = [_mean(parts.displacement, parts.counted(mask)).to(last_device) for parts in self._parts]
            pairs = zip(self._weights, means, strict=True)
            self.value = torch.stack([weight * mean for weight, mean in pairs if weight]).sum()
        reference = weakref.ref(self)  # a strong reference would make a cycle: the hook would keep its tensor alive
        for layer, state in enumerate(states):
            if state.requires_grad:
                state.register_hook(_adder(reference, layer))

    def added_to(self, loss: Tensor, factor: Tensor | float) -> Tensor:
        """`loss + factor * penalty`; its backward pass adds the penalty's gradients to those of the states."""
        self._factor = factor
        combined: Tensor = _Carrier.apply(loss, self.value * factor, self)
        return combined

    def arm(self, upstream: Tensor) -> None:
        """Called at the start of the backward pass with the gradient of the combined loss."""
        if torch.is_grad_enabled():
            raise FulldepthError("The displacement penalty has no second derivatives (create_graph=True).")
        if self._upstream is not None:
            raise FulldepthError(
                "The backward pass ran twice over one forward pass; the displacement penalty keeps its states for one."
            )
        self._upstream = upstream

    def add(self, layer: int, gradient: Tensor) -> Tensor | None:
        """Gradient of `h_layer` plus the penalty's; None (unchanged) outside the combined loss's backward pass."""
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
            self._states[layer + 1] = None  # its own gradient is complete: it is not needed again
        self._above = None if below is None else (layer, below)
        return weighted_sum(terms, None if self._mask is None else ~self._mask, gradient) if terms else None

    def _shares(self, layer: int) -> Shares | None:
        """Factors of the gradient of one layer's displacement; None for a layer without weight."""
        if not 1 <= layer < len(self._states) or self._weights[layer - 1] == 0:
            return None
        if self._above is not None and self._above[0] == layer:
            return self._above[1]
        assert self._upstream is not None
        parts = self._parts[layer - 1]
        scale = (self._upstream * self._factor).to(parts.cos.device) * self._weights[layer - 1]
        counted = parts.counted(self._mask)
        return gradient_shares(parts, counted * (scale / counted.sum().clamp(min=1)))

    def _state(self, index: int) -> Tensor:
        state = self._states[index]
        if state is None:
            raise FulldepthError(f"The gradients of the states arrived out of order at h_{index}.")
        if state._version != self._versions[index]:
            raise FulldepthError(f"h_{index} was overwritten in place between the forward and the backward pass.")
        return state


class _Carrier(torch.autograd.Function):
    """Adds the penalty's value to the loss; its backward pass calls `Displacements.arm`."""

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
