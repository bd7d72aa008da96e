"""Keys and values from mixtures of earlier layers, without keeping the mixtures in memory.

The pseudocode of LIME (App. E) creates a tensor `[H_kv, B, T, D]` per layer and keeps it for backward. This module does
not. The gain of the norm is folded into the projection, so the normalised streams (`normalise`) are the same for all
layers and are kept once; tiles of tokens are mixed, projected and dropped; backward mixes them again. Outputs and
gradients are those of the pseudocode.

Few tokens without gradients, as in decoding, are mixed at once: the gain scales their mixtures, which are smaller than
the projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

SMALLEST_TILE = 128
"""Tokens: below this the projections of a tile are too small to be fast."""
CPU_TILE_ELEMENTS = 1 << 22
"""Elements of a tile, sources and mixtures together, on a CPU: they stay in its cache."""
DEVICE_TILE_ELEMENTS = 1 << 27
"""Elements of a tile on an accelerator."""


def normalise(hidden: Tensor, eps: float) -> Tensor:
    """A state over its root mean square, without gain: `x / sqrt(mean(x^2) + eps)`.

    A layer's RMSNorm is its gain times this, so all layers that read a state can share it. Backward keeps the result
    and one number per token. Under autocast the result has autocast's type.

    Args:
        hidden: `[..., D]`; float16 and bfloat16 are normalised in float32.
        eps: as in the model's norms.
    """
    if not torch.is_grad_enabled():
        return _normalised(hidden, eps, _compute_type(hidden))[0]
    return _Normalise.apply(hidden, eps, _compute_type(hidden))


def routed_key_value(
    states: Sequence[Tensor],
    weights: Tensor,
    gain: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    num_kv_heads: int,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of mixtures of states: head h projects `sum_m weights[h, m] * gain * states[m]` (LIME, Sec. 4).

    For backward only the arguments are kept, no mixture. N = B T tokens whose gradients nobody wants take `N H_kv D`
    products to scale as mixtures, and `2 H_kv d_h D` to scale the projections instead; the cheaper way is taken.

    Args:
        states: r tensors `[B, T, D]`, normalised (see `normalise`).
        weights: `[H_kv, r]`, or `[B, T, H_kv, r]` per token. Sums over r are 1, so a bias needs no weight.
        gain: `[D]` of the layer's norm of its memory.
        key_weight: `[H_kv * d_h, D]`.
        value_weight: `[H_kv * d_h, D]`.
        num_kv_heads: H_kv.
        key_bias: `[H_kv * d_h]`, added to the keys.
        value_bias: `[H_kv * d_h]`, added to the values.

    Returns:
        Keys (before rotary embedding) and values, `[B, T, H_kv * d_h]` each.
    """
    dtype, heads = _compute_type(states[0]), num_kv_heads
    if not torch.is_grad_enabled() and states[0].shape[:-1].numel() < 2 * len(key_weight) // heads:
        keys, values = _project_mixtures(states, weights.to(dtype), gain, (key_weight, value_weight), heads)
    else:
        keys, values = _RoutedProjection.apply(heads, dtype, weights, gain, key_weight, value_weight, *states)
    keys = keys if key_bias is None else keys + key_bias.to(dtype)
    values = values if value_bias is None else values + value_bias.to(dtype)
    return keys, values


