"""Arguments of `generate` out of range are refused by name, and those that transformers accepts mean the same."""

import numpy as np
import pytest
import torch
import transformers as tf

from execution import decoders
from fulldepth.core.errors import FulldepthError
from fulldepth.exit import Decoder, generate
from refusals import refused

NEW = 6
PROMPT = decoders.prompts(1)
WRONG = {
    "max_new_tokens": (0, -3, 2.5, "4", float("inf"), float("nan"), [4]),
    "temperature": (0, 0.0, -1.0, float("nan"), "1", [1.0]),
    "top_p": (2.0, -0.1, float("nan"), "0.5", float("inf")),
    "top_k": (-1, 2.5, "5", float("nan")),
    "seed": (2**70, 2**64, -(2**63) - 1, 1.5, "0"),
    "threshold": ("0.5", 0, 1.5, float("nan"), [0.5]),
    "attention_mask": ("1", [[1], [1, 2]]),
}


@pytest.fixture(scope="module")
def decoder():
    return Decoder(decoders.build("llama", late=0.2))


@pytest.fixture(autouse=True)
def configuration(decoder):
    decoder.anatomy.model.generation_config = tf.GenerationConfig(eos_token_id=None, pad_token_id=0, top_k=0)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_out_of_range_is_refused_by_name(decoder, name, value):
    sampling = {"do_sample": True} if name in ("temperature", "top_p", "top_k", "seed") else {}
    with refused(f"^{name} is "):
        generate(decoder, PROMPT["input_ids"], **{"max_new_tokens": NEW, **sampling, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", np.int64(3)),
        ("max_new_tokens", torch.tensor(3)),
        ("temperature", 0.05),
        ("temperature", 1),
        ("temperature", 30.0),
        ("top_p", 0),
        ("top_p", 0.3),
        ("top_p", 1),
        ("top_k", 0),
        ("top_k", 2),
        ("top_k", 10**9),
        ("eos_token_id", []),
        ("eos_token_id", 10**6),
        ("eos_token_id", [3, 5]),
    ],
)
def test_a_value_that_transformers_accepts_means_the_same(decoder, name, value):
    """Oracle: the stock `generate` with the same random numbers."""
    given = {**PROMPT, "max_new_tokens": NEW, "do_sample": True, name: value}
    torch.manual_seed(5)
    expected = decoder.anatomy.model.generate(**given)
    torch.manual_seed(5)
    assert torch.equal(decoder.generate(**given).sequences, expected)


@pytest.mark.parametrize("value", [2, np.float32(2.0), np.float64(2.0), torch.tensor(2.0)])
def test_a_temperature_is_any_number(decoder, value):
    """transformers itself takes Python's floats alone."""
    given = {**PROMPT, "max_new_tokens": NEW, "do_sample": True, "seed": 3}
    expected = decoder.generate(**given, temperature=2.0).sequences
    assert torch.equal(decoder.generate(**given, temperature=value).sequences, expected)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1, np.int64(7)])
def test_every_seed_of_torch_is_a_seed(decoder, seed):
    given = {**PROMPT, "max_new_tokens": NEW, "do_sample": True}
    first = decoder.generate(**given, seed=seed).sequences
    assert torch.equal(decoder.generate(**given, seed=seed).sequences, first)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 2.0),
        ("min_p", -0.5),
        ("typical_p", -1.0),
        ("top_h", 3.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.5),
        ("repetition_penalty", "2"),
        ("no_repeat_ngram_size", 2.5),
        ("bad_words_ids", []),
        ("sequence_bias", {}),
        ("min_new_tokens", 1.5),
        ("forced_eos_token_id", -4),
    ],
)
def test_entries_of_the_generation_configuration_out_of_range_are_refused(decoder, name, value):
    """Those that the stock `generate` refuses with an error of its own."""
    config = decoder.anatomy.model.generation_config
    config.eos_token_id = 5
    setattr(config, name, value)
    given = {**PROMPT, "max_new_tokens": NEW, "do_sample": True}
    with pytest.raises((ValueError, TypeError)) as stock:
        decoder.anatomy.model.generate(**given)
    assert not isinstance(stock.value, FulldepthError)
    with refused("transformers refuses a setting of this generation"):
        decoder.generate(**given)


def test_an_error_inside_the_loop_is_not_blamed_on_settings(decoder):
    def broken(done):
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match=r"^of the caller$"):
        decoder.generate(**PROMPT, max_new_tokens=NEW, progress=broken)
