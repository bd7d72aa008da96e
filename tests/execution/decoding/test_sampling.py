"""Sampled speculation has the distribution of plain sampling; rounds with plans, custom loops, automatic choices."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
import transformers as tf

import tiny_models as tm
from execution import decoders
from fulldepth.errors import FulldepthError
from fulldepth.execution.decoding import Decoder, DraftPlan
from fulldepth.execution.decoding.choosing import Times, candidates, choose, estimates, tokens_per_round
from fulldepth.execution.decoding.control import Control, Trial
from fulldepth.execution.decoding.session import Session
from fulldepth.execution.decoding.speculation import Round
from fulldepth.hf import Scalars

VOCAB = 6


@pytest.fixture(scope="module")
def small():
    """A model of six tokens, whose drafts agree sometimes."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(**{**tm.DECODER, "vocab_size": VOCAB, "pad_token_id": None, "eos_token_id": None})
    model = tf.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    model.generation_config.eos_token_id = None
    return model


def warped(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
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
    """Three tokens after one prompt, 4,000 times: a chi-square test against probabilities computed here."""
    prompt, draws = torch.tensor([[1, 4, 2]]), 4000
    expected: dict[tuple, float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, chance in expected.items():
            ids = torch.cat([prompt, torch.tensor([tokens], dtype=torch.long)], dim=1)
            p = warped(small(ids).logits[0, -1].numpy(), temperature, top_p)
            longer |= {(*tokens, token): chance * p[token] for token in range(VOCAB) if p[token] > 0}
        expected = longer
    decoder, found, accepted = Decoder(small), Counter(), 0
    for seed in range(4):
        given = decoder.generate(
            prompt.expand(draws // 4, -1), max_new_tokens=3, speculate_from=1, draft_length=2, seed=seed,
            do_sample=True, temperature=temperature, top_p=top_p,
        )  # fmt: skip
        found.update(map(tuple, given.sequences[:, 3:].tolist()))
        accepted += given.stats.accepted
    assert set(found) <= set(expected)
    assert accepted > draws / 10
    common = [tokens for tokens, chance in expected.items() if chance * draws >= 5]
    counts = [*(found[tokens] for tokens in common), draws - sum(found[tokens] for tokens in common)]
    chances = [*(expected[tokens] for tokens in common), 1 - sum(expected[tokens] for tokens in common)]
    keep = [index for index, chance in enumerate(chances) if chance * draws > 1]
    observed, wanted = (np.array(values, dtype=float)[keep] for values in (counts, chances))
    assert scipy.stats.chisquare(observed, wanted / wanted.sum() * observed.sum()).pvalue > 1e-3


def test_seeds_repeat_and_plain_sampling_is_that_of_generate(small):
    prompt, decoder = torch.tensor([[1, 4, 2]]), Decoder(small)
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0}
    torch.manual_seed(5)
    expected = small.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    torch.manual_seed(5)
    assert torch.equal(decoder.generate(prompt, **options).sequences, expected)
    runs = [decoder.generate(prompt, speculate_from=1, draft_length=3, seed=7, **options).sequences for _ in range(2)]
    assert torch.equal(*runs)


def test_a_decoder_is_a_loop_for_generate():
    model, prompts = decoders.build("llama", late=0.2), decoders.prompts(2)
    decoder = Decoder(model)
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.3}
    expected = model.generate(**prompts, **options)
    found = model.generate(**prompts, **options, custom_generate=decoder, speculate_from=2, draft_length=3)
    assert torch.equal(found, expected)
    assert decoder.last.stats.drafted > 0
    whole = model.generate(**prompts, **options, custom_generate=decoder, return_dict_in_generate=True)
    assert torch.equal(whole.sequences, expected)
    mask = prompts["attention_mask"]
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(model.generate(**prompts, **options, custom_generate=decoder, position_ids=counted), expected)
    cache = model(input_ids=prompts["input_ids"], use_cache=True).past_key_values
    for given, message in {
        ("position_ids", counted + 7): "leave out position_ids",
        ("past_key_values", cache): "leave out past_key_values",
        ("output_scores", True): "cannot follow output_scores",
        ("assistant_early_exit", 1): "cannot follow assistant_early_exit",
    }.items():
        refused = {"return_dict_in_generate": True, **dict([given])}
        with pytest.raises(FulldepthError, match=message):
            model.generate(**prompts, **options, custom_generate=decoder, **refused)
    with pytest.raises(FulldepthError, match="another model"):
        decoders.build("llama").generate(**prompts, **options, custom_generate=decoder)
    with pytest.raises(FulldepthError, match="cannot follow num_beams"):
        model.generate(**prompts, max_new_tokens=3, num_beams=2, custom_generate=decoder)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("granularity", ["attention", "layer"])
def test_a_model_with_skipped_blocks_drafts(name, granularity):
    """Greedy output stays that of the full model, which is intact afterwards."""
    model = decoders.build(name, late=0.2)
    model.generation_config.eos_token_id = None
    decoder, accepted = Decoder(model), 0
    for rows in (1, 3):
        prompts = decoders.prompts(rows)
        expected = model.generate(**prompts, max_new_tokens=16, do_sample=False)
        for layers in ([2], [3], [2, 3]):
            found = decoder.generate(**prompts, max_new_tokens=16, plan=DraftPlan(layers, granularity), draft_length=3)
            assert torch.equal(found.sequences, expected)
            accepted += found.stats.accepted
        assert torch.equal(model.generate(**prompts, max_new_tokens=16, do_sample=False), expected)
    assert accepted > 0


@pytest.mark.parametrize("granularity", ["attention", "mlp"])
def test_factors_of_the_drafting_model_do_not_reach_the_full_models_states(granularity):
    """All layers have factors far from 1, those before the first skipped block too, whose states are used again."""
    model, prompts = decoders.build("llama", late=0.2), decoders.prompts(3)
    model.generation_config.eos_token_id = None
    scalars = Scalars(3, [3], granularity)
    with torch.no_grad():
        for number, factor in enumerate(scalars.parameters()):
            factor.fill_(0.6 + 0.2 * number)
    expected = model.generate(**prompts, max_new_tokens=16, do_sample=False)
    plan = DraftPlan([3], granularity, scalars)
    found = Decoder(model).generate(**prompts, max_new_tokens=16, plan=plan, draft_length=3)
    assert torch.equal(found.sequences, expected)
    assert found.stats.drafted > 0


@pytest.mark.parametrize(
    "options", [{"speculate_from": "auto"}, {"speculate_from": 2}, {"speculate_from": "auto", "draft_length": 2}]
)
@pytest.mark.parametrize("late", [0.05, 1.0])
def test_automatic_choices_keep_the_output_and_say_why(options, late):
    model = decoders.build("llama", late=late)
    model.generation_config.eos_token_id = None
    for rows in (1, 3):
        prompts = decoders.prompts(rows)
        expected = model.generate(**prompts, max_new_tokens=40, do_sample=False)
        found = Decoder(model).generate(**prompts, max_new_tokens=40, **options)
        assert torch.equal(found.sequences, expected)
        stats = found.stats
        assert stats.chosen_by == "measured"
        assert (stats.mode == "speculative") == (stats.paid is not False)
        assert ("Plain decoding" in stats.reason) == (stats.paid is False)
        assert ("Speculation pays" in stats.reason) == (stats.paid is True)
        assert stats.paid is not True or stats.rounds >= 9
        assert all(0 <= entry["acceptance"] <= 1 for entry in stats.candidates)


def test_the_predicted_speedup_against_its_formula():
    times = Times(plain=10.0, begin=0.5, layer=0.3, head=1.0, growth=0.1)
    (one,) = estimates(times, 30, 10, 0.8, [3])
    tokens = sum(0.8**k for k in range(4))
    seconds = 4 * (0.5 + 10 * 0.3) + 3 * 1.0 + 0.5 + (20 * 0.3 + 1.0) * 1.3
    assert one.tokens_per_round == pytest.approx(tokens)
    assert one.predicted_speedup == pytest.approx(tokens * 10 / seconds)
    assert tokens_per_round(1.0, 3) == 4
    times.fit(30, 10, 3, seconds + 2.1)
    assert times.round(30, 10, 3) == pytest.approx(seconds + 2.1)
    assert candidates(30) == [20, 15, 10, 8, 5]
    assert candidates(2) == [1]


def test_speculation_ends_where_rounds_are_slow_and_goes_on_where_they_are_fast():
    times = Times(plain=1.0, begin=0.01, layer=0.05, head=0.1)
    (promising,) = estimates(times, 16, 4, 0.9, [4])
    slow, fast = (Control(Times(**vars(times)), 16, promising, [2, 4]) for _ in range(2))
    assert slow.pays
    for _ in range(8):
        slow.note(Round(1, 4, 1, 1, 2), 2.2)  # 0.9 times as fast as plain
        fast.note(Round(1, 4, 4, 0, 5), 2.5)
    assert not slow.pays
    assert "Plain decoding after a trial" in slow.reason
    assert fast.pays
    assert "2.00 ± 0.00 times as fast" in fast.reason


def test_a_trial_ends_when_its_loss_exceeds_the_allowance():
    """Rounds of 2.2 plain tokens that add 2 tokens lose 0.2 each."""
    for allowance, rounds in ((0.5, 3), (0.1, 1)):
        trial = Trial(1.0, "some layers", allowance)
        noted = 0
        while trial.pays:
            trial.note(Round(1, 4, 1, 1, 2), 2.2)
            noted += 1
        assert noted == rounds
    kept = Trial(1.0, "some layers", 0.5)
    for _ in range(9):
        kept.note(Round(1, 4, 4, 0, 5), 4.0)
    assert kept.pays


def test_layers_are_read_only_if_they_may_pay_and_the_reading_is_allowed():
    class Reading:
        """A probe on which one reading takes 2 s."""

        times, spent, reading_seconds = Times(plain=1.0, begin=0.01, layer=0.05, head=0.1), 0.5, 2.0
        session = SimpleNamespace(num_layers=16)

        def __init__(self):
            self.read = []

        def acceptance(self, layer):
            self.read.append(layer)
            self.spent += 2.0
            return 0.7

    for allowance, read, why in ((1.0, [], "dear"), (2.5, [10], "measured"), (4.6, [10, 8], "measured")):
        probe = Reading()
        chosen = choose(probe, [4, 8, 10], [2, 4], allowance)
        assert (probe.read, chosen.why) == (read, why)
        assert {entry["layer"] for entry in chosen.measured} == set(read)
    probe = Reading()
    probe.times = Times(plain=0.1, begin=0.01, layer=0.05, head=0.1)
    assert choose(probe, [4, 8, 10], [2, 4]).why == "hopeless"
    assert not probe.read


def test_few_tokens_are_decoded_plainly_by_auto():
    model, prompts = decoders.build("llama", late=0.05), decoders.prompts(1)
    for options in ({"speculate_from": "auto"}, {"speculate_from": 2}, {"plan": DraftPlan([2])}):
        found = Decoder(model).generate(**prompts, max_new_tokens=31, **options)
        assert torch.equal(found.sequences, model.generate(**prompts, max_new_tokens=31, do_sample=False))
        assert found.stats.drafted == 0
        assert found.stats.mode == "plain"
        assert found.stats.layer_calls == [30] * 3
        assert "not repaid" in found.stats.reason


@pytest.mark.parametrize(("late", "pays"), [(0.01, True), (4.0, False)])
def test_a_plans_model_drafts_only_while_that_pays(late, pays, monkeypatch):
    """Time is the number of layers that ran: without two of three layers, drafts that are all accepted pay."""
    monkeypatch.setattr(Session, "clock", lambda session: float(sum(session.stats.layer_calls)))
    model, prompts = decoders.build("llama", late=late), decoders.prompts(1)
    model.generation_config.eos_token_id = None
    found = Decoder(model).generate(**prompts, max_new_tokens=48, plan=DraftPlan([2, 3], "layer"))
    assert torch.equal(found.sequences, model.generate(**prompts, max_new_tokens=48, do_sample=False))
    assert (found.stats.mode == "speculative") == pays
    assert found.stats.paid is pays
    assert found.stats.drafted > 0


@pytest.mark.parametrize(
    ("gain", "spread", "rounds", "measured"), [(1.3, 0.1, 12, True), (1.02, 0.3, 12, False), (1.3, 0.1, 6, False)]
)
def test_speculation_pays_only_beyond_the_error_of_its_rounds(gain, spread, rounds, measured):
    trial = Trial(1.0, "layers 1 to 2")
    for at in range(rounds):  # two tokens of a second each, in rounds of varying time
        trial.note(Round(1, 2, 1, 0, 2), 2 / gain * (1 + spread * (at % 3 - 1)))
    assert trial.pays
    assert trial.measured == measured
    assert trial.reason.startswith("Speculation pays" if measured else "No measurable difference")
