"""The `depth_llama` model once more: plain loops over layers and heads from the papers; nothing of fulldepth.

`run` is a function of a state dict and a configuration. It materialises every mixture of every head, shares nothing
between layers, keeps no cache, and stays in the precision of the state dict it is given (float64 in the tests).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


@dataclass
class Trace:
    """What one pass shows. Lists have one entry per layer."""

    logits: torch.Tensor | None = None  # [B, T, V]
    states: list = field(default_factory=list)  # h_0..h_L: [B, T, D]
    keys: list = field(default_factory=list)  # routed, rotated: [B, T, H_kv, d]
    values: list = field(default_factory=list)  # routed: [B, T, H_kv, d]
    routing: list = field(default_factory=list)  # None at the first layer


class Weights:
    """The parameters whose names start with a prefix."""

    def __init__(self, state, prefix=""):
        self.state, self.prefix = state, prefix

    def at(self, name):
        return Weights(self.state, f"{self.prefix}{name}.")

    def get(self, name):
        return self.state.get(self.prefix + name)

    def __getitem__(self, name):
        return self.state[self.prefix + name]

    def below(self, name):
        """Every parameter below a module, in the order of the state dict."""
        start = f"{self.prefix}{name}."
        return {key.removeprefix(start): value for key, value in self.state.items() if key.startswith(start)}

    def only(self, name):
        (value,) = self.below(name).values()
        return value

    def linear(self, name, x):
        y = torch.einsum("...i,oi->...o", x, self[f"{name}.weight"])
        bias = self.get(f"{name}.bias")
        return y if bias is None else y + bias


def rms_norm(x, gain, eps):
    """x / sqrt(mean x^2 + eps), times the gain."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def rotate(x, positions, frequencies):
    """Rotary embedding of x [B, T, H, d]: channels j and j + d/2 turn by position * frequency j."""
    angle = positions[..., None].to(x.dtype) * frequencies.to(x.dtype)  # [B or 1, T, d/2]
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(query, keys, values, allowed):
    """Softmax attention, one query head at a time; query head h reads key/value head h // (H / H_kv)."""
    heads, shared = query.shape[2], query.shape[2] // keys.shape[2]
    outputs = []
    for head in range(heads):
        k, v = keys[:, :, head // shared], values[:, :, head // shared]
        scores = torch.einsum("bqd,bkd->bqk", query[:, :, head], k) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~allowed, -torch.inf)
        weights = torch.where(allowed.any(-1, keepdim=True), scores, 0).softmax(-1)
        outputs.append(torch.einsum("bqk,bkd->bqd", weights, v))
    return torch.cat(outputs, dim=-1)  # [B, T, H d]


def swiglu(weights, x):
    gate = weights.linear("gate_proj", x)
    return weights.linear("down_proj", gate * gate.sigmoid() * weights.linear("up_proj", x))


def top_p(weights, p):
    """The smallest set of weights (last axis) whose sum exceeds p, renormalised; one distribution at a time."""
    flat = weights.reshape(-1, weights.shape[-1])
    rows = []
    for row in flat:
        total, keep = 0.0, torch.zeros_like(row)
        for index in row.argsort(descending=True).tolist():
            keep[index] = 1
            total += row[index].item()
            if total > p:
                break
        rows.append(row * keep / (row * keep).sum())
    return torch.stack(rows).reshape(weights.shape)


def projected(attention, x, config):
    """Keys and values [B, T, H_kv, d] of one input for all heads, before rotary embedding."""
    shape = (*x.shape[:2], config.num_key_value_heads, config.head_dim)
    return attention.linear("k_proj", x).view(shape), attention.linear("v_proj", x).view(shape)


