"""Layer-integrated memory (LIME): routers, and keys and values from mixtures of earlier states with their weights.

- `StaticRouter`, `DynamicRouter` with `routed_key_value`: layer r projects mixtures of the normalised residual
  streams X_0..X_{r-1}, one mixture per key/value head (LIME, Sec. 4 and App. E).
- `KeyValueRouter` with `route_key_value`: layer r mixes the key and value heads of layers 1..r, linearly and across
  heads (the later public version of the method).

The pseudocode of LIME (App. E) creates a tensor `[H_kv, B, T, D]` per layer and stores it for backward. This module
does not. The gain of the norm is folded into the projection, so the normalised streams (`normalise`) are the same for
all layers and are stored once. Tiles of tokens are mixed, projected and freed, and mixed again in backward. Outputs and
gradients are those of the pseudocode.

Few tokens without gradients, as in decoding, are mixed at once: the gain scales their mixtures, which are smaller than
the projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

STATIC_STD = 0.1
"""Initial standard deviation of a static router's logits, which gives nearly uniform mixtures (LIME, App. A)."""
SMALLEST_TILE = 128
"""Fewest tokens of a tile; with fewer, its projections are too small to be fast."""
CPU_TILE_ELEMENTS = 1 << 22
"""Elements of a tile, sources and mixtures together, on a CPU, so that they stay in its cache."""
DEVICE_TILE_ELEMENTS = 1 << 27
"""Elements of a tile on an accelerator."""


class StaticRouter(nn.Module):
    """One learned mixture of the sources per key/value head: `softmax(R)`, the same for every token (LIME, Sec. 4.1).

    Args:
        num_kv_heads: H_kv.
        num_sources: r, the states that layer r (1-based) reads: X_0..X_{r-1}.
        top_p: use, per head, only the smallest set of weights whose sum exceeds it, renormalised; a weight that is left
            out has no gradient.

    Raises:
        ValueError: `top_p` outside (0, 1].
    """

    minus_infinity_prunes = ("logits",)
    """Parameters in which -inf marks a pruned weight (read by checks for broken weights)."""

    def __init__(self, num_kv_heads: int, num_sources: int, top_p: float | None = None) -> None:
        super().__init__()
        self.top_p = top_p if top_p is None else _checked(top_p)
        self.logits = nn.Parameter(torch.empty(num_kv_heads, num_sources))
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw the logits from 0.1 N(0, 1), whatever `std` other weights of the model have."""
        initialization.normal_(self.logits, std=STATIC_STD)

    def forward(self) -> Tensor:
        """Return the weights `[H_kv, r]`, whose rows sum to 1."""
        return _softmax(_top(self.logits, self.top_p))

    @torch.no_grad()
    def prune(self, p: float) -> float:
        """Keep the smallest set of weights whose sum exceeds `p`, per head, in place (LIME, App. B).

        All other weights get logits of -inf: they are exactly zero, also after training and in a saved model. The
        remaining weights sum to 1 again.

        Returns:
            Share of this router's weights that are zero now.

        Raises:
            ValueError: `p` outside (0, 1].
        """
        keep = top_p_mask(self.logits.double().softmax(-1), p)
        self.logits.masked_fill_(~keep, -torch.inf)
        return float((self.logits == -torch.inf).float().mean())


class DynamicRouter(nn.Module):
    """A mixture of the sources per token and key/value head: `softmax(x P)`, P without bias (LIME, Sec. 4.2, App. E).

    Args:
        hidden_size: D.
        num_kv_heads: H_kv.
        num_sources: r, the states that layer r (1-based) reads: X_0..X_{r-1}.
        top_p: use, per token and head, only the smallest set of weights whose sum exceeds it, renormalised.

    Raises:
        ValueError: `top_p` outside (0, 1].
    """

    def __init__(self, hidden_size: int, num_kv_heads: int, num_sources: int, top_p: float | None = None) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.top_p = top_p if top_p is None else _checked(top_p)
        self.weight = nn.Parameter(torch.empty(num_kv_heads * num_sources, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw P from std N(0, 1), as for the model's other linear layers."""
        initialization.normal_(self.weight, std=std)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """Return the weights `[B, T, H_kv, r]`, whose sums over r are 1.

        Args:
            x: the router's input `[B, T, D]`.
            gain: `[D]` factor of `x`, folded into P, so that the product of both is not stored for backward.
        """
        logits = F.linear(x, self.weight if gain is None else self.weight * gain)
        logits = logits.unflatten(-1, (self.num_kv_heads, -1))
        return _softmax(_top(logits, self.top_p))

    def prune(self, p: float) -> None:
        """Use only the top-`p` weights of each token from now on (LIME, App. B).

        P does not change. The zero weights depend on the input, so there is no share to return.

        Raises:
            ValueError: `p` outside (0, 1].
        """
        self.top_p = _checked(p)


