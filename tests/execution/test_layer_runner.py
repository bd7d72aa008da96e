"""Layers run on given states with a cache, against stock transformers: its own forward pass, cache and `generate`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import transformers as tf
from torch import Tensor

import tiny_models as tm
from execution.decoders import DECODERS, FLOAT32, MODELS
from families import zoo
from fulldepth.errors import FulldepthError
from fulldepth.execution import verify
from fulldepth.execution.decoding_proof import decoding_runner
from fulldepth.execution.layer_cache import LayerCache
from fulldepth.execution.layer_runner import LayerRunner, positions
from fulldepth.hf import anatomy_candidates

NEW = 14
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


def greedy(model: tf.PreTrainedModel, tokens: int) -> tuple[Tensor, Tensor]:
    """What `generate` adds to the prompts, [B, tokens], and the logits of each, [B, tokens, V]."""
    model.generation_config.eos_token_id = None
    options = {"return_dict_in_generate": True, "output_logits": True}
    given = model.generate(**prompts(), max_new_tokens=tokens, do_sample=False, **options)
    return given.sequences[:, PROMPT:], torch.stack(given.logits, dim=1)


def drafted(expected: Tensor, at: Sequence[int], drafts: int, rng: random.Random) -> Tensor:
    """[B, drafts] what comes next in each row, with errors."""
    wrong = torch.tensor([[rng.random() < 0.3 for _ in range(drafts)] for _ in at])
    rows = [row[start : start + drafts] for row, start in zip(expected, at, strict=True)]
    return (torch.stack(rows) + wrong) % tm.VOCAB


def speculate(runner: LayerRunner, expected: Tensor, ragged: bool, drafts: int = 3) -> tuple[Tensor, Tensor, set[int]]:
    """Greedy decoding with drafts, layer 1 once for each: tokens, their logits, and how many drafts were accepted."""
    ids, mask = prompts().values()
    layers, rng, accepted = runner.anatomy.num_layers, random.Random(1), set()
    cache, found, scores = runner.new_cache(), [[] for _ in ids], [[] for _ in ids]
    runner.run(range(1, layers + 1), begin(runner, ids[:, :-1], mask[:, :-1], 0, cache))
    while min(map(len, found)) < NEW:
        end, states = ids.shape[1], []
        tokens = torch.cat([ids, drafted(expected, [len(row) for row in found], drafts, rng)], dim=1)
        seen = torch.cat([mask, mask.new_ones(len(mask), drafts)], dim=1)
        for at in range(end - 1, end + drafts):  # the last token known, and every draft
            states.append(runner.run((1,), begin(runner, tokens[:, : at + 1], seen[:, : at + 1], at, cache)))
        begin(runner, tokens, seen, end - 1, cache)
        logits = runner.finish(runner.run(range(2, layers + 1), torch.cat(states, dim=1)))
        choice = logits.argmax(-1)
        agreed = (choice[:, :-1] == tokens[:, end:]).long().cumprod(1).sum(1)
        agreed = agreed if ragged else agreed.min().expand(len(ids))
        accepted |= set(agreed.tolist())
        kept = end + agreed
        cache.crop(kept.tolist() if ragged else int(kept[0]))
        width = int(kept.max())
        ids, mask = torch.zeros(len(ids), width + 1, dtype=torch.long), torch.zeros(len(ids), width + 1).long()
        for row, (length, count) in enumerate(zip(kept.tolist(), agreed.tolist(), strict=True)):
            ids[row, width - length : width], ids[row, width] = tokens[row, :length], choice[row, count]
            mask[row, width - length : width], mask[row, width] = seen[row, :length], 1
            found[row] += choice[row, : count + 1]
            scores[row] += logits[row, : count + 1]
    tokens, logits = (torch.stack([torch.stack(row[:NEW]) for row in rows]) for rows in (found, scores))
    return tokens, logits, accepted


@torch.no_grad()
@pytest.mark.usefixtures("more_models")
@pytest.mark.parametrize("name", DECODERS)
def test_drafts_run_through_the_first_layers_once_give_what_generate_gives(name):
    model = tm.build(name, dtype=torch.float32 if name in FLOAT32 else torch.float64)
    runner, (expected, logits) = runner_of(model), greedy(model, 2 * NEW)
    for ragged in (False, True):
        found, scores, accepted = speculate(runner, expected, ragged)
        assert torch.equal(found, expected[:, :NEW])
        tolerance = 1e-3 if name in FLOAT32 else 1e-6
        torch.testing.assert_close(scores, logits[:, :NEW].to(scores), rtol=tolerance, atol=tolerance)
        assert len(accepted) > 1  # some drafts stand, some are taken back


@torch.no_grad()
@pytest.mark.usefixtures("more_models")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mistral-window"])
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


def test_a_model_that_fails_on_left_padding_is_refused():
    with pytest.raises(FulldepthError, match="not finite for a sequence that is padded on the left"):
        runner_of(tm.build("gemma2", dtype=torch.float64))


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