def mixed_inputs(attention, past, current, config):
    """LIME, static and dynamic: one convex mixture of normalised earlier states per key/value head (Eq. 1, App. E).

    `past` is X_0..X_{r-2}, `current` the layer's actual input in the place of X_{r-1}.
    """
    gain, heads, dim = attention["memory_norm.weight"], config.num_key_value_heads, config.head_dim
    sources = [rms_norm(x, gain, config.rms_norm_eps) for x in [*past, current]]
    router = attention.only("router")
    if config.memory == "static":
        weights = router.view(heads, len(sources)).softmax(-1)
        weights = weights if config.router_top_p is None else top_p(weights, config.router_top_p)
        per_token = weights.expand(*current.shape[:2], *weights.shape)
    else:
        read = current if config.router_input == "raw" else sources[-1]
        per_token = torch.einsum("btd,od->bto", read, router).view(*current.shape[:2], heads, len(sources)).softmax(-1)
        weights = per_token = per_token if config.router_top_p is None else top_p(per_token, config.router_top_p)
    keys, values = [], []
    for head in range(heads):
        mixture = sum(per_token[:, :, head, m, None] * source for m, source in enumerate(sources))
        own = slice(head * dim, (head + 1) * dim)
        for name, found in (("k_proj", keys), ("v_proj", values)):
            bias = attention.get(f"{name}.bias")
            one = torch.einsum("bti,oi->bto", mixture, attention[f"{name}.weight"][own])
            found.append(one if bias is None else one + bias[own])
    return torch.stack(keys, dim=2), torch.stack(values, dim=2), weights


def mixed_heads(attention, buffer, config):
    """LIMe ("kv"): a linear mixture of every earlier layer's projected keys (values) over layers and heads."""
    heads = config.num_key_value_heads
    weights = attention.only("router").view(heads, len(buffer), heads)
    keys = sum(torch.einsum("hg,btgd->bthd", weights[:, m], pair[0]) for m, pair in enumerate(buffer))
    values = sum(torch.einsum("hg,btgd->bthd", weights[:, m], pair[1]) for m, pair in enumerate(buffer))
    return keys, values, weights


def self_attention(attention, normed, current, memory, setting, trace):
    """Attn of one layer: queries from the normed input, keys and values from the memory where there is one."""
    config = setting.config
    keys, values = projected(attention, normed, config)
    memory.buffer.append((keys, values))
    weights = None
    if len(memory.buffer) > 1 and config.memory == "kv":
        keys, values, weights = mixed_heads(attention, memory.buffer, config)
    elif len(memory.buffer) > 1 and config.memory in ("static", "dynamic"):
        keys, values, weights = mixed_inputs(attention, memory.past, current, config)
    query = attention.linear("q_proj", normed).view(*normed.shape[:2], -1, config.head_dim)
    query, keys = (rotate(x, setting.positions, setting.frequencies) for x in (query, keys))
    trace.keys.append(keys)
    trace.values.append(values)
    trace.routing.append(weights)
    return attention.linear("o_proj", attend(query, keys, values, setting.allowed))


