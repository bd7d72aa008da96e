"""Plans for tiny models, and the scaled model by its definition: plain blocks in float64, nothing of ours."""

from __future__ import annotations

import copy
import random
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fulldepth.execution import find_anatomy
from fulldepth.hf.model_hash import model_hash
from fulldepth.skip.exports import fold
from fulldepth.skip.plan import Plan

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_neox-serial"]
"""Tiny models of every family that has folding and the fast format."""
NAMES = ("b_att", "s_att", "b_mlp", "s_mlp")


def scalars(blocks, num_layers=3, granularity="attention", seed=0, low=0.7, high=1.4) -> dict[str, dict[str, float]]:
    """Scalars as a fit could leave them."""
    generator = random.Random(seed)
    left = {"attention": NAMES[2:], "mlp": NAMES[:2], "layer": ()}[granularity]
    found = {}
    for layer in range(1, num_layers + 1):
        names = left if layer in blocks else NAMES
        if names:
            # A fit leaves float32.
            found[str(layer)] = {name: torch.tensor(generator.uniform(low, high)).item() for name in names}
    return found


def plan(model, blocks, granularity="attention", values="fitted", **entries: Any) -> Plan:
    """A plan for a model; `values`: scalars, "fitted" for made-up ones, None for a plan that was not healed."""
    if values == "fitted":
        values = scalars(blocks, len(layers(model)), granularity)
    healed = None if values is None else 1.0
    document = {
        "schema_version": 1,
        "model": {"name": "tiny", "class": type(model).__name__, "hash": model_hash(model)},
        "granularity": granularity,
        "criterion": "loss",
        "search": "given",
        "blocks": list(blocks),
        "losses": [1.0] * (len(blocks) + 1),
        "healed_loss": healed,
        "control_loss": None if values is None else {"scalars_only": 1.0},
        "scalars": values or {},
        "data": {"hash": "sha256:" + "0" * 64},
        "seed": 0,
        "versions": {},
        "cost": {"forwards": 0, "flops": 0, "seconds": 0.0},
    }
    return Plan.of(document | entries)


def layers(model) -> Any:
    """The blocks of a decoder."""
    body = getattr(model.base_model, "decoder", model.base_model)
    return body.h if hasattr(body, "h") else body.layers


def scaled(model, plan: Plan, dtype=torch.float64) -> Any:
    """A copy of a model whose blocks compute the definition of a plan, in float64.

    x' = b_att A(Norm(x)) + s_att x; y = b_mlp M(Norm(x')) + s_mlp x'; parallel: y = s_mlp x' + b_mlp M(Norm(x)).
    """
    model = copy.deepcopy(model).to(dtype)
    kind = model.config.model_type
    for layer, block in enumerate(layers(model), start=1):
        own = dict.fromkeys(NAMES, 1.0) | plan.scalars.get(str(layer), {})
        removed = plan.granularity if layer in plan.blocks else ""
        block.forward = Definition(kind, block, own, removed)
    return model


class Definition:
    """The forward pass of one block."""

    def __init__(self, kind: str, block: Any, own: dict[str, float], removed: str) -> None:
        self.kind, self.block, self.own, self.removed = kind, block, own, removed

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        block, own = self.block, self.own
        if self.kind == "gpt2":  # cache, mask and encoder states come by position
            kwargs |= {"past_key_values": args[0], "attention_mask": args[1]}
        x1 = x
        if self.removed not in ("attention", "layer"):
            x1 = own["b_att"] * self.attention(x, kwargs) + own["s_att"] * x
        if self.removed in ("mlp", "layer"):
            return x1
        reads = x if getattr(block, "use_parallel_residual", False) else x1
        return own["b_mlp"] * self.mlp(reads) + own["s_mlp"] * x1

    def attention(self, x: Tensor, kwargs: Any) -> Tensor:
        """A, with every norm that belongs to it."""
        block = self.block
        if self.kind == "gpt2":
            return block.attn(block.ln_1(x), **kwargs)[0]
        if self.kind == "gpt_neox":
            return block.attention(block.input_layernorm(x), **kwargs)[0]
        out = block.self_attn(hidden_states=block.input_layernorm(x), **kwargs)[0]
        return block.post_attention_layernorm(out) if self.kind.startswith("gemma") else out

    def mlp(self, x: Tensor) -> Tensor:
        """M, with every norm that belongs to it."""
        block = self.block
        if self.kind == "gpt2":
            return block.mlp(block.ln_2(x))
        if self.kind.startswith("gemma"):
            return block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x)))
        return block.mlp(block.post_attention_layernorm(x))


@contextmanager
def folded(model, plan, most=None):
    """A model with the folded weights of a plan inside `with`."""
    folding = fold.prepare(find_anatomy(model), plan, most=most)
    with fold.in_use(folding.changes.values()):
        yield folding
