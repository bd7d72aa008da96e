"""Jump-suppressing regulariser: late layers shall not turn the residual stream (JREG, Eq. 5-6)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fulldepth.errors import FulldepthError

Side = Literal["previous", "current"]

CPU_BLOCK = 1 << 18
"""Numbers worked on at a time on a CPU, so that they stay in its cache."""
ACCELERATOR_BLOCK = 1 << 23
"""The same elsewhere: enough to fill an accelerator, little beside a model's activations."""


def jump_penalty(hidden_states: Sequence[Tensor], alpha: float = 1.0, mask: Tensor | None = None) -> Tensor:
    r"""Weighted mean displacement of all layers, in [0, 1].

    .. math:: L_{disp} = \sum_{l=1}^{L} w_l \, \mathrm{mean}_{tokens} \Psi_l, \quad
        \Psi_l = 1 - \frac{1 + \cos(h_{l-1}, h_l)}{2}, \quad w = \mathrm{softmax}(\alpha \cdot (1, \dots, L))

    Unweighted: the objective multiplies it by lambda (1 in the paper). For backward it keeps references to the states
    and three numbers per token; nothing of a state's size is copied.

    Args:
        hidden_states: residual stream `h_0, ..., h_L`, each `[B, T, D]`, the last one before the final norm. They may
            lie on several devices.
        alpha: how much the last layers outweigh the first, at least 0; 0 is uniform, `inf` the last layer only.
        mask: `[B, T]`, True (or 1) = counts. What stands in other positions has no effect, be it NaN.

    Returns:
        Scalar, unit 1, float32 (float64 for float64 states), on the device of the last state. A zero vector has no
        direction: its displacement is 1/2 and its gradient 0. Where no token counts, 0.

    Raises:
        FulldepthError: for fewer than two states, differing shapes, an `alpha` below 0, or an unfit mask.

    Source: "JREG: final-layer jumps", Eq. 2, 5 and 6; final layer only: Appendix D.
    """
    check_states(hidden_states, mask, least=2)
    weights = jump_weights(len(hidden_states) - 1, alpha).tolist()
    terms = [
        weight * mean_over_tokens(token_displacement(previous, current), mask).to(hidden_states[-1].device)
        for weight, previous, current in zip(weights, hidden_states[:-1], hidden_states[1:], strict=True)
        if weight
    ]
    return torch.stack(terms).sum()


def jump_weights(num_layers: int, alpha: float = 1.0) -> Tensor:
    """`[L]` float64: the share of each layer 1..L in the penalty, `softmax(alpha * (1..L))` (JREG, Eq. 5).

    Args:
        num_layers: L, at least 1.
        alpha: at least 0; `inf` gives the last layer everything.

    Raises:
        FulldepthError: for no layer, or an `alpha` that is negative or not a number.
    """
    if num_layers < 1:
        raise FulldepthError(f"the jump penalty needs at least one layer, got {num_layers}")
    if not alpha >= 0:
        raise FulldepthError(f"alpha of the jump penalty must be at least 0 (inf: last layer only), got {alpha}")
    before_last = torch.arange(1 - num_layers, 1, dtype=torch.float64)
    if math.isinf(alpha):
        return (before_last == 0).double()
    return torch.softmax(alpha * before_last, 0)


class Parts(NamedTuple):
    """What the displacement of every token and its gradient are made of, each `[B, T]` float32 or float64."""

    cos: Tensor
    norm_previous: Tensor
    norm_current: Tensor

    @property
    def displacement(self) -> Tensor:
        """`[B, T]`: Psi, in [0, 1]."""
        return (1 - self.cos) / 2