def layer_norm(x, eps=1e-5):
    """LayerNorm without gain or bias."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def through_connection(connection, streams, branch):
    """Hyper-Connections (arXiv 2409.19606): mix n streams [B, T, n, D] into a branch's input and back.

    alpha [n, 1+n]: its first column makes the branch's input, the others the carried streams; beta [n] writes the
    branch's output. Dynamic parts are tanh(LN(h) W) times a scale, of every stream on its own.
    """
    alpha, beta = connection["static_alpha"], connection["static_beta"]
    if connection.get("dynamic_alpha") is not None:
        normed = layer_norm(streams)
        alpha = (
            alpha
            + connection["dynamic_alpha_scale"]
            * torch.einsum("btnd,dk->btnk", normed, connection["dynamic_alpha"]).tanh()
        )
        beta = (
            beta
            + connection["dynamic_beta_scale"] * torch.einsum("btnd,d->btn", normed, connection["dynamic_beta"]).tanh()
        )
    count = streams.shape[2]
    alpha = alpha.expand(*streams.shape[:2], count, count + 1)
    beta = beta.expand(*streams.shape[:2], count)
    mixed = torch.einsum("btnk,btnd->btkd", alpha, streams)
    output = branch(mixed[:, :, 0])
    return mixed[:, :, 1:] + beta[..., None] * output[:, :, None]


def one_layer(layer, x, memory, setting, trace):
    """The pre-norm block, plain or with streams."""
    eps = setting.config.rms_norm_eps
    number = len(trace.states)  # of the layer, from 1
    scale = 1 / math.sqrt(number) if getattr(setting.config, "norm_scaling", False) else 1.0

    def attention(y):
        normed = scale * rms_norm(y, layer["input_layernorm.weight"], eps)
        return self_attention(layer.at("self_attn"), normed, y, memory, setting, trace)

    def mlp(y):
        return swiglu(layer.at("mlp"), scale * rms_norm(y, layer["post_attention_layernorm.weight"], eps))

    if setting.config.residual == "hyper":
        x = through_connection(layer.at("attention_connection"), x, attention)
        return through_connection(layer.at("mlp_connection"), x, mlp)
    x = x + attention(x)
    return x + mlp(x)


def allowed_pairs(mask, positions, length):
    """[B, T, T], True where a query may read a key: causal, real keys only, within the query's own document."""
    allowed = torch.ones(length, length, dtype=torch.bool).tril()[None]
    if mask is not None:
        allowed = allowed & mask.bool()[:, None, :]
    if mask is None and positions is not None:
        document = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        allowed = allowed & (document[:, :, None] == document[:, None, :])
    return allowed


def run(state, config, input_ids, *, mask=None, positions=None, frequencies=None, final_eps=None):
    """The whole model.

    Args:
        state: parameters by name.
        config: any object with the configuration's fields.
        input_ids: [B, T].
        mask: [B, T], 0 = padding.
        positions: [B, T]; a restart starts a new document if there is no mask.
        frequencies: [d/2] rotary frequencies (default: theta^(-2j/d), computed in float64).
        final_eps: of the last norm, if not the configuration's.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    setting = SimpleNamespace(
        config=config,
        allowed=allowed_pairs(mask, positions, input_ids.shape[1]),
        positions=torch.arange(input_ids.shape[1])[None] if positions is None else positions,
        frequencies=config.rope_parameters["rope_theta"] ** -half if frequencies is None else frequencies,
    )
    tree = {int(layer): tuple(pair) for layer, pair in (config.tree or {}).items()} if config.residual == "tree" else {}
    weights, trace = Weights(state, "model."), Trace()
    memory = SimpleNamespace(past=[], buffer=[])
    embedding = weights["embed_tokens.weight"]
    x = embedding[input_ids]
    trace.states.append(x)
    if config.residual == "hyper":
        x = torch.stack([x] * config.num_streams, dim=2)
    for index in range(config.num_hidden_layers):
        layer = weights.at(f"layers.{index}")
        if index in tree:
            gains = layer.below("tree_norms").values()
            ends = [trace.states[parent + 1] for parent in tree[index]]
            x = sum(rms_norm(end, gain, config.rms_norm_eps) for end, gain in zip(ends, gains, strict=True))
        memory.past = trace.states[:-1]
        x = one_layer(layer, x, memory, setting, trace)
        trace.states.append(x)
    x = x.sum(2) if config.residual == "hyper" else x
    x = rms_norm(x, weights["norm.weight"], config.rms_norm_eps if final_eps is None else final_eps)
    head = embedding if config.tie_word_embeddings else state["lm_head.weight"]
    trace.logits = torch.einsum("btd,vd->btv", x, head)
    return trace


def loss(logits, labels):
    """Mean cross-entropy of the next token, in nats."""
    log_p = logits[:, :-1].log_softmax(-1)
    return -log_p.gather(-1, labels[:, 1:, None]).mean()
