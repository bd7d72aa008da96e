"""Every site against the model taken apart by hand: a block's own submodules, called in the order of its source."""

import inspect
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tiny_models
from fulldepth.execution import SITES, body_inputs, capture, verify
from fulldepth.hf import anatomy_candidates

# Each function takes a block apart: (block, x, what else the block was given) -> branches A and M, and x', y where they
# are not x + A and x + A + M.


def llama(block, x, given, scale=1.0):
    a = scale * block.self_attn(hidden_states=block.input_layernorm(x), **given)[0]
    return a, scale * block.mlp(block.post_attention_layernorm(x + a))


def granite(block, x, given):
    return llama(block, x, given, scale=0.3)


def gemma(block, x, given):
    a = block.post_attention_layernorm(block.self_attn(hidden_states=block.input_layernorm(x), **given)[0])
    return a, block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x + a)))


def falcon(block, x, given):
    normed = block.input_layernorm(x)
    return block.self_attention(normed, **given)[0].clone(), block.mlp(normed)


def gpt2(block, x, given):
    a = block.attn(block.ln_1(x), **given)[0]
    return a, block.mlp(block.ln_2(x + a))


def neox(block, x, given):
    a = block.attention(block.input_layernorm(x), **given)[0]
    return a, block.mlp(block.post_attention_layernorm(x))


def opt(block, x, given):
    a = block.self_attn(hidden_states=block.self_attn_layer_norm(x), **given)[0]
    return a, block.fc2(F.relu(block.fc1(block.final_layer_norm(x + a))))


def bert(block, x, given):
    a = block.attention.output.dense(block.attention.self(x, **given)[0])
    middle = block.attention.output.LayerNorm(x + a)
    m = block.output.dense(block.intermediate(middle))
    return a, m, middle, block.output.LayerNorm(middle + m)


def vit(block, x, given):
    a = block.attention(block.layernorm_before(x), **given)[0]
    return a, block.mlp(block.layernorm_after(x + a))


def detr(block, x, given):
    queries = given["object_queries_position_embeddings"]
    a = block.self_attn(x, position_embeddings=queries, attention_mask=given["attention_mask"])[0]
    middle = block.self_attn_layer_norm(x + a)
    crossed = block.encoder_attn(
        middle,
        key_value_states=given["encoder_hidden_states"],
        attention_mask=given["encoder_attention_mask"],
        position_embeddings=queries,
        encoder_position_embeddings=given["spatial_position_embeddings"],
    )[0]
    before_mlp = block.encoder_attn_layer_norm(middle + crossed)
    m = block.mlp(before_mlp)
    return a, m, middle, block.final_layer_norm(before_mlp + m)


BY_HAND = {
    "llama": (llama, "model.layers", "model.norm"),
    "granite": (granite, "model.layers", "model.norm"),
    "gemma2": (gemma, "model.layers", "model.norm"),
    "gpt2": (gpt2, "transformer.h", "transformer.ln_f"),
    "falcon": (falcon, "transformer.h", "transformer.ln_f"),
    "gpt_neox": (neox, "gpt_neox.layers", "gpt_neox.final_layer_norm"),
    "opt": (opt, "model.decoder.layers", "model.decoder.final_layer_norm"),
    "bert": (bert, "bert.encoder.layer", None),
    "vit": (vit, "vit.layers", "vit.layernorm"),
    "detr": (detr, "model.decoder.layers", "model.decoder.layernorm"),
}
"""Model -> its block taken apart, the path of its blocks, and that of its final norm."""
ORDER = ("attention_branch", "mlp_branch", "attention_output", "residual")


@torch.no_grad()
def taken_apart(name, model, batch):
    """Each layer's A, M, x', y as `ORDER`, chained from h_0; only masks and positions come from the model."""
    given = []
    by_hand, path, _ = BY_HAND[name]
    blocks = model.get_submodule(path)

    def note(block, args, kwargs):
        bound = inspect.signature(block.forward).bind(*args, **kwargs).arguments
        given.append({**bound, **bound.pop("kwargs", {})})

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    model(**batch, **({"use_cache": False} if "input_ids" in batch and hasattr(model.config, "use_cache") else {}))
    for handle in handles:
        handle.remove()
    x = given[0].pop("hidden_states")
    embeddings, layers = x, []
    for block, rest in zip(blocks, given, strict=True):
        rest.pop("hidden_states", None)
        a, m, *sums = by_hand(block, x, rest)
        layers.append((a, m, *(sums or (x + a, x + a + m))))
        x = layers[-1][-1]
    return embeddings, layers


@pytest.mark.parametrize("name", BY_HAND)
@torch.no_grad()
def test_branches_and_stream_equal_the_block_taken_apart(name):
    model = tiny_models.build(name)
    batch = tiny_models.inputs(model)
    embeddings, layers = taken_apart(name, model, batch)
    sites = set(SITES) - ({"value"} if name == "falcon" else set())
    anatomy = verify(anatomy_candidates(model), batch).anatomy
    with capture(anatomy, sites) as activations:
        anatomy.body(**body_inputs(anatomy, batch))
        states = {site: activations[site] for site in sites}
    assert {site: len(values) for site, values in states.items()} == dict.fromkeys(sites, 3) | {
        "embeddings": 1,
        "residual": 4,
        "final_normed": 1,
    }
    assert_close(states["embeddings"], [embeddings], rtol=0, atol=0)
    assert_close(states["residual"][0], embeddings, rtol=0, atol=0)
    assert_close(states["attention_input"], states["residual"][:-1], rtol=0, atol=0)
    norm = BY_HAND[name][2]
    last = states["residual"][-1] if norm is None else model.get_submodule(norm)(states["residual"][-1])
    assert_close(states["final_normed"], [last], rtol=0, atol=0)
    for site, expected in zip(ORDER, zip(*layers, strict=True), strict=True):
        got = states[site][1:] if site == "residual" else states[site]
        assert_close(got, list(expected), rtol=1e-4, atol=1e-4, msg=site)
    for layer, (a, m, _, y) in enumerate(layers, start=1):
        ends = anatomy.part(layer, "mlp_norm") if anatomy.family.design == "post" else nn.Identity()
        total = states["mlp_input"][layer - 1] + m + (a if anatomy.family.design == "parallel" else 0)
        assert_close(ends(total), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in BY_HAND if name != "falcon"])
@torch.no_grad()
def test_value_states_are_those_that_attention_is_given(name, monkeypatch):
    model = tiny_models.build(name)
    batch = tiny_models.inputs(model)
    kind = model.config._attn_implementation
    own_eager = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    plain = own_eager if kind == "eager" else ALL_ATTENTION_FUNCTIONS[kind]
    names = {module: path for path, module in model.named_modules()}
    seen = {}

    def spy(module, query, key, value, *args, **kwargs):
        seen[names[module]] = value.transpose(1, 2).flatten(2)  # [B, H, T, d] -> [B, T, H d]
        return plain(module, query, key, value, *args, **kwargs)

    anatomy = verify(anatomy_candidates(model), batch).anatomy
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {kind: spy})
    with capture(anatomy, ["value"]) as activations:
        model(**batch)
    own = [value for path, value in seen.items() if path.startswith(BY_HAND[name][1]) and "encoder_attn" not in path]
    assert len(own) == 3
    assert_close(activations["value"], own, rtol=0, atol=0)
