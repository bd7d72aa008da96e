"""Decoders without some of their attention, against the stock decoder with that attention giving zeros."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DynamicCache, StaticCache

import tiny_models
from architectures.test_decoding import in_pieces
from fulldepth.architectures import SKIPPED, DeciLMConfig, DeciLMForCausalLM
from fulldepth.hf.caches import CACHE
from json_files import read_json
from skip import plain

LAYERS = tiny_models.LAYERS
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox", "gpt_neox-serial"]
OWN = ("model_type", "transformers_version", "architectures", "auto_map")


def skipped(model, attention=(), mlp=(), **values):
    """The class without these parts, with the stock model's weights."""
    kind = SKIPPED[model.config.model_type]
    stock = {name: value for name, value in model.config.to_dict().items() if name not in OWN}
    config = kind.config_class(**stock, skipped_attention=list(attention), skipped_mlp=list(mlp), **values)
    found = kind(config).eval()
    info = found.load_state_dict(model.state_dict(), strict=False)
    assert not info.missing_keys
    return found.to(model.dtype)


def zeroed(model, attention=(), mlp=()):
    """A copy of the stock model in which these branches give zeros."""
    model = copy.deepcopy(model)
    plain.zero(model, attention, "attention")
    plain.zero(model, mlp, "mlp")
    return model


def tokens(length=14):
    """More than Gemma's window of 8; row 2 begins with padding."""
    ids = tiny_models.token_ids(2, length)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return ids.where(mask == 1, 0), mask


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def close(got, expected, mask=None):
    difference = (got - expected).detach().abs()
    if mask is not None:
        difference = difference[mask == 1]
    assert float(difference.max() / expected.detach().abs().max()) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_set_of_layers_agrees_with_and_without_any_cache(name):
    stock = tiny_models.build(name)
    ids, mask = tokens()
    for layers in [(), (1, 3), (1, 2, 3)]:
        model = skipped(stock, layers)
        expected = zeroed(stock, layers)(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits
        close(model(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits, expected, mask)
        given = (DynamicCache(), DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20))
        for cache in (None, *given):
            found, cache = in_pieces(model, ids, mask, positions(mask), (9, 1, 2, 1, 1), cache)
            close(found, expected, mask)
            assert int(cache.get_seq_length()) == ids.shape[1]
            assert len(cache.layers) == max(1, LAYERS - len(layers))


@torch.no_grad()
def greedy(model, ids, mask, steps):
    """Generation by its definition: the whole sequence again for every token, no cache. Token 2 would end it."""
    for _ in range(steps):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits[:, -1]
        logits[:, 2] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_gives_the_same_tokens_whatever_the_cache(name):
    stock = tiny_models.build(name)
    ids, mask = tokens()
    options = {"attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = 2
    for layers in [(), (1, 3)]:
        model = skipped(stock, layers)
        expected = greedy(zeroed(stock, layers), ids, mask, 5)
        for kind in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
            assert torch.equal(model.generate(ids, **options, **kind), expected)
        beams = [model.generate(ids, num_beams=2, **options, use_cache=cached) for cached in (True, False)]
        assert torch.equal(*beams)


def test_a_cache_that_another_model_filled_is_refused():
    stock = tiny_models.build("llama")
    ids = tokens()[0]
    cache = stock(input_ids=ids, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="filled by another model"):
        skipped(stock, (2,))(input_ids=ids[:, :1], **{CACHE: cache})


@pytest.mark.parametrize("name", FAMILIES)
def test_skipped_mlps_do_not_exist(name):
    stock = tiny_models.build(name)
    ids, _ = tokens()
    for attention, mlp in [((), (2,)), ((1,), (1, 3))]:
        model = skipped(stock, attention, mlp)
        close(model(input_ids=ids).logits, zeroed(stock, attention, mlp)(input_ids=ids).logits)
        assert not any(f".{layer - 1}.mlp." in n for layer in mlp for n in model.state_dict())


def test_hidden_states_and_gradients():
    model = skipped(tiny_models.build("gemma2"), (1,)).train()
    ids, _ = tokens()
    outputs = model(input_ids=ids, labels=ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == LAYERS + 1
    outputs.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", sorted(SKIPPED))
def test_a_configuration_marks_layers_so_that_nobody_else_loads_it(name, tmp_path):
    kind = SKIPPED[name].config_class
    stock = kind.__mro__[2]
    kind(num_hidden_layers=3, skipped_attention=[3, 1], skipped_mlp=[2]).save_pretrained(tmp_path)
    saved = read_json(tmp_path / "config.json")
    assert saved["model_type"] == f"fulldepth_skipped_{name}"
    assert saved["skipped_attention"] == [1, 3]
    marks = saved["layer_types"]
    assert marks[0] == marks[2] == "fulldepth_no_attention"
    assert marks[1].startswith("fulldepth_no_mlp:")
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is kind
    assert json.loads(again.to_json_string()) == saved
    assert all("fulldepth" not in mark for mark in getattr(again, "layer_types", None) or [])
    with pytest.raises(StrictDataclassError, match="layer_types"):
        stock.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama", {"skipped_attention": [4]}),
        ("llama", {"skipped_mlp": [0]}),
        ("llama", {"stream_scale": [1.0, 2.0]}),
        ("llama", {"stream_scale": [1.0] * 6 + [-1.0]}),
        ("gpt2", {"add_cross_attention": True}),
    ],
)
def test_configurations_without_meaning_are_refused(name, values):
    with pytest.raises(ValueError, match=r"layer|numbers|cross-attention"):
        SKIPPED[name].config_class(num_hidden_layers=3, **values)


def test_decilm_configurations_are_read_by_attribute_and_written_as_published():
    entry = {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": False, "ffn_mult": 4.0}}
    other = {"attention": {"no_op": False, "n_heads_in_group": 2}, "ffn": {"no_op": True, "ffn_mult": None}}
    values = {**tiny_models.DECODER, "num_hidden_layers": 2}
    config = DeciLMConfig(**values, block_configs=[entry, other])
    assert config.block_configs[0].attention.no_op
    assert (config.skipped_attention, config.skipped_mlp) == ([1], [2])
    assert config.to_dict()["block_configs"] == [entry, other]
    assert json.loads(config.to_json_string())["block_configs"] == [entry, other]
    with pytest.raises(ValueError, match="1 block_configs for 2 blocks"):
        DeciLMConfig(**values, block_configs=[entry])
    names = DeciLMForCausalLM(config).state_dict()
    assert "model.layers.0.self_attn.q_proj.weight" not in names
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "model.layers.1.mlp.up_proj.weight" not in names
