"""Decoding with drafts of the first layers, against transformers' own `generate`."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import transformers as tf

import tiny_models as tm
from execution import decoders
from fulldepth.execution.decoding.session import DecodingSession
from fulldepth.exit import Decoder, generate
from fulldepth.hf.caches import CACHE
from marks import thorough
from refusals import refused

NEW, VOCAB = 20, 6
EVERY_PUSH = (
    "llama",
    "llama-fast",
    "gemma2",
    "gemma3",
    "gpt2",
    "falcon",
    "depth_llama-hyper",
    "mistral-window",
    "mixtral",
    "bloom",
)
"""One decoder of each design: norms, soft caps, windows, positions, parallel branches, streams, experts, biases."""
FAMILIES = [name if name in EVERY_PUSH else thorough(name) for name in decoders.DECODERS]
LATE = {"falcon": 1.0, "bloom": 10.0, "gpt2": 0.6}
"""Factor of the later layers at which some drafts agree with them, where it is not 0.2."""


llama = functools.cache(lambda: decoders.build("llama"))


def stock(model, prompts, **options):
    return model.generate(**prompts, **{"max_new_tokens": NEW, "do_sample": False, **options})


def alone(prompts):
    """Each prompt as a batch of its own, with its padding."""
    return [{name: value[row : row + 1] for name, value in prompts.items()} for row in range(len(prompts["input_ids"]))]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_output_is_that_of_generate_for_every_family(name):
    """Drafts of one and two layers for three prompts, two of them padded on the left; plain steps of their batch."""
    model = decoders.build(name, late=LATE.get(name, 0.2))
    prompts, decoder, drafted, accepted = decoders.prompts(3), Decoder(model), 0, 0
    for prompt in alone(prompts):
        expected = stock(model, prompt)
        for early, length in ((1, 3), (2, 5)):
            found = decoder.generate(**prompt, max_new_tokens=NEW, speculate_from=early, draft_length=length)
            assert torch.equal(found.sequences, expected)
            stats = found.stats
            assert stats.tokens == NEW
            assert stats.added == NEW - 1
            assert stats.accepted <= stats.added <= stats.accepted + stats.rounds
            drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
            assert len(set(stats.layer_positions)) == 1  # drafts run through the early layers once
            assert stats.layer_positions[0] == stats.drafted + stats.rounds
    plain = decoder.generate(**prompts, max_new_tokens=NEW)
    assert torch.equal(plain.sequences, stock(model, prompts))
    assert plain.stats.layer_positions == [3 * (NEW - 1)] * model.config.num_hidden_layers
    assert 0 < accepted < drafted


def test_nothing_is_drafted_beyond_the_last_of_learned_positions():
    model = decoders.build("gpt2", late=0.5)
    prompts, new = decoders.prompts(1), model.config.max_position_embeddings - 9
    found = Decoder(model).generate(**prompts, max_new_tokens=new, speculate_from=1, draft_length=7)
    assert torch.equal(found.sequences, stock(model, prompts, max_new_tokens=new))
    assert found.stats.accepted > 0


def test_end_tokens_and_the_last_token_inside_and_after_drafts():
    """Every token of the plain continuation in turn is the end token; lists of two; a maximum inside a draft."""
    model = decoders.build("llama", late=0.2)
    prompts, decoder = decoders.prompts(3), Decoder(model)
    plain = stock(model, prompts)[:, 9:]
    ends = sorted({int(token) for token in plain[0]})
    wanted = [
        {"eos_token_id": end, "pad_token_id": 0} for end in [*ends, ends[:2], [int(plain[1, 3]), int(plain[2, 7])]]
    ]
    for options in [*wanted, *({"max_new_tokens": new} for new in (1, 2, 3))]:
        given = {"max_new_tokens": NEW} | options
        assert torch.equal(decoder.generate(**prompts, **given).sequences, stock(model, prompts, **options))
        for prompt, (early, length) in zip(alone(prompts), ((1, 4), (2, 7), (2, 4)), strict=True):
            found = decoder.generate(**prompt, **given, speculate_from=early, draft_length=length)
            assert torch.equal(found.sequences, stock(model, prompt, **options))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8},
        {"suppress_tokens": [5, 6, 7, 20, 21, 22]},
        {"min_new_tokens": 12, "eos_token_id": [*range(3, 50)]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_generation_configuration_applies_to_drafts_too(settings):
    model = decoders.build("llama", late=0.2)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    prompts, decoder = decoders.prompts(3), Decoder(model)
    assert torch.equal(decoder.generate(**prompts, max_new_tokens=NEW).sequences, stock(model, prompts))
    for prompt in alone(prompts):
        found = decoder.generate(**prompt, max_new_tokens=NEW, speculate_from=2, draft_length=4)
        assert torch.equal(found.sequences, stock(model, prompt))
        assert found.stats.drafted > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"min_layer": 2}, "min_layer"),
        ({"draft_length": 3, "threshold": 0.5}, "draft_length"),
        ({"threshold": 0.5, "speculate_from": 1}, "threshold"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long), "speculate_from": 1}, "one sequence, not 2"),
        ({"temperature": 0.5}, "do_sample"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"speculate_from": 3}, "speculate_from is 3"),
        ({"speculate_from": 1, "draft_length": 0}, "draft_length is 0"),
        ({"threshold": 0.5, "rule": "confidenc"}, "Did you mean 'confidence'"),
        ({"max_new_tokens": 99}, "99 new ones"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "input_ids"),
        ({"input_ids": "some text"}, "tokenizer"),
        ({"input_ids": torch.tensor([[3, -1]])}, "from -1 to 3"),
        ({"input_ids": torch.tensor([[3, tm.VOCAB]])}, f"expected 0 to {tm.VOCAB - 1}"),
        ({"attention_mask": torch.tensor([[1] * 8 + [0]])}, "attention_mask"),
        ({"attention_mask": torch.ones(1, 1)}, r"attention_mask has shape \(1, 1\)"),
        ({"attention_mask": torch.ones(2, 9)}, r"attention_mask has shape \(2, 9\)"),
        ({"speculate_from": True}, "speculate_from is True"),
        ({"num_beams": 2}, "Unknown option 'num_beams'"),
        ({"treshold": 0.5}, "Did you mean 'threshold'"),
    ],
)
def test_options_out_of_range_and_without_effect_are_refused(options, name):
    given = {"input_ids": decoders.prompts(1)["input_ids"], "max_new_tokens": 2, **options}
    with refused(name):
        generate(llama(), **given)


@pytest.mark.parametrize("options", [{}, {"speculate_from": 1, "draft_length": 3}, {"threshold": 1.0}])
def test_a_model_made_in_inference_mode_writes_there_what_generate_writes(options):
    with torch.inference_mode():
        model = decoders.build("llama", late=0.2)
        prompts = decoders.prompts(1)
        found = Decoder(model).generate(**prompts, max_new_tokens=12, **options)
    assert torch.equal(found.sequences, model.generate(**prompts, max_new_tokens=12, do_sample=False))


def test_a_decoder_is_a_loop_for_generate():
    model, prompts = decoders.build("llama", late=0.2), alone(decoders.prompts(2))[1]
    decoder = Decoder(model)
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.3}
    expected = model.generate(**prompts, **options)
    found = model.generate(**prompts, **options, custom_generate=decoder, speculate_from=2, draft_length=3)
    assert torch.equal(found, expected)
    assert decoder.last.stats.drafted > 0
    mask = prompts["attention_mask"]
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(model.generate(**prompts, **options, custom_generate=decoder, position_ids=counted), expected)
    cache = model(input_ids=prompts["input_ids"], use_cache=True)[CACHE]
    for name, value in {
        "position_ids": counted + 7,
        CACHE: cache,
        "output_scores": True,
        "num_beams": 2,
    }.items():
        wrong = {**options, "return_dict_in_generate": True, name: value}
        with refused("cache of its own" if name == CACHE else name):
            model.generate(**prompts, **wrong, custom_generate=decoder)
    with refused("keeps a cache of its own"):  # the caller's would stay empty
        empty = tf.DynamicCache(config=model.config)
        model.generate(**prompts, **options, **{CACHE: empty}, custom_generate=decoder)
    with refused("another model"):
        decoders.build("llama").generate(**prompts, **options, custom_generate=decoder)
    for other in ("bert", "mamba"):
        with refused(type(tm.build(other)).__name__):
            generate(tm.build(other), prompts["input_ids"], max_new_tokens=3)


@pytest.mark.parametrize("options", [{"speculate_from": "auto"}, {"speculate_from": 1}])
@pytest.mark.parametrize(("late", "pays"), [(0.01, True), (4.0, False)])
def test_a_trial_keeps_drafting_only_where_that_is_faster(options, late, pays, monkeypatch):
    """Time is the number of layers that ran: three for a plain token, seven for a round of 4 drafts of one layer.

    A slow trial loses 5 % of the time of 48 tokens, and a round beyond that.
    """
    monkeypatch.setattr(DecodingSession, "clock", lambda session: float(sum(session.stats.layer_calls)))
    model, prompts = decoders.build("llama", late=late), decoders.prompts(1)
    found = Decoder(model).generate(**prompts, max_new_tokens=48, **options)
    stats = found.stats
    assert torch.equal(found.sequences, model.generate(**prompts, max_new_tokens=48, do_sample=False))
    assert (stats.mode == "speculative") == pays
    assert stats.paid is pays
    assert (stats.speculate_from, stats.draft_length) == (1, 4)
    lost = 7 * stats.rounds - 3 * stats.added
    assert stats.trial_seconds == (0 if pays else lost)
    assert lost <= 0.05 * 3 * 48 + 7
    assert (stats.rounds > 6) == pays
    few = Decoder(model).generate(**prompts, max_new_tokens=31, **options).stats  # too few for a trial
    assert (few.mode, few.paid, few.drafted, few.layer_calls) == ("plain", None, 0, [30] * 3)


@pytest.fixture(scope="module")
def small():
    """A model of six tokens, whose drafts agree sometimes."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(**{**tm.DECODER, "vocab_size": VOCAB, "pad_token_id": None, "eos_token_id": None})
    model = tf.LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6.0)
    model.generation_config.eos_token_id = None
    return model