@torch.no_grad()
def displacement_parts(previous: Tensor, current: Tensor, norm_previous: Tensor | None = None) -> Parts:
    """Cosine of every token's two states and their norms, without gradient; see `displacement_gradient`.

    Args:
        previous: `[..., D]`, on any device.
        current: `[..., D]`.
        norm_previous: `[...]` norms of `previous`, where they are known already.

    Returns:
        `(cos, norm_previous, norm_current)`, each `[...]` on the device of `current`, float32 (float64 if a state is).
        The cosine lies in [-1, 1] and is 0 where a state is zero.

    Source: "JREG: final-layer jumps", Eq. 2.
    """
    x, y = previous.reshape(-1, previous.shape[-1]), current.reshape(-1, current.shape[-1])
    device, dtype = current.device, statistics_dtype(previous, current)
    cos, norm_x, norm_y = torch.empty(3, len(y), dtype=dtype, device=device)
    for rows in blocks(len(y), y.shape[-1], device):
        a, b = x[rows].to(device, dtype), y[rows].to(device, dtype)
        cos[rows], norm_y[rows] = (a * b).sum(-1), torch.linalg.vector_norm(b, dim=-1)
        if norm_previous is None:
            norm_x[rows] = torch.linalg.vector_norm(a, dim=-1)
    if norm_previous is not None:
        norm_x.copy_(norm_previous.flatten())
    cos.div_(norm_x).div_(norm_y).clamp_(-1.0, 1.0).masked_fill_((norm_x == 0) | (norm_y == 0), 0.0)
    return Parts(*(part.view(current.shape[:-1]) for part in (cos, norm_x, norm_y)))


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

    Works on some rows at a time, so that half-precision states are never copied whole to float32.

    Args:
        previous: `[..., D]`.
        current: `[..., D]`.
        parts: what `displacement_parts(previous, current)` gave.
        weight: `[...]` or a scalar. Where it is 0 the gradient is 0, whatever the states hold (NaN included).
        wrt: "previous" or "current".

    Returns:
        `[..., D]` with the dtype and device of that state; 0 where either state is zero.
    """
    if wrt not in ("previous", "current"):
        raise FulldepthError(f"wrt must be 'previous' or 'current', got {wrt!r}")
    own, other = (previous, current) if wrt == "previous" else (current, previous)
    shares = gradient_shares(Parts(*parts), weight)
    terms = [(own, shares.previous if wrt == "previous" else shares.current), (other, shares.other)]
    return weighted_sum(terms, shares.other == 0)


class Shares(NamedTuple):
    """What the states enter the gradient of `sum(weight * Psi)` with, each `[...]`; see `displacement_gradient`."""

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
    dead = (half == 0) | (norm_x == 0) | (norm_y == 0)
    other = (-half / norm_x).div_(norm_y).masked_fill_(dead, 0.0)
    half = half * cos
    previous, current = ((half / norm).div_(norm).masked_fill_(dead, 0.0) for norm in (norm_x, norm_y))
    return Shares(previous, current, other)


@torch.no_grad()
def weighted_sum(terms: Sequence[tuple[Tensor, Tensor]], dead: Tensor | None, base: Tensor | None = None) -> Tensor:
    """`base + sum(factor * state)`, a tile at a time; half precision is summed in the factors' float32.

    Args:
        terms: states `[..., D]` and factors `[...]`.
        dead: `[...]` bool: there the result is `base`, whatever the states hold (NaN included).
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
    """Psi of every token, `[..., D], [..., D] -> [...]`, that keeps the states by reference."""

    @staticmethod
    def forward(ctx: Any, previous: Tensor, current: Tensor) -> Tensor:
        parts = displacement_parts(previous, current)
        ctx.save_for_backward(previous, current, *parts)
        return parts.displacement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        previous, current, *parts = ctx.saved_tensors
        sides: tuple[Side, Side] = ("previous", "current")
        return tuple(
            displacement_gradient(previous, current, Parts(*parts), gradient, side) if needed else None
            for side, needed in zip(sides, ctx.needs_input_grad, strict=True)
        )


def token_displacement(previous: Tensor, current: Tensor) -> Tensor:
    """`[..., D], [..., D] -> [...]`: the displacement of every token, differentiable once, frugal with memory."""
    return _Displacement.apply(previous, current)


def mean_over_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of `values: [B, T]` over the tokens that count; 0 where none does. Others may hold NaN."""
    if mask is None:
        return values.mean()
    counted = mask.to(values.device, torch.bool)
    return values.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


def statistics_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where a tensor is, else float32: what sums and norms of these tensors are computed in."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def blocks(count: int, size: int, device: torch.device) -> Iterator[slice]:
    """Slices that together cover `count` items of `size` numbers each, as many at a time as suits the device."""
    room = CPU_BLOCK if device.type == "cpu" else ACCELERATOR_BLOCK
    step = max(1, room // max(1, size))
    return (slice(start, start + step) for start in range(0, count, step))


def check_states(hidden_states: Sequence[Tensor], mask: Tensor | None, least: int, dimensions: int = 0) -> None:
    """Refuse fewer than `least` states, states that are not `[..., D]` of one shape, and a mask that does not fit.

    Args:
        hidden_states: what was given.
        mask: what was given.
        least: how many states there must be.
        dimensions: how many each must have (0: any number from 2).
    """
    if len(hidden_states) < least:
        raise FulldepthError(f"expected at least {least} hidden states, one per layer, got {len(hidden_states)}")
    shape, allowed = hidden_states[-1].shape, (dimensions,) if dimensions else range(2, 1 << 6)
    for index, state in enumerate(hidden_states):
        if not state.is_floating_point() or state.ndim not in allowed or state.shape != shape:
            raise FulldepthError(
                f"hidden states must be floating-point tensors [B, T, D] of one shape: number {index} is {state.dtype} "
                f"{tuple(state.shape)}, the last one {tuple(shape)}"
            )
    if mask is not None and (mask.is_floating_point() or mask.shape != shape[:-1]):
        raise FulldepthError(
            f"mask must be boolean (or 0 and 1) of shape {tuple(shape[:-1])}, got {mask.dtype} {tuple(mask.shape)}"
        )
