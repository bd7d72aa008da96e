"""Every entry of a generation configuration, against transformers' own `generate`."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from execution import decoders
from families import zoo
from fulldepth.exit import Decoder
from refusals import refused
from tiny_models import strengthened, token_ids

NEW = 20
CALL, REFUSED, NOTHING = "an argument of the call", "refused", "no effect on the text of a decoder"
ENTRIES = {
    **{name: (value, NOTHING) for name, value in {
        "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 1.0, "num_beam_groups": 1,
        "use_cache": False, "cache_implementation": "static", "cache_config": {}, "max_cache_len": 50,
        "output_attentions": True, "output_hidden_states": True, "output_scores": True, "output_logits": True,
        "return_dict_in_generate": True, "bos_token_id": 7, "pad_token_id": 9, "decoder_start_token_id": 7,
        "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.5,
        "max_matching_ngram_size": 3, "assistant_lookbehind": 3, "target_lookbehind": 3,
        "assistant_ensemble_weight": 0.5, "speculation_type": "dflash", "compile_config": None,
        "disable_compile": True, "continuous_batching_config": None, "low_memory": True, "prefill_chunk_size": 4,
        "remove_invalid_values": True, "renormalize_logits": True,
    }.items()},
    **{name: (value, CALL) for name, value in {
        "max_length": 11, "max_new_tokens": 2, "do_sample": True, "temperature": 3.0, "top_k": 2, "top_p": 0.1,
    }.items()},
    **{name: (value, REFUSED) for name, value in {
        "num_beams": 4, "guidance_scale": 1.5, "watermarking_config": {"bias": 2.5}, "num_return_sequences": 2,
        "token_healing": True, "prompt_lookup_num_tokens": 3, "assistant_early_exit": 2, "penalty_alpha": 0.6,
        "dola_layers": "high", "use_mtp": True, "is_assistant": True, "constraints": [1],
        "force_words_ids": [[5]], "stop_strings": ["a"],
    }.items()},
    "min_length": 18, "min_new_tokens": 9, "repetition_penalty": 1.8, "encoder_repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 1, "suppress_tokens": None,
    "forced_eos_token_id": 7, "exponential_decay_length_penalty": (2, 9.0), "eos_token_id": [*range(3, 50)],
    "max_time": 1e-9,
    # set in the test from the text that is not theirs
    "bad_words_ids": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "forced_bos_token_id": None,
    # of samples, which these values leave one token
    "min_p": 1.0, "top_h": 1e-6, "typical_p": 1e-6, "epsilon_cutoff": 0.999, "eta_cutoff": 0.999,
}  # fmt: skip
"""Entry of a generation configuration -> value, and what becomes of it; a value alone is followed."""
SAMPLERS = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def test_every_entry_of_a_generation_configuration_is_listed():
    """A new version of transformers may add some: each is to be followed, or refused by name."""
    known = {
        name for name in tf.GenerationConfig().to_dict() if name not in ("_from_model_config", "transformers_version")
    }
    assert known <= ENTRIES.keys()


@pytest.fixture(scope="module")
def decoder():
    return Decoder(decoders.build("llama", late=0.2))


@pytest.mark.parametrize("name", [name for name in ENTRIES if hasattr(tf.GenerationConfig(), name)])
def test_entries_of_a_generation_configuration_are_followed_or_refused_by_name(decoder, name):
    """Oracle: the stock `generate`, and what it gives without the entry."""
    model, prompt = decoder.anatomy.model, decoders.prompts(1)
    model.generation_config = tf.GenerationConfig(eos_token_id=None)
    plain = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    first, second = plain[0, 9:11].tolist()
    own = {
        "bad_words_ids": [[first]],
        "begin_suppress_tokens": [first],
        "sequence_bias": [[[first], -50.0]],
        "suppress_tokens": [first],
        "forced_bos_token_id": 7,
    }
    entry = own.get(name, ENTRIES[name])
    value, becomes = entry if isinstance(entry, tuple) and isinstance(entry[1], str) else (entry, "followed")
    ends = {"eos_token_id": [second, first]} if name in ("min_length", "min_new_tokens") else {}
    if name == "exponential_decay_length_penalty":
        ends = {"eos_token_id": 60}
    config = tf.GenerationConfig(**{**model.generation_config.to_dict(), **ends})
    setattr(config, name, value)
    model.generation_config = config
    drafts = {"speculate_from": 2, "draft_length": 4}
    given = {**prompt, "max_new_tokens": NEW} | ({"do_sample": True} if name in SAMPLERS else {})
    if becomes == REFUSED:
        for options in ({}, drafts):
            with refused(f"cannot follow {name} of the generation settings"):
                decoder.generate(**given, **options)
        return
    model.generation_config = tf.GenerationConfig(eos_token_id=None) if becomes == CALL else config
    torch.manual_seed(0)
    expected = model.generate(
        **prompt,
        **{"max_new_tokens": NEW, "do_sample": name in SAMPLERS, "top_k": 0, "top_p": 1.0},
        return_dict_in_generate=False,
    )
    model.generation_config = config
    for options in ({}, drafts)[
        : 1 if name == "eta_cutoff" else 2
    ]:  # it leaves several tokens; plain draws are the same
        torch.manual_seed(0)
        assert torch.equal(decoder.generate(**given, **options).sequences, expected), options
    if name in SAMPLERS:
        config.__dict__[name] = None
        assert not torch.equal(decoder.generate(**given, seed=0).sequences, expected)
    elif becomes == "followed" and name != "forced_bos_token_id":  # which is of a prompt of one token
        assert not torch.equal(expected, plain)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3"])
def test_a_model_of_pictures_and_text_continues_text(name):
    """transformers prepares an empty mapping of encoded pictures for such models."""
    torch.manual_seed(0)
    config = zoo.config_for(name)
    model = strengthened(tf.AutoModelForImageTextToText.from_config(config), 4.0).eval()
    prompt = token_ids(1, 6, seed=2)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **options)
    found = model.generate(prompt, custom_generate=Decoder(model), speculate_from=1, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"speculate_from": 1, "draft_length": 6}])
def test_a_text_that_grows_over_the_length_of_another_rotation_is_refused(options):
    """Phi-3 reads the text again there; the cache of a text that begins on one side and stays there is right."""
    torch.manual_seed(0)
    scales = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **scales}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3}
    model = zoo.build("phi3", "causal-lm", **sizes, rope_parameters=rope, original_max_position_embeddings=32)
    model.generation_config.eos_token_id = None
    decoder = Decoder(model)
    for length, new_tokens in ((21, 11), (33, 20)):
        ids = token_ids(1, length)
        stock = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        assert torch.equal(decoder.generate(ids, max_new_tokens=new_tokens, **options).sequences, stock)
    for length, words in ((21, "ask for at most 11 new tokens"), (32, "none can follow; give another prompt")):
        with refused(f"From 33 tokens on .* After a prompt of {length} tokens {words}"):
            decoder.generate(token_ids(1, length), max_new_tokens=12, **options)
