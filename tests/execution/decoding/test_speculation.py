"""Decoding with drafts of the first layers, against transformers' own `generate`."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
import transformers as tf

import tiny_models as tm
from execution import decoders
from fulldepth.errors import FulldepthError
from fulldepth.execution.decoding import Decoder, DraftPlan, generate
from fulldepth.execution.decoding import decoder as decoder_module

NEW = 20
LATE = {"falcon": 1.0, "bloom": 10.0, "gpt2": 0.6}
"""Factor of the later layers at which some drafts agree with them, where it is not 0.2."""


@pytest.fixture(autouse=True)
def more_models(monkeypatch):
    for name, build in decoders.MODELS.items():
        monkeypatch.setitem(tm.UNLISTED, name, build)


llama = functools.cache(lambda: decoders.build("llama"))


def stock(model: tf.PreTrainedModel, prompts: dict, **options) -> torch.Tensor:
    return model.generate(**prompts, **{"max_new_tokens": NEW, "do_sample": False, **options})


@pytest.mark.parametrize("name", decoders.DECODERS)
def test_greedy_output_is_that_of_generate_for_every_family(name):
    """One prompt, and three padded on the left whose drafts are accepted differently; drafts of one and two layers."""
    model = decoders.build(name, late=LATE.get(name, 0.2))
    model.generation_config.eos_token_id = None
    decoder, drafted, accepted = Decoder(model), 0, 0
    for rows in (1, 3):
        prompts = decoders.prompts(rows)
        expected = stock(model, prompts)
        for early, length in ((1, 3), (2, 5)):
            found = decoder.generate(**prompts, max_new_tokens=NEW, speculate_from=early, draft_length=length)
            assert torch.equal(found.sequences, expected)
            stats = found.stats
            assert stats.tokens == rows * NEW
            assert stats.added == rows * (NEW - 1)
            assert stats.accepted <= stats.added <= stats.accepted + stats.sequence_rounds
            drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
            assert len(set(stats.layer_positions)) == 1  # drafts run through the early layers once
            assert stats.layer_positions[0] == stats.drafted + stats.sequence_rounds
        plain = decoder.generate(**prompts, max_new_tokens=NEW)
        assert torch.equal(plain.sequences, expected)
        assert plain.stats.layer_positions == [rows * (NEW - 1)] * model.config.num_hidden_layers
    assert 0 < accepted < drafted


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_a_batch_is_drafted_up_to_the_last_of_learned_positions(name):
    """Sequences whose drafts are accepted differently; the longest must not be drafted beyond the table."""
    model = decoders.build(name, late=0.5)
    model.generation_config.eos_token_id = None
    prompts, new = decoders.prompts(3, padded=0), model.config.max_position_embeddings - 9
    found = Decoder(model).generate(**prompts, max_new_tokens=new, speculate_from=1, draft_length=7)
    assert torch.equal(found.sequences, stock(model, prompts, max_new_tokens=new))
    assert found.stats.accepted > 0


def test_drafts_end_where_the_model_is_unsure():
    model = decoders.build("llama", late=0.2)
    model.generation_config.eos_token_id = None
    prompts, decoder = decoders.prompts(1), Decoder(model)
    expected = stock(model, prompts)
    counts = {}
    for threshold in (0.001, 0.03, 1.0):
        found = decoder.generate(
            **prompts, max_new_tokens=NEW, speculate_from=2, draft_length=4, draft_threshold=threshold
        )
        assert torch.equal(found.sequences, expected)
        counts[threshold] = found.stats.drafted
    assert counts[0.001] > counts[0.03] > counts[1.0] == 0


def test_end_tokens_inside_and_after_drafts():
    """Every token of the plain continuation in turn is the end token; lists of two; with a padding token."""
    model = decoders.build("llama", late=0.2)
    model.generation_config.eos_token_id = None
    prompts, decoder = decoders.prompts(3), Decoder(model)
    plain = stock(model, prompts)[:, 9:]
    ends = sorted({int(token) for token in plain[0]})
    for end in [*ends, ends[:2], [int(plain[1, 3]), int(plain[2, 7])]]:
        options = {"eos_token_id": end, "pad_token_id": 0}
        expected = stock(model, prompts, **options)
        for early, length in ((1, 4), (2, 7)):
            found = decoder.generate(
                **prompts, max_new_tokens=NEW, speculate_from=early, draft_length=length, **options
            )
            assert torch.equal(found.sequences, expected)
    for new in (1, 2, 3):  # the maximum is reached inside a draft
        expected = stock(model, prompts, max_new_tokens=new)
        found = decoder.generate(**prompts, max_new_tokens=new, speculate_from=2, draft_length=7)
        assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [5, 6, 7, 20, 21, 22]},
        {"begin_suppress_tokens": [*range(3, 40)]},
        {"min_new_tokens": 12, "eos_token_id": [*range(3, 50)]},
        {"forced_eos_token_id": 2, "eos_token_id": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_generation_configuration_applies_to_drafts_too(settings):
    model = decoders.build("llama", late=0.2)
    model.generation_config.eos_token_id = None
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    prompts, decoder = decoders.prompts(3), Decoder(model)
    found = decoder.generate(**prompts, max_new_tokens=NEW, speculate_from=2, draft_length=4)
    assert torch.equal(found.sequences, stock(model, prompts))
    assert found.stats.drafted > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"min_layer": 2}, "min_layer"),
        ({"rule": "margin"}, "rule"),
        ({"rule": "margin", "exit_layer": 1}, "rule"),
        ({"policy": "propagate", "speculate_from": 1}, "policy"),
        ({"draft_length": 3}, "draft_length"),
        ({"draft_length": 3, "threshold": 0.5}, "draft_length"),
        ({"draft_threshold": 0.5}, "draft_threshold"),
        ({"threshold": 0.5, "speculate_from": 1}, "draft_threshold"),
        ({"threshold": 0.5, "plan": DraftPlan([2])}, "draft_threshold"),
        ({"temperature": 0.5}, "do_sample"),
        ({"top_p": 0.5}, "do_sample"),
    ],
)
def test_options_without_effect_are_refused(options, name):
    with pytest.raises(FulldepthError, match=name):
        generate(llama(), decoders.prompts(1)["input_ids"], max_new_tokens=2, **options)


def test_a_model_is_verified_once_and_again_where_it_was_changed(monkeypatch):
    verified = []
    runner = decoder_module.decoding_runner
    monkeypatch.setattr(decoder_module, "decoding_runner", lambda *each: verified.append(1) or runner(*each))
    model, prompts = decoders.build("llama"), decoders.prompts(1)
    for _ in range(2):
        assert torch.equal(generate(model, **prompts, max_new_tokens=3).sequences, stock(model, prompts)[:, :12])
    assert len(verified) == 1
    for changed in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        changed.model.layers[1].mlp = copy.deepcopy(model.model.layers[2].mlp)
        found = generate(changed, **prompts, max_new_tokens=3).sequences
        assert torch.equal(found, stock(changed, prompts)[:, :12])
    assert len(verified) == 3
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[2].mlp)
    assert torch.equal(generate(model, **prompts, max_new_tokens=3).sequences, stock(model, prompts)[:, :12])
    model.lm_head.register_forward_hook(lambda *_: None)
    generate(model, **prompts, max_new_tokens=3)
    assert len(verified) == 5
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_what_the_loop_cannot_follow_is_refused():
    model, prompts = decoders.build("llama"), decoders.prompts(1)
    decoder = Decoder(model)
    for options, message in {
        ("max_new_tokens", 0): "max_new_tokens is 0",
        ("threshold", 0.0): "expected a number in",
        ("threshold", 1.5): "expected a number in",
        ("speculate_from", 3): "expected a layer from 1 to 2 or auto",
        ("exit_layer", 0): "expected a layer from 1 to 2",
        ("draft_length", 0): "expected 1 to",
        ("rule", "confidenc"): "Did you mean 'confidence'",
        ("policy", "x"): "Unknown policy",
        ("max_new_tokens", 99): "positions; generate 55 new tokens or fewer",
    }.items():
        with pytest.raises(FulldepthError, match=message):
            decoder.generate(**prompts, **{"max_new_tokens": 3, **dict([options])})
    with pytest.raises(FulldepthError, match="has 80 tokens, the model 64 positions"):
        decoder.generate(torch.ones(1, 80, dtype=torch.long), max_new_tokens=3)
    with pytest.raises(FulldepthError, match="padded on the left"):
        decoder.generate(
            prompts["input_ids"],
            prompts["attention_mask"].clone().index_fill_(1, torch.tensor([8]), 0),
            max_new_tokens=3,
        )
    for text in ("some text", ["some text"], torch.ones(1, 4)):
        with pytest.raises(FulldepthError, match="expected token ids"):
            decoder.generate(text, max_new_tokens=3)
    with pytest.raises(FulldepthError, match="not empty"):
        decoder.generate(torch.ones(1, 0, dtype=torch.long), max_new_tokens=3)
    model.generation_config.guidance_scale = 2.0
    with pytest.raises(FulldepthError, match="cannot follow guidance_scale"):
        decoder.generate(**prompts, max_new_tokens=3)
    with pytest.raises(FulldepthError, match="no causal language model"):
        generate(tm.build("bert"), prompts["input_ids"], max_new_tokens=3)
    with pytest.raises(FulldepthError, match="cannot be decoded layer by layer"):
        generate(tm.build("mamba"), prompts["input_ids"], max_new_tokens=3)
