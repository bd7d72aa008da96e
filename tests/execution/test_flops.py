"""The counts from shapes against PyTorch's counter, and against each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny_models as tm
from execution import decoders
from execution.test_scoring import counted
from families import zoo
from fulldepth.execution.flops import (
    Shape,
    Variant,
    attends,
    attention_width,
    costs_of,
    forward_flops,
    visible_keys,
    weight_products,
)
from fulldepth.execution.verify import prove
from fulldepth.hf import Block

BATCH, TIME = 2, 12


EXPERTS = {
    "qwen3_moe": {},
    "mixtral": {"sliding_window": 64},
    "gpt_oss": {"sliding_window": 64},
    "glm4_moe": {},
    "llama4_text": {},
}
"""Experts on top of a router, beside a shared one, in some layers only, and on every token. No window is shorter than
the sequence: torch counts what eager attention masks, too."""


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", *EXPERTS])
def test_both_counts_are_those_of_torch(name):
    model = zoo.build(name, "causal-lm", **EXPERTS[name]) if name in EXPERTS else tm.build(name)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"  # torch counts no grouped product
    ids = tm.token_ids(BATCH, TIME)
    with torch.no_grad():
        expected = counted(lambda: model(input_ids=ids, use_cache=False))
    token = forward_flops(model, TIME)
    assert BATCH * TIME * (token.linear + token.head + token.attention_full) == expected
    anatomy, classifier = prove(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    for granularity in ("attention", "mlp", "layer"):
        costs = costs_of(anatomy, classifier, granularity)
        assert costs.whole(Variant(), Shape(BATCH, TIME, 0), every_position=True) == expected


@pytest.mark.parametrize("name", ["gemma3", "gemma4_text"])
def test_a_tower_of_images_and_layers_with_heads_of_their_own_count_as_torch_counts_them(name):
    """Text does not pass the tower; the last layer of Gemma 4 has wider heads, which its configuration states."""
    model = zoo.build(name, "causal-lm")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = counted(lambda: model(input_ids=tm.token_ids(BATCH, TIME), use_cache=False))
    token = forward_flops(model, TIME)
    assert BATCH * TIME * (token.linear + token.head + token.attention_full) == expected


WINDOWS = {
    "mistral": {"sliding_window": 5},
    "mixtral": {"sliding_window": 5},
    "qwen3_moe": {"sliding_window": 5, "use_sliding_window": True},
    "qwen2": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"sliding_window": 5},
    "llama4_text": {"attention_chunk_size": 5},
    "qwen3_next": {},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_keys_are_those_that_get_attention(name):
    model = zoo.build(name, "causal-lm", **WINDOWS[name])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=tm.token_ids(1, TIME), output_attentions=True, use_cache=False).attentions
    seen = [int((layer[0, 0] > 0).sum()) / TIME for layer in weights if layer is not None]
    keys = visible_keys(model.config, TIME)
    assert [visible for visible in keys if visible] == pytest.approx(seen)
    assert len(keys) == model.config.num_hidden_layers
    assert min(keys) < (TIME + 1) / 2
    assert forward_flops(model, TIME).attention == pytest.approx(4 * attention_width(model.config) * sum(seen))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "llama4_text"])
@pytest.mark.parametrize("variant", [Variant(), Variant({Block(1, "attention")})])
def test_a_search_counts_the_keys_of_a_window(name, variant):
    model = zoo.build(name, "causal-lm", **WINDOWS[name])
    wide = zoo.build(name, "causal-lm", **{key: 64 for key in WINDOWS[name]})
    model.set_attn_implementation("eager")
    ids = tm.token_ids(1, TIME)
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    pairs = [int((layer[0, 0] > 0).sum()) for layer in weights]
    shares = [seen / (TIME * (TIME + 1) / 2) for seen in pairs]
    missing = sum(1 - share for layer, share in enumerate(shares, start=1) if attends(variant, layer))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    windowed, whole = (costs_of(*prove(each, batch), "attention") for each in (model, wide))
    shape = Shape(1, TIME, 3)
    saved = TIME * TIME * 4 * attention_width(model.config) * missing
    assert saved > 0
    assert whole.whole(variant, shape) - windowed.whole(variant, shape) == pytest.approx(saved)
    assert whole.training(variant, shape) - windowed.training(variant, shape) == pytest.approx(3 * saved)


def test_parts_that_an_export_lacks_cannot_be_removed_again():
    model = decoders.build("llama-fast")  # without the attention of layer 1 and the MLP of layer 2
    anatomy, classifier = prove(
        model, {"input_ids": (ids := tm.token_ids(2, 4)), "attention_mask": torch.ones_like(ids)}
    )
    able = {kind: costs_of(anatomy, classifier, kind).able for kind in ("attention", "mlp", "layer")}
    assert {kind: [block.layer for block in own] for kind, own in able.items()} == {
        "attention": [2, 3],
        "mlp": [1, 3],
        "layer": [1, 2, 3],
    }


def test_packed_weights_count_as_the_matrices_that_they_stand_for():
    packed = nn.Module()
    packed.qweight, packed.in_features, packed.out_features = torch.zeros(1, 24, dtype=torch.int32), 8, 24
    assert weight_products(packed) == weight_products(nn.Linear(8, 24)) == 2 * 8 * 24
    assert weight_products(nn.Embedding(8, 24)) == weight_products(None) == 0
