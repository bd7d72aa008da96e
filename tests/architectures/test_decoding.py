"""Decoding with a cache gives what the full forward pass gives, for every combination of switches."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import StaticCache

from architectures import oracle
from architectures.combinations import EVERY, KINDS, SIZE, build, frequencies, padded, parameters, tokens
from fulldepth.hf.caches import CACHE

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@torch.no_grad()
def alone(model, ids, mask):
    """[B, T, V] logits of every sequence by itself, without padding or cache; zero at padding."""
    logits = torch.zeros(*ids.shape, SIZE["vocab_size"], dtype=torch.float64)
    for row, (sequence, real) in enumerate(zip(ids, mask.bool(), strict=True)):
        logits[row, real] = model(input_ids=sequence[real][None], use_cache=False).logits[0]
    return logits


@torch.no_grad()
def in_pieces(model, ids, mask, positions, pieces, cache=None):
    """[B, T, V] logits of a batch fed piece by piece (numbers of tokens) through one cache, and the cache."""
    logits, start = [], 0
    for length in pieces:
        stop = start + length
        output = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            **{CACHE: cache},
            use_cache=True,
        )
        cache, start = output[CACHE], stop
        logits.append(output.logits)
    assert start == ids.shape[1]
    return torch.cat(logits, dim=1), cache


@EVERY
def test_a_padded_batch_with_a_cache_equals_each_sequence_alone(name):
    model, (ids, mask, positions) = build(name), padded((9, 4, 6)).values()
    real, expected = mask.bool(), alone(model, ids, mask)
    static = StaticCache(config=model.config, max_cache_len=12)
    for pieces, cache in (((1,) * 9, None), ((3, 4, 1, 1), None), ((6, 1, 1, 1), static)):
        logits, _ = in_pieces(model, ids, mask, positions, pieces, cache)
        assert logits.isfinite().all()
        assert_close(logits[real], expected[real], **CLOSE)


@KINDS
def test_positions_and_mask_may_be_left_to_the_model(name):
    model, ids = build(name), tokens(2, 8)
    with torch.no_grad():
        expected, cache, logits = model(ids, use_cache=False).logits, None, []
        for piece in ids.split([3, 3, 1, 1], dim=1):
            output = model(piece, **{CACHE: cache}, use_cache=True)
            cache = output[CACHE]
            logits.append(output.logits)
        assert_close(torch.cat(logits, dim=1), expected, **CLOSE)
        assert_close(model(ids, logits_to_keep=2).logits, expected[:, -2:], **CLOSE)
        embeds = model.get_input_embeddings()(ids)
        assert_close(model(inputs_embeds=embeds).logits, expected, **CLOSE)


@EVERY
def test_the_cache_holds_only_the_routed_keys_and_values(name):
    """As large as Llama's: [B, H_kv, T, d] twice per layer."""
    model, ids = build(name), tokens()
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True)[CACHE]
        cache = model(ids[:, 5:], **{CACHE: cache}, use_cache=True)[CACHE]
        trace = oracle.run(parameters(model), model.config, ids, frequencies=frequencies(model))
    assert len(cache.layers) == model.config.num_hidden_layers
    for layer, keys, values in zip(cache.layers, trace.keys, trace.values, strict=True):
        assert_close(layer.keys, keys.transpose(1, 2), **CLOSE)
        assert_close(layer.values, values.transpose(1, 2), **CLOSE)


@torch.no_grad()
def greedy(model, sequence, steps):
    """Argmax of a full forward pass, `steps` times."""
    for _ in range(steps):
        sequence = torch.cat([sequence, model(sequence[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return sequence


@EVERY
def test_greedy_generation_of_a_padded_batch_is_repeated_argmax(name):
    model, (ids, mask, _) = build(name), padded((7, 3, 5), seed=1).values()
    found = model.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY)
    for row, (sequence, real) in enumerate(zip(ids, mask.bool(), strict=True)):
        expected = greedy(model, sequence[real], 6)
        assert found[row, -len(expected) :].tolist() == expected.tolist()


def test_transformers_own_drafts_of_first_layers_are_refused():
    """They set the configuration to fewer layers, which this model would not follow."""
    with pytest.raises(ValueError, match="assistant_early_exit"):
        build("tree-kv").generate(tokens(1, 6), max_new_tokens=8, assistant_early_exit=2, **GREEDY)


@KINDS
def test_beams_are_the_same_with_and_without_a_cache(name):
    """Beams reorder the cache at every step."""
    model, (ids, mask, _) = build(name), padded((6, 4), seed=2).values()
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, "return_dict_in_generate": True}
    options |= {"output_scores": True, **GREEDY}
    cached, full = (model.generate(ids, attention_mask=mask, use_cache=use, **options) for use in (True, False))
    assert cached.sequences.tolist() == full.sequences.tolist()
    assert_close(cached.sequences_scores, full.sequences_scores, rtol=1e-6, atol=1e-6)


@KINDS
def test_a_cache_that_is_cropped_forgets(name):
    """As speculative decoding does with rejected tokens."""
    model, ids = build(name), tokens(2, 8)
    with torch.no_grad():
        cache = model(ids, use_cache=True)[CACHE]
        cache.crop(-5)
        logits = model(ids[:, 3:].flip(1), **{CACHE: cache}, use_cache=True).logits
        whole = torch.cat([ids[:, :3], ids[:, 3:].flip(1)], dim=1)
        assert_close(logits, model(whole, use_cache=False).logits[:, 3:], **CLOSE)
