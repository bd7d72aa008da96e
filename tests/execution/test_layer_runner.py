"""Layers run on given states with a cache, against stock transformers: its own forward pass, cache and `generate`."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import Tensor

import tiny_models as tm
from execution.decoders import MODELS
from families import zoo
from fulldepth.errors import FulldepthError
from fulldepth.execution import verify
from fulldepth.execution.decoding_proof import decoding_runner
from fulldepth.execution.layer_cache import LayerCache
from fulldepth.execution.layer_runner import LayerRunner, positions
from fulldepth.hf import anatomy_candidates

ROWS, PROMPT, PADDED = 2, 9, 3


@pytest.fixture
def more_models(monkeypatch):
    for name, build in MODELS.items():
        monkeypatch.setitem(tm.UNLISTED, name, build)


def prompts() -> dict[str, Tensor]:
    """Two prompts, the second padded on the left."""
    ids = torch.randint(3, tm.VOCAB, (ROWS, PROMPT), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    return {"input_ids": ids, "attention_mask": mask}


def runner_of(model: tf.PreTrainedModel) -> LayerRunner:
    batch = tm.inputs(model)
    return decoding_runner(verify(anatomy_candidates(model), batch, optional=("branches",)).anatomy, batch)


def begin(runner: LayerRunner, ids: Tensor, mask: Tensor, start: int, cache: LayerCache) -> Tensor:
    return runner.begin({"input_ids": ids[:, start:], "attention_mask": mask}, cache)


@torch.no_grad()
@pytest.mark.usefixtures("more_models")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_left_behind_catch_up_in_parts_of_any_length(name):
    """The prompt by the model itself, with our cache; then ten tokens that layers 1, 2 and 3 see at different times."""
    model = tm.build(name, dtype=torch.float64)
    runner = runner_of(model)
    ids = torch.cat([prompts()["input_ids"], torch.randint(3, tm.VOCAB, (ROWS, 10))], dim=1)
    mask = torch.cat([prompts()["attention_mask"], torch.ones(ROWS, 10).long()], dim=1)
    places = {"position_ids": positions(mask)}
    expected = model(ids, attention_mask=mask, **places, output_hidden_states=True)
    cache = runner.new_cache()
    first = {key: value[:, :PROMPT] for key, value in {"attention_mask": mask, **places}.items()}
    model(ids[:, :PROMPT], **first, past_key_values=cache, use_cache=True)
    assert cache.lengths == [PROMPT] * 3

    states = {0: runner.begin({"input_ids": ids[:, PROMPT:], "attention_mask": mask}, cache)}
    for layer, parts in ((1, (1, 1, 3, 5)), (2, (4, 6)), (3, (9, 1))):
        after, start = [], PROMPT
        for part in parts:
            begin(runner, ids[:, : start + part], mask[:, : start + part], start, cache)
            after.append(runner.run(layer, states[layer - 1][:, start - PROMPT : start - PROMPT + part]))
            start += part
        states[layer] = torch.cat(after, dim=1)
        assert cache.lengths == [PROMPT + 10] * layer + [PROMPT] * (3 - layer)
    for layer in (0, 1, 2):
        torch.testing.assert_close(states[layer], expected.hidden_states[layer][:, PROMPT:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(runner.finish(states[3]), expected.logits[:, PROMPT:], rtol=1e-9, atol=1e-9)
    if not any(layer.is_sliding for layer in cache.layers):
        stock = model(ids, attention_mask=mask, **places, use_cache=True).past_key_values
        for own, other in zip(cache.layers, stock.layers, strict=True):
            torch.testing.assert_close(own.keys[0], other.keys[0], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("more_models")
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
    with pytest.raises(FulldepthError, match=reason):
        runner_of(tm.build(name))


def test_layers_that_share_keys_and_values_are_refused():
    model = tm.build("llama")
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(FulldepthError, match="cannot be decoded layer by layer"):
        runner_of(model)


@torch.no_grad()
def test_what_does_not_fit_the_cache_is_refused():
    model = tm.build("gemma3")  # windows of 8
    runner, (ids, mask) = runner_of(model), prompts().values()
    cache = runner.new_cache()
    states = begin(runner, ids, mask, 0, cache)
    after = runner.run((1, 2), states)
    longer = torch.cat([mask, mask.new_ones(ROWS, 2)], dim=1)
    runner.begin({"input_ids": ids[:, :2], "attention_mask": longer}, cache)
    with pytest.raises(FulldepthError, match="Layer 3 has 0 positions in the cache"):
        runner.run(3, after[:, :2])
    with pytest.raises(FulldepthError, match="only if all layers hold them"):
        cache.crop([8, 9])
    cache.crop(9)
    with pytest.raises(FulldepthError, match="Layer 1 has a sliding window and no longer holds"):
        cache.crop(8)
    with pytest.raises(FulldepthError, match="0 positions or more"):
        cache.crop(-1)
    for given, other in ((longer, None), (mask[:, :1], cache)):
        with pytest.raises(FulldepthError, match="does not fit"):
            runner.begin({"input_ids": ids, "attention_mask": given}, other)
    cache = runner.new_cache()
    runner.run((1, 2, 3), begin(runner, ids, mask, 0, cache))
    cache.crop(0)  # not cropped before: everything is there still
    assert cache.lengths == [0, 0, 0]
    assert torch.equal(runner.run((1, 2), begin(runner, ids, mask, 0, cache)), after)


def test_a_model_whose_own_decoding_differs_is_refused_for_that_reason() -> None:
    """Moshi's cache keeps a window of positions, and its attention reads all."""
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for window, refused in ((8, True), (64, False)):
        torch.manual_seed(0)
        model = tf.MoshiForCausalLM(zoo.config_for("moshi", sliding_window=window)).eval()
        with torch.no_grad():
            whole = model(**batch, use_cache=False).logits[:, -1]
            cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
            decoded = model(**batch | {"input_ids": ids[:, -1:]}, past_key_values=cache).logits[:, -1]
        assert torch.allclose(whole, decoded, atol=1e-5) is not refused
        anatomy = verify(anatomy_candidates(model), batch, optional=("branches",)).anatomy
        if refused:
            with pytest.raises(FulldepthError, match=r"its own decoding .* keeps a window of 8 positions"):
                decoding_runner(anatomy, batch)
        else:
            decoding_runner(anatomy, batch)