class KeyValueRouter(nn.Module):
    """A linear map from the key/value heads of layers 1..r to those of layer r (the public version of LIME).

    There is no softmax: weights may be negative and need not sum to 1.

    Args:
        num_kv_heads: H_kv.
        num_sources: r, the layer's own number (1-based).
        init: initial weights. In both cases a head reads itself with weight 1 and its layer's other heads with 0.
            `"identity"`: earlier layers have weight 0, which is plain attention; `"public"`: U(-b, b) with
            b = sqrt(3 / (r H_kv)).

    Raises:
        ValueError: unknown `init`.
    """

    def __init__(self, num_kv_heads: int, num_sources: int, init: Literal["identity", "public"] = "identity") -> None:
        super().__init__()
        if init not in ("identity", "public"):
            raise ValueError(f"kv_init must be 'identity' or 'public', got {init!r}")
        self.init = init
        self.weight = nn.Parameter(torch.empty(num_kv_heads, num_sources, num_kv_heads))
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Set the initial weights, whatever `std` other weights of the model have."""
        initial = torch.zeros_like(self.weight, requires_grad=False)
        heads, sources, _ = initial.shape
        if self.init == "public":
            bound = (3 / (sources * heads)) ** 0.5
            initial.uniform_(-bound, bound)
        initial[:, -1] = torch.eye(heads, dtype=initial.dtype, device=initial.device)
        initialization.copy_(self.weight, initial)

    def forward(self) -> Tensor:
        """Return the weights `[H_kv, r, H_kv]`: own head, source layer, source head."""
        return self.weight

    def prune(self, p: float) -> None:
        """Raise an error: the weights are not shares.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "top-p pruning needs weights that are shares (memory='static' or 'dynamic'); "
            "those of memory='kv' are a linear map: they may be negative and do not sum to 1"
        )


def top_p_mask(weights: Tensor, p: float) -> Tensor:
    """Return the smallest set of `weights [..., r]` whose sum exceeds `p`, as a mask of that shape (LIME, App. B).

    Among equal weights the earlier source is kept. If all of them together do not exceed `p`, all are kept.

    Raises:
        ValueError: `p` outside (0, 1].
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.cumsum(-1)[..., :-1], (1, 0))
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, before <= _checked(p))


def _softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension, in float32 at least."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _top(logits: Tensor, top_p: float | None) -> Tensor:
    """Logits `[..., r]` with -inf for the weights outside the top-p set; unchanged without `top_p`."""
    if top_p is None:
        return logits
    return logits.masked_fill(~top_p_mask(_softmax(logits.detach()), top_p), -torch.inf)


def _checked(p: float) -> float:
    """Return `p`, or raise an error if it is outside (0, 1]."""
    if not 0 < p <= 1:
        raise ValueError(f"top-p must be a share of the weight in (0, 1], got {p}")
    return p


def normalise(hidden: Tensor, eps: float) -> Tensor:
    """Divide a state by its root mean square, without gain: `x / sqrt(mean(x^2) + eps)`.

    A layer's RMSNorm is its gain times this, so all layers that read a state can share it. The result and one number
    per token are stored for backward. Under autocast the result has autocast's type.

    Args:
        hidden: state `[..., D]`; float16 and bfloat16 are normalised in float32.
        eps: eps of the model's norms.
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
    """Project mixtures of states to keys and values: head h reads `sum_m weights[h, m] * gain * states[m]`.

    For backward only the arguments are stored, no mixture. Without gradients, scaling the mixtures of N = B T tokens
    takes `N H_kv D` products, and scaling the projections `2 H_kv d_h D`; the cheaper way is used.

    Args:
        states: r tensors `[B, T, D]`, normalised (see `normalise`).
        weights: `[H_kv, r]`, or `[B, T, H_kv, r]` per token. Sums over r are 1, so a bias needs no weight.
        gain: gain `[D]` of the layer's norm of its memory.
        key_weight: `[H_kv * d_h, D]`.
        value_weight: `[H_kv * d_h, D]`.
        num_kv_heads: H_kv.
        key_bias: `[H_kv * d_h]`, added to the keys.
        value_bias: `[H_kv * d_h]`, added to the values.

    Returns:
        Keys (before rotary embedding) and values, `[B, T, H_kv * d_h]` each.

    Source: "LIME", Sec. 4.
    """
    dtype = _compute_type(states[0])
    heads = num_kv_heads
    if not torch.is_grad_enabled() and states[0].shape[:-1].numel() < 2 * len(key_weight) // heads:
        keys, values = _project_mixtures(states, weights.to(dtype), gain, (key_weight, value_weight), heads)
    else:
        keys, values = _RoutedProjection.apply(heads, dtype, weights, gain, key_weight, value_weight, *states)
    keys = keys if key_bias is None else keys + key_bias.to(dtype)
    values = values if value_bias is None else values + value_bias.to(dtype)
    return keys, values