def warped(logits, temperature, top_p):
    """Probabilities with temperature and nucleus, in plain float64."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


@torch.no_grad()
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_sampled_tokens_have_the_models_distribution(small, temperature, top_p):
    """Given all tokens before it, the place of every token in the cumulative distribution is uniform."""
    prompt, decoder, places, accepted = torch.tensor([[1, 4, 2]]), Decoder(small), [], 0
    random = np.random.default_rng(0)
    for seed in range(25):
        given = decoder.generate(
            prompt, max_new_tokens=60, speculate_from=1, draft_length=2, seed=seed,
            do_sample=True, temperature=temperature, top_p=top_p,
        )  # fmt: skip
        accepted += given.stats.accepted
        for token, logits in zip(given.sequences[0, 3:], small(given.sequences).logits[0, 2:-1].numpy(), strict=True):
            p = warped(logits, temperature, top_p)
            p /= p.sum()
            assert p[token] > 0
            places.append(p[:token].sum() + random.random() * p[token])
    assert accepted > len(places) / 10
    assert scipy.stats.kstest(places, "uniform").pvalue > 1e-3


def test_confirmed_and_replaced_drafts_have_the_models_distribution():
    """A draft from another distribution, 8,000 times: a chi-square test."""
    torch.manual_seed(0)
    model, other = 1.5 * torch.randn(2, VOCAB), 1.5 * torch.randn(1, VOCAB)
    session = SimpleNamespace(_samples=True, _generator=None, scores=lambda rows, at: rows)
    session._draw = lambda p: torch.multinomial(p, 1).squeeze(1)
    drafts = torch.multinomial(other[0].softmax(-1), 8000, replacement=True).tolist()
    first = [DecodingSession.accept(session, model, [draft], [other])[0] for draft in drafts]
    wanted = len(first) * model[0].double().softmax(-1).numpy()
    assert scipy.stats.chisquare(np.bincount(first, minlength=VOCAB), wanted / wanted.sum() * len(first)).pvalue > 1e-3


def test_seeds_repeat_and_plain_sampling_is_that_of_generate(small):
    prompt, decoder = torch.tensor([[1, 4, 2]]), Decoder(small)
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0}
    torch.manual_seed(5)
    expected = small.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(decoder.generate(prompt, seed=5, **options).sequences, expected)
    runs = [decoder.generate(prompt, speculate_from=1, draft_length=3, seed=7, **options).sequences for _ in range(2)]
    assert torch.equal(*runs)
