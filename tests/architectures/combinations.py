"""Every combination of switches that has a meaning, as tiny models with random parameters."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn

from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from tiny_models import seeded, token_ids

SIZE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TREE = {"residual": "tree", "tree": {1: (-1, 0), 2: (0, 1), 4: (1, 3)}}

SWITCHES = {
    "serial": {},
    "serial-odd": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 10},
    "scaled": {"norm_scaling": True},
    "tree": TREE,
    "tree-scaled": {**TREE, "norm_scaling": True},
    "hyper": {"residual": "hyper", "num_streams": 4},
    "hyper-static": {"residual": "hyper", "num_streams": 3, "hyper_dynamic": False},
    "static": {"memory": "static"},
    "static-mha": {"memory": "static", "num_key_value_heads": 4},
    "static-bias": {"memory": "static", "num_key_value_heads": 1, "attention_bias": True},
    "static-pruned": {"memory": "static", "router_top_p": 0.8},
    "dynamic": {"memory": "dynamic"},
    "dynamic-raw": {"memory": "dynamic", "router_input": "raw", "num_key_value_heads": 4},
    "dynamic-pruned": {"memory": "dynamic", "router_top_p": 0.7},
    "kv": {"memory": "kv"},
    "kv-public": {"memory": "kv", "kv_init": "public", "num_key_value_heads": 4},
    "kv-bias": {"memory": "kv", "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    "tree-static": {**TREE, "memory": "static"},
    "tree-dynamic": {**TREE, "memory": "dynamic", "num_key_value_heads": 4},
    "tree-dynamic-raw": {**TREE, "memory": "dynamic", "router_input": "raw"},
    "tree-kv": {**TREE, "memory": "kv"},
    "tree-skipping": {"residual": "tree", "tree": {2: (-1, 0), 3: (1, 0)}, "memory": "dynamic"},
}

PUSHED = (
    "serial-odd",
    "scaled",
    "tree",
    "hyper",
    "static",
    "static-pruned",
    "dynamic",
    "dynamic-raw",
    "dynamic-pruned",
    "kv-public",
)
PUSHED += ("tree-static", "tree-dynamic")
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PUSHED else pytest.mark.thorough) for name in SWITCHES]
)
"""Of every combination; on a push those of the papers."""
KINDS = pytest.mark.parametrize("name", ["hyper", "tree-static", "dynamic", "kv"])
"""One of each mechanism."""


def configuration(name="serial", **changes):
    return DepthLlamaConfig(**{**SIZE, **SWITCHES[name], **changes})


def llama_configuration(**changes):
    return tf.LlamaConfig(**{**SIZE, **changes})


@torch.no_grad()
def randomise(model, seed=0, spread=1.0):
    """Every parameter random: matrices at 1/sqrt(fan-in), the rest (gains, biases, routers, mixings) near its start."""
    source = seeded(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64).to(parameter.dtype) * spread
        if name.endswith("_proj.weight") or "embed_tokens" in name or "lm_head" in name:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif "router" in name and parameter.shape[-1] == model.config.hidden_size:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 * 2)
        else:
            parameter.add_(noise * 0.4)
    return model


def build(name="serial", *, dtype=torch.float64, attention="sdpa", seed=0, spread=1.0, **changes):
    """A model in evaluation mode with random parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DepthLlamaForCausalLM._from_config(configuration(name, **changes), attn_implementation=attention)
    return randomise(model, seed, spread).to(dtype).eval()


def tokens(batch=2, length=9, seed=0):
    return token_ids(batch, length, seed, SIZE["vocab_size"])


def padded(lengths=(9, 4, 6), side="left", seed=0):
    """A batch of sequences of different lengths; positions count from the first real token."""
    ids = tokens(len(lengths), max(lengths), seed)
    index = torch.arange(max(lengths)).expand(len(lengths), -1)
    count = torch.tensor(lengths)[:, None]
    mask = (index >= max(lengths) - count if side == "left" else index < count).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def parameters(model):
    """The state dict as leaves that collect gradients; tied tensors are one leaf."""
    leaves = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter):
            leaves[name] = tensor.detach().clone().requires_grad_()
    if model.config.tie_word_embeddings:
        leaves.pop("lm_head.weight", None)
    return leaves


def frequencies(model):
    """The rotary frequencies that the model really uses."""
    return model.model.rotary_emb.inv_freq.detach().clone()