def route_key_value(keys: Sequence[Tensor], values: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mix the heads of several layers: head h becomes `sum_{m,s} weights[h, m, s] * keys[m][head s]`, values likewise.

    For backward only the arguments are stored, so memory grows linearly with the number of layers.

    Args:
        keys: r tensors `[B, T, H_kv * d_h]`, before rotary embedding, the layer's own last.
        values: r tensors of the same shapes.
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
    """Compute `routed_key_value` with all mixtures at once, scaled by the gain; no biases, in the type of `weights`."""
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
    """Compute `route_key_value` with the heads of all layers at once."""
    batch, time, width = keys[0].shape
    heads = len(weights)
    sources = len(keys)
    stacked = torch.stack([*keys, *values], dim=2).to(_compute_type(keys[0]))  # [B, T, 2 r, H d_h]
    stacked = stacked.view(batch, time, 2, sources * heads, width // heads)
    routed = (weights.flatten(1).to(stacked.dtype) @ stacked).flatten(-2)  # [B, T, 2, H d_h]
    return routed[..., 0, :], routed[..., 1, :]


def _first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass that has no second derivatives, so that it refuses them instead of omitting terms."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("memory has no second derivatives (create_graph=True)")
        return backward(ctx, *gradients)

    return checked


def _normalised(hidden: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a state divided by its root mean square, and the reciprocal of the latter, `[..., 1]`."""
    wide = hidden.to(_wide(hidden.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(dtype), scale


class _Normalise(torch.autograd.Function):
    """Computation of `normalise` that stores its result for backward instead of its argument."""

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
        normalised = normalised.to(scale.dtype)
        gradient = gradient.to(scale.dtype)
        along = (gradient * normalised).mean(-1, keepdim=True)
        return torch.addcmul(gradient, normalised, along, value=-1).mul(scale).to(ctx.dtype), None, None


class _RoutedProjection(torch.autograd.Function):
    """Computation of `routed_key_value`, a tile of tokens at a time; states are mixed again in backward."""

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
        ctx.heads = heads
        ctx.dtype = dtype
        batch, time, _ = states[0].shape
        with torch.autocast(_autocast_kind(states[0]), enabled=False):
            projection = _joined(key_weight, value_weight, heads).mul(gain).to(dtype).mT.contiguous()  # [H, D, 2 d_h]
            width = projection.shape[-1] // 2
            keys, values = (states[0].new_empty(batch * time, heads, width, dtype=dtype) for _ in range(2))
            for rows, sources in _tiles(states, 1, heads, dtype):
                mixed = _mix(_of_rows(weights, rows).to(dtype), sources)
                tile = torch.bmm(mixed, projection).transpose(0, 1)  # [t, H, 2 d_h]
                keys[rows] = tile[..., :width]
                values[rows] = tile[..., width:]
        return keys.view(batch, time, -1), values.view(batch, time, -1)

    @staticmethod
    @_first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weights, gain, key_weight, value_weight, *states = ctx.saved_tensors
        heads = ctx.heads
        dtype = ctx.dtype
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
    """Computation of `route_key_value` for keys or values, a tile of tokens at a time."""

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
        heads = len(weights)
        dtype = ctx.dtype
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
    """Return mixtures `[c, t, D]` of `sources [r, t, D]` by `weights [c, r]`, or `[t, c, r]` per token."""
    if weights.dim() > 2:
        return torch.bmm(weights, sources.transpose(0, 1)).transpose(0, 1)
    return torch.mm(weights, sources.flatten(1)).unflatten(1, sources.shape[1:])


def _tiles(states: Sequence[Tensor], heads: int, mixtures: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield tiles of tokens: a slice, and the heads of all states `[B, T, heads * d]` as `[r * heads, t, d]`.

    A tile has as many tokens as fit into its size together with this number of `mixtures` of the states' heads. All
    tiles are of nearly equal size, and use the same memory, because allocating takes longer than the arithmetic.
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
    """Return the weights of a tile's tokens from `[B, T, H, r]`; weights `[H, r]` are the same for every token."""
    return weights if weights.dim() == 2 else weights.flatten(0, 1)[rows]


def _joined(key_weight: Tensor, value_weight: Tensor, heads: int) -> Tensor:
    """Return the key and value projections of each head, `[H, 2 d_h, D]`."""
    return torch.cat([weight.unflatten(0, (heads, -1)) for weight in (key_weight, value_weight)], dim=1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type, or float32 if it is narrower."""
    return torch.promote_types(dtype, torch.float32)


def _autocast_kind(x: Tensor) -> str:
    """Return the device type whose autocast applies to `x`; that of the CPU for the meta device, which has none."""
    return "cpu" if x.is_meta else x.device.type


def _compute_type(x: Tensor) -> torch.dtype:
    """Return the type of a matrix product with `x`: autocast's if it is on and applies to `x`, else that of `x`."""
    kind = _autocast_kind(x)
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


__all__ = [
    "DynamicRouter",
    "KeyValueRouter",
    "StaticRouter",
    "normalise",
    "route_key_value",
    "routed_key_value",
    "top_p_mask",
]
