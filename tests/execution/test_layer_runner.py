"""Layers run on given states with a cache, against stock transformers: its own forward pass, cache and `generate`."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import tiny_models as tm
from execution.decoders import prompts
from families import zoo
from fulldepth.execution import verify
from fulldepth.execution.layer_runner import decoding_runner
from fulldepth.hf import anatomy_candidates
from fulldepth.hf.caches import CACHE
from refusals import refused
from tiny_models import token_ids

ROWS, PROMPT = 2, 9


def runner_of(model):
    batch = tm.inputs(model)
    return decoding_runner(verify(anatomy_candidates(model), batch, optional=("branches",)).anatomy, batch)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("depth_llama-tree", "reads more than the layer before"),
        ("depth_llama-static", "reads more than the layer before"),
        ("depth_llama-kv", "give beside the state"),
        ("mamba", "cache"),
    ],
)
def test_what_keeps_more_than_its_own_keys_and_values_is_refused(name, reason):
    with refused(reason):
        runner_of(tm.build(name))


def test_what_keeps_no_cache_is_refused_in_words():
    model = zoo.build("rwkv", "causal-lm")
    model.config.pad_token_id = 0
    with refused("its forward pass keeps nothing where keys and values are expected"):
        runner_of(model)


def test_layers_that_share_keys_and_values_are_refused():
    model = tm.build("llama")
    model.model.layers[2].self_attn.layer_idx = 1
    with refused("cannot be decoded layer by layer"):
        runner_of(model)


@torch.no_grad()
def test_what_does_not_fit_the_cache_is_refused():
    model = tm.build("gemma3")  # windows of 8
    runner, (ids, mask) = runner_of(model), prompts().values()
    cache = runner.new_cache()
    states = runner.begin({"input_ids": ids, "attention_mask": mask}, cache)
    after = runner.run((1, 2), states)
    longer = torch.cat([mask, mask.new_ones(ROWS, 2)], dim=1)
    runner.begin({"input_ids": ids[:, :2], "attention_mask": longer}, cache)
    with refused("Layer 3 has 0 positions in the cache"):
        runner.run(3, after[:, :2])
    cache.crop(9)
    with refused("Layer 1 has a sliding window and no longer holds"):
        cache.crop(8)
    with refused("does not fit"):
        runner.begin({"input_ids": ids, "attention_mask": longer})


def test_a_model_whose_own_decoding_differs_is_refused_for_that_reason():
    """Moshi's cache keeps a window of positions, and its attention reads all."""
    ids = token_ids(2, 12, most=90)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(0)
    model = tf.MoshiForCausalLM(zoo.config_for("moshi", sliding_window=8)).eval()
    with torch.no_grad():
        whole = model(**batch, use_cache=False).logits[:, -1]
        cache = model(input_ids=ids[:, :-1], use_cache=True)[CACHE]
        decoded = model(**batch | {"input_ids": ids[:, -1:]}, **{CACHE: cache}).logits[:, -1]
    assert not torch.allclose(whole, decoded, atol=1e-5)
    anatomy = verify(anatomy_candidates(model), batch, optional=("branches",)).anatomy
    with refused(r"its own decoding .* keeps a window of 8 positions"):
        decoding_runner(anatomy, batch)
