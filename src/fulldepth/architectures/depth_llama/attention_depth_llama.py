"""Attention of `depth_llama`: Llama's, with keys and values that may come from a memory of earlier layers.

Norms, rotary embeddings and softmax are Llama's, except that float64 stays float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)

from .arguments_depth_llama import single_cache
from .configuration_depth_llama import DepthLlamaConfig
from .memory_depth_llama import DynamicRouter, KeyValueRouter, StaticRouter, route_key_value, routed_key_value


class DepthLlamaRMSNorm(LlamaRMSNorm):
    """`gain * x / rms(x)`; statistics in float32, or in float64 for float64 input.

    A fixed `scale` multiplies the gain (LayerNorm scaling). A plain norm with the gain `folded_gain()` is equivalent.
    """

    def __init__(self, hidden_size: int, eps: float, scale: float = 1.0) -> None:
        super().__init__(hidden_size, eps=eps)
        self.scale = scale

    def folded_gain(self) -> Tensor:
        """Return the gain times the scale, `[D]`."""
        return self.weight if self.scale == 1 else self.weight * self.scale

    def forward(self, hidden_states: Tensor, normalised: Tensor | None = None) -> Tensor:
        """Normalise `[..., D]`, or only apply the gain to `normalised = x / rms(x)`, if it has the type of `x`."""
        if normalised is None or normalised.dtype != hidden_states.dtype:
            wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
            variance = wide.square().mean(-1, keepdim=True)
            normalised = (wide * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)
        return self.folded_gain() * normalised


class DepthLlamaRotaryEmbedding(LlamaRotaryEmbedding):
    """Rotary position embedding that stays in float64 for float64 states."""

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles at positions `[B, T]`, each `[B, T, d_h]` in the dtype of `x`."""
        precision = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[..., None].to(precision) * self.inv_freq.to(x.device, precision)
        angles = torch.cat((angles, angles), dim=-1)
        cosines = angles.cos() * self.attention_scaling
        sines = angles.sin() * self.attention_scaling
        return cosines.to(x.dtype), sines.to(x.dtype)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Llama's eager attention over `[B, H, T, d_h]`, whose softmax stays in float64 for float64 queries."""
    if query.dtype != torch.float64:
        return eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    groups = query.shape[1] // key.shape[1]
    logits = query @ repeat_kv(key, groups).transpose(2, 3) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = nn.functional.dropout(logits.softmax(-1), p=dropout, training=module.training)
    return (weights @ repeat_kv(value, groups)).transpose(1, 2).contiguous(), weights


class DepthLlamaAttention(LlamaAttention):
    """Grouped-query attention whose keys and values may be routed from earlier layers.

    From the second layer on, a model with memory has `router`, and for memory `static` and `dynamic` also `memory_norm`
    (the gain of LN_r). In every mode the output of `value_states` is the values `[B, T, H_kv * d_h]` that attention and
    the cache receive.

    Source: "LIME", Sec. 4 and App. E; memory `kv`: its public code.
    """

    def __init__(self, config: DepthLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.value_states = nn.Identity()
        self.router: Any = None
        self.memory_norm: DepthLlamaRMSNorm | None = None
        if config.memory == "none" or layer_idx == 0:
            return
        heads = self.k_proj.out_features // self.head_dim
        sources = layer_idx + 1
        if config.memory == "kv":
            self.router = KeyValueRouter(heads, sources, init=config.kv_init)
            return
        self.memory_norm = DepthLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.memory == "static":
            self.router = StaticRouter(heads, sources, top_p=config.router_top_p)
        else:
            self.router = DynamicRouter(config.hidden_size, heads, sources, top_p=config.router_top_p)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        stream: Tensor | None = None,
        memory: Sequence[Tensor] = (),
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Compute the attention.

        Args:
            hidden_states: the layer's normalised input `[B, T, D]`.
            position_embeddings: cosines and sines of the rotary embedding.
            attention_mask: mask in the form that the attention implementation reads.
            cache: receives the routed keys and values.
            past_key_values: the cache's name before transformers 5.24.
            stream: the layer's input before its norm, for a dynamic router that reads it.
            memory: for `static` and `dynamic` the normalised states (without gain) of all sources, the layer's own
                input last; for `kv` keys and values of the earlier layers in turn, before routing.
            **kwargs: arguments of the attention implementation.

        Returns:
            Output `[B, T, D]`, attention weights or None, and for memory `kv` this layer's own keys and values
            `[B, T, H_kv * d_h]`.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        keys, values, *unrouted = self._keys_and_values(hidden_states, stream, memory)
        values = self.value_states(values)
        query_states = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key_states = keys.view(shape).transpose(1, 2)
        value_states = values.view(shape).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, *position_embeddings)
        cache = single_cache(cache, past_key_values)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        attended, weights = attend(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights, *unrouted

    def _keys_and_values(
        self, hidden_states: Tensor, stream: Tensor | None, memory: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return keys and values before rotary embedding, `[B, T, H_kv * d_h]`; for memory `kv` also unrouted ones."""
        if self.memory_norm is not None:
            return self._mixed_states(stream, memory, self.memory_norm)
        keys = self.k_proj(hidden_states)
        values = self.v_proj(hidden_states)
        if self.config.memory != "kv":
            return keys, values
        if self.router is None:
            return keys, values, keys, values
        routed = route_key_value([*memory[0::2], keys], [*memory[1::2], values], self.router())
        return *routed, keys, values

    def _mixed_states(
        self, stream: Tensor | None, memory: Sequence[Tensor], norm: DepthLlamaRMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the mixtures of normalised states, per head."""
        modules = (self.k_proj, self.v_proj, norm)
        plain = all(type(m) in (nn.Linear, DepthLlamaRMSNorm) and "_hf_hook" not in vars(m) for m in modules)
        states = memory if plain else [norm(state, state) for state in memory]
        if self.config.memory == "static":
            weights = self.router()  # [H_kv, r]
        elif self.config.router_input == "raw":
            weights = self.router(stream)  # [B, T, H_kv, r]
        else:
            weights = self.router(states[-1], gain=norm.weight if plain else None)
        if plain:
            heads = self.k_proj.out_features // self.head_dim
            biases = (self.k_proj.bias, self.v_proj.bias)
            return routed_key_value(
                states, weights, norm.weight, self.k_proj.weight, self.v_proj.weight, heads, *biases
            )

        # With adapters or offloaded weights every state goes through the modules, r times the arithmetic.
        def mixed(projection: nn.Module) -> Tensor:
            heads = [projection(state).unflatten(-1, (-1, self.head_dim)) for state in states]
            projected = torch.stack(heads, dim=-2)  # [B, T, H_kv, r, d_h]
            return (weights.unsqueeze(-2).to(projected.dtype) @ projected).flatten(-3)  # [B, T, H_kv * d_h]

        return mixed(self.k_proj), mixed(self.v_proj)


__all__ = ["DepthLlamaAttention", "DepthLlamaRMSNorm", "DepthLlamaRotaryEmbedding"]
