"""LIME's pseudocode taken literally, to compare with: every layer keeps mixtures `[H_kv, B, T, D]` for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fulldepth.architectures import DepthLlamaForCausalLM


class Memory:
    """What the layers of one forward pass have read so far, and the mixtures of the layer that runs."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing has been read."""
        self.past: list[Tensor] = []
        self.mixtures: Tensor | None = None


class Projection(nn.Module):
    """A key or value projection that reads its head's mixture instead of what it is called with."""

    def __init__(self, memory: Memory, projection: nn.Linear, heads: int) -> None:
        super().__init__()
        self.memory, self.heads, self.weight = memory, heads, projection.weight

    def forward(self, _: Tensor) -> Tensor:
        """`[B, T, H_kv * d_h]`."""
        assert self.memory.mixtures is not None
        per_head = self.weight.unflatten(0, (self.heads, -1)).mT  # [H, D, d_h]
        return (self.memory.mixtures @ per_head[:, None]).permute(1, 2, 0, 3).flatten(2)


def naive_lime(model: DepthLlamaForCausalLM) -> LlamaForCausalLM:
    """A Llama of transformers with static memory as in the pseudocode, and the parameters of `model`.

    Source: "LIME", App. E.
    """
    plain = LlamaForCausalLM(model.config).train()
    plain.load_state_dict(model.state_dict(), strict=False)
    memory = Memory()
    for index, (layer, origin) in enumerate(zip(plain.model.layers, model.model.layers, strict=True)):
        router, norm = None, None
        if index:
            attention, heads = layer.self_attn, model.config.num_key_value_heads
            router = nn.Parameter(origin.self_attn.router.logits.detach().clone())
            norm = LlamaRMSNorm(model.config.hidden_size, eps=model.config.rms_norm_eps)
            norm.load_state_dict(origin.self_attn.memory_norm.state_dict())
            layer.register_parameter("router", router)
            layer.memory_norm = norm
            attention.k_proj = Projection(memory, attention.k_proj, heads)
            attention.v_proj = Projection(memory, attention.v_proj, heads)
        layer.register_forward_pre_hook(_mixer(memory, router, norm))
    plain.register_forward_hook(lambda *_: memory.forget())
    return plain.to(model.device)


def _mixer(memory: Memory, router: nn.Parameter | None, norm: nn.Module | None) -> Any:
    """A hook before a layer, which reads `X_{r-1}` and mixes `X_0..X_{r-1}`; the first layer has no router."""

    def mix(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        memory.past = [*memory.past, inputs[0]]
        memory.mixtures = None
        if router is not None and norm is not None:
            stacked = norm(torch.stack(memory.past))
            memory.mixtures = torch.einsum("hr,rbtd->hbtd", router.softmax(-1), stacked)

    return mix