def route_key_value(keys: Sequence[Tensor], values: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mix the heads of several layers: head h becomes `sum_{m,s} weights[h, m, s] * keys[m][head s]`, values likewise.

    For backward only the arguments are kept: memory grows linearly with the number of layers.

    Args:
        keys: r tensors `[B, T, H_kv * d_h]`, before rotary embedding, the layer's own last.
        values: likewise.
        weights: `[H_kv, r, H_kv]`: own head, source layer, source head.

    Returns:
        Keys (before rotary embedding) and values, `[B, T, H_kv * d_h]` each.
    """
    if not torch.is_grad_enabled() and keys[0].shape[:-1].numel() <= SMALLEST_TILE:
        return _mix_heads(keys, values, weights)
    return _RoutedHeads.apply(weights, *keys), _RoutedHeads.apply(weights, *values)


def _project_mixtures(
    states: Sequence[Tensor], weights: Tensor, gain: Tensor, projections: Sequence[Tensor], heads: int
) -> tuple[Tensor, ...]:
    """`routed_key_value` with all mixtures at once, scaled by the gain; without biases, in the type of `weights`."""
    batch, time, width = states[0].shape
    if weights.dim() == 2:
        mixed = torch.mm(weights, torch.stack(tuple(states)).view(len(states), -1)).view(heads, -1, width)  # [H, N, D]
    else:
        stacked = torch.stack(tuple(states), dim=2).view(-1, len(states), width)  # [N, r, D]
        mixed = torch.bmm(weights.view(-1, heads, len(states)), stacked).transpose(0, 1)
    mixed = (mixed * gain).to(weights.dtype)
    matrices = (weight.to(weights.dtype).view(heads, -1, width).mT for weight in projections)  # [H, D, d_h]
    return tuple(torch.bmm(mixed, matrix).transpose(0, 1).reshape(batch, time, -1) for matrix in matrices)


def _mix_heads(keys: Sequence[Tensor], values: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """`route_key_value` with the heads of all layers at once."""
    batch, time, width = keys[0].shape
    heads, sources = len(weights), len(keys)
    stacked = torch.stack([*keys, *values], dim=2).to(_compute_type(keys[0]))  # [B, T, 2 r, H d_h]
    stacked = stacked.view(batch, time, 2, sources * heads, width // heads)
    routed = (weights.flatten(1).to(stacked.dtype) @ stacked).flatten(-2)  # [B, T, 2, H d_h]
    return routed[..., 0, :], routed[..., 1, :]


def _first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse second derivatives, which this backward pass does not have, instead of leaving terms out."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("memory has no second derivatives (create_graph=True)")
        return backward(ctx, *gradients)

    return checked


def _normalised(hidden: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A state over its root mean square, and one over that, `[..., 1]`."""
    wide = hidden.to(_wide(hidden.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(dtype), scale


class _Normalise(torch.autograd.Function):
    """`normalise`, keeping its result instead of its argument."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        normalised, scale = _normalised(hidden, eps, dtype)
        ctx.save_for_backward(normalised, scale)
        ctx.dtype = hidden.dtype
        return normalised

    @staticmethod
    @_first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normalised, scale = ctx.saved_tensors
        normalised, gradient = normalised.to(scale.dtype), gradient.to(scale.dtype)
        along = (gradient * normalised).mean(-1, keepdim=True)
        return torch.addcmul(gradient, normalised, along, value=-1).mul(scale).to(ctx.dtype), None, None


class _RoutedProjection(torch.autograd.Function):
    """Mix and project, a tile of tokens at a time; mix again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: int,
        dtype: torch.dtype,
        weights: Tensor,
        gain: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        *states: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weights, gain, key_weight, value_weight, *states)
        ctx.heads, ctx.dtype = heads, dtype
        batch, time, _ = states[0].shape
        with torch.autocast(_autocast_kind(states[0]), enabled=False):
            projection = _joined(key_weight, value_weight, heads).mul(gain).to(dtype).mT.contiguous()  # [H, D, 2 d_h]
            width = projection.shape[-1] // 2
            keys, values = (states[0].new_empty(batch * time, heads, width, dtype=dtype) for _ in range(2))
            for rows, sources in _tiles(states, 1, heads, dtype):
                mixed = _mix(_of_rows(weights, rows).to(dtype), sources)
                tile = torch.bmm(mixed, projection).transpose(0, 1)  # [t, H, 2 d_h]
                keys[rows], values[rows] = tile[..., :width], tile[..., width:]
        return keys.view(batch, time, -1), values.view(batch, time, -1)

    @staticmethod
    @_first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weights, gain, key_weight, value_weight, *states = ctx.saved_tensors
        heads, dtype = ctx.heads, ctx.dtype
        with torch.autocast(_autocast_kind(states[0]), enabled=False):
            joined = _joined(key_weight, value_weight, heads)
            projection = joined.mul(gain).to(dtype)  # [H, 2 d_h, D]
            outer = [g.reshape(-1, heads, g.shape[-1] // heads).transpose(0, 1) for g in gradients]  # [H, N, d_h]
            d_weights = weights.new_zeros(weights.shape, dtype=_wide(weights.dtype))
            d_projection = torch.zeros_like(projection, dtype=_wide(dtype))
            d_states = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in states]
            for rows, sources in _tiles(states, 1, heads, dtype):
                mixing = _of_rows(weights, rows).to(dtype)
                top = torch.cat([g[:, rows] for g in outer], dim=-1)  # [H, t, 2 d_h]
                mixed = _mix(mixing, sources)
                if d_projection.dtype == dtype:
                    d_projection.baddbmm_(top.mT, mixed)
                else:
                    d_projection += torch.bmm(top.mT, mixed)
                d_mixed = torch.bmm(top, projection)  # [H, t, D]
                # One product per token is far faster than one long one, also for the sum.
                d_mixing = torch.bmm(d_mixed.transpose(0, 1), sources.permute(1, 2, 0))  # [t, H, r]
                if weights.dim() == 2:
                    d_mixing = d_mixing.sum(0, dtype=_wide(dtype))
                _of_rows(d_weights, rows).add_(d_mixing)
                _scatter(d_states, rows, _mix(mixing.mT, d_mixed))
            d_gain = (d_projection * joined).sum((0, 1)).to(gain.dtype)
            d_key, d_value = (
                d.reshape(w.shape).to(w.dtype)
                for d, w in zip(d_projection.mul_(gain).chunk(2, dim=1), (key_weight, value_weight), strict=True)
            )
        return None, None, d_weights.to(weights.dtype), d_gain, d_key, d_value, *d_states


class _RoutedHeads(torch.autograd.Function):
    """Mix the heads of several layers, a tile of tokens at a time."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *layers: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *layers)
        ctx.dtype = dtype = _compute_type(layers[0])
        routed = layers[0].new_empty(layers[0].shape, dtype=dtype)
        with torch.autocast(_autocast_kind(routed), enabled=False):
            mixing = weights.flatten(1).to(dtype)  # [H, r H]
            for rows, sources in _tiles(layers, len(weights), len(weights), dtype):
                _scatter([routed], rows, _mix(mixing, sources))
        return routed

    @staticmethod
    @_first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        weights, *layers = ctx.saved_tensors
        heads, dtype = len(weights), ctx.dtype
        flat = gradient.flatten(0, 1).unflatten(-1, (heads, -1)).transpose(0, 1)  # [H, N, d_h]
        d_layers = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in layers]
        with torch.autocast(_autocast_kind(gradient), enabled=False):
            mixing = weights.flatten(1).to(dtype)
            d_mixing = torch.zeros_like(mixing, dtype=_wide(dtype))
            for rows, sources in _tiles(layers, heads, heads, dtype):
                top = flat[:, rows].to(dtype)  # [H, t, d_h]
                d_mixing += top.flatten(1) @ sources.flatten(1).mT
                _scatter(d_layers, rows, _mix(mixing.mT, top))
        return d_mixing.view_as(weights).to(weights.dtype), *d_layers


def _mix(weights: Tensor, sources: Tensor) -> Tensor:
    """`[c, t, D]` mixtures of `sources [r, t, D]`, by `weights [c, r]`, or `[t, c, r]` per token."""
    if weights.dim() > 2:
        return torch.bmm(weights, sources.transpose(0, 1)).transpose(0, 1)
    return torch.mm(weights, sources.flatten(1)).unflatten(1, sources.shape[1:])


def _tiles(states: Sequence[Tensor], heads: int, mixtures: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Tokens by tokens, the heads of the states `[B, T, heads * d]` above each other: `[r * heads, t, d]`.

    As many tokens as fit with as many `mixtures` of the states' heads into the tile's size; all tiles nearly equal, in
    the same memory, because allocating it anew takes longer than the arithmetic.
    """
    flat = [x.flatten(0, 1).unflatten(-1, (heads, -1)).transpose(0, 1) for x in states]  # [heads, N, d]
    _, tokens, width = flat[0].shape
    cached = flat[0].device.type == "cpu" and not torch.compiler.is_compiling()  # a compiler unrolls the tiles
    elements = CPU_TILE_ELEMENTS if cached else DEVICE_TILE_ELEMENTS
    size = max(SMALLEST_TILE, elements // ((len(flat) * heads + mixtures) * width))
    size = max(1, -(-tokens // max(1, -(-tokens // size))))
    above = flat[0].new_empty(len(flat) * heads * size * width, dtype=dtype)
    for start in range(0, tokens, size):
        parts = [x[:, start : start + size] for x in flat]
        room = above[: len(flat) * parts[0].numel()].view(-1, *parts[0].shape[1:])
        yield slice(start, start + size), torch.cat(parts, out=room)


def _scatter(states: Sequence[Tensor], rows: slice, sources: Tensor) -> None:
    """Write `sources [r * heads, t, d]` to the tile's tokens of `states`, r times `[B, T, heads * d]`."""
    for state, source in zip(states, sources.unflatten(0, (len(states), -1)), strict=True):
        place = state.flatten(0, 1)[rows]
        place.unflatten(-1, (source.shape[0], -1)).copy_(source.transpose(0, 1))


def _of_rows(weights: Tensor, rows: slice) -> Tensor:
    """Of weights `[B, T, H, r]` those of a tile's tokens; weights `[H, r]` are those of every token."""
    return weights if weights.dim() == 2 else weights.flatten(0, 1)[rows]


def _joined(key_weight: Tensor, value_weight: Tensor, heads: int) -> Tensor:
    """The key and value projections of each head, `[H, 2 d_h, D]`."""
    return torch.cat([weight.unflatten(0, (heads, -1)) for weight in (key_weight, value_weight)], dim=1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)


def _autocast_kind(x: Tensor) -> str:
    """The device type whose autocast applies to `x`; the meta device, which has none, goes as a CPU."""
    return "cpu" if x.is_meta else x.device.type


def _compute_type(x: Tensor) -> torch.dtype:
    """The type that a matrix product with `x` has here: autocast's, if it is on and applies to `x`."""
    kind = _autocast_kind(x)
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


__all__ = ["normalise", "route_key_value", "routed_key_value"]
