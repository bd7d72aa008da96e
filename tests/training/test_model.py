"""The model of a run: options, sizes and tokens that fit, and weights that are exactly those asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families import zoo
from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from fulldepth.data import train_tokenizer
from fulldepth.settings import layer
from fulldepth.settings.train import TrainSettings
from fulldepth.training.model import build_config, build_model, reads_later_tokens, special_tokens
from refusals import refused, refuses
from tiny_models import same_weights, shaken, token_ids

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
VOCAB, TIME = 96, 24


def asked(over=None, **model):
    return layer(TrainSettings, {"model": model, "sequence_length": TIME, **(over or {})})


def made(settings, vocab_size=VOCAB, **more):
    return build_model(build_config(settings.model, vocab_size=vocab_size, positions=TIME, **more), settings)


def tokens():
    return token_ids(2, TIME, seed=1)


@pytest.fixture
def checkpoint(tmp_path):
    """A saved Llama whose norms and embeddings are not at their start."""
    torch.manual_seed(3)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=64))
    shaken(model).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def test_weights_from_a_seed_are_those_of_transformers():
    before = torch.random.get_rng_state()
    model = made(asked({"seed": 7}, **SIZES))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(7)
    stock = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=TIME))
    assert same_weights(model, stock)
    assert model.training
    other = made(asked({"seed": 8}, **SIZES))
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("model", "sizes", "words"),
    [
        ({"hiden_size": 8}, {}, ["hiden_size", "'hidden_size'"]),
        ({"type": "lama"}, {}, ["'lama'", "'llama'"]),
        ({"type": "bert"}, {}, ["bert", "is_decoder"]),
        ({"type": "vit"}, {}, ["vit", "no causal language model", "Set task=image-classification or model.type="]),
        ({**SIZES, "num_attention_heads": 5}, {}, ["hidden size (32)", "attention heads (5)"]),
        ({**SIZES, "hidden_size": "wide"}, {}, ["hidden_size", "int"]),
        ({**SIZES, "type": "depth_llama", "residual": "tree", "tree": {"1": [2, 0]}}, {}, ["tree", "layer 1 reads 2"]),
        ({**SIZES, "vocab_size": 50}, {"vocab_size": 51}, ["51 tokens", "50 embeddings"]),
        (
            {**SIZES, "vocab_size": 50},
            {"vocab_size": 51, "positions": 8, "special_tokens": {"pad_token_id": 50}},
            ["51 tokens", "50 embeddings"],
        ),
        ({**SIZES, "max_position_embeddings": 8}, {"positions": 9}, ["9 tokens", "8 positions"]),
        ({"type": "big_bird", "is_decoder": True, "block_size": 2}, {"positions": 23}, ["more than 22 tokens"]),
    ],
)
def test_what_makes_no_model_is_said(model, sizes, words):
    refuses(build_config, asked(**model).model, *words, **{"vocab_size": VOCAB} | sizes)


def test_padding_never_costs_the_end_of_text_its_embedding():
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    assert special_tokens(tokenizer) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    model = made(asked(**SIZES), special_tokens=special_tokens(tokenizer))
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, None)
    ids = torch.tensor([[5, 2, 7, 2]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[2].norm() > 0
    tokenizer.pad_token_id = 0
    assert special_tokens(tokenizer)["pad_token_id"] == 0


def test_a_checkpoint_goes_on_as_it_is(checkpoint):
    stock = tf.LlamaForCausalLM.from_pretrained(checkpoint)
    model = made(asked(checkpoint=checkpoint, attention_dropout=0.1))
    assert model.config.attention_dropout == 0.1
    assert model.config.max_position_embeddings == 64
    assert same_weights(model, stock)
    assert_close(model.eval()(tokens()).logits, stock(tokens()).logits, atol=1e-6, rtol=0)


def test_added_weights_are_drawn_from_the_seed_and_the_rest_is_the_checkpoints(checkpoint):
    stock = tf.LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    first, same, other = (
        made(asked({"seed": seed}, type="depth_llama", checkpoint=checkpoint, memory="static")).state_dict()
        for seed in (1, 1, 2)
    )
    added = {name for name in first if "router" in name}
    assert added
    assert all(torch.equal(first[name], stock[name]) for name in stock)
    assert same_weights(first, same)
    assert all(not torch.equal(first[name], other[name]) for name in added)
    tree = made(asked(type="depth_llama", checkpoint=checkpoint, residual="tree", tree={"2": [0, 1]})).state_dict()
    assert {name for name in tree.keys() - stock.keys() if "tree_norms" in name} == tree.keys() - stock.keys()


def test_a_head_that_is_untied_from_its_embeddings_is_a_weight_of_its_own(tmp_path):
    config = tf.LlamaConfig(**SIZES, vocab_size=VOCAB, tie_word_embeddings=True)
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = made(asked(checkpoint=str(tmp_path), tie_word_embeddings=False))
    head, table = model.lm_head.weight, model.model.embed_tokens.weight
    assert torch.equal(head, table)
    assert head.data_ptr() != table.data_ptr()
    tied = made(asked(checkpoint=str(tmp_path)))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_checkpoints_that_do_not_fit_are_refused(checkpoint, tmp_path):
    memory, gpt2 = str(tmp_path / "memory"), str(tmp_path / "gpt2")
    DepthLlamaForCausalLM(DepthLlamaConfig(**SIZES, vocab_size=VOCAB, memory="kv")).save_pretrained(memory)
    config = tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=TIME)
    tf.GPT2LMHeadModel(config).save_pretrained(gpt2)
    assert made(asked(checkpoint=memory)).config.memory == "kv"
    assert isinstance(made(asked(checkpoint=gpt2)), tf.GPT2LMHeadModel)
    for folder, options, words in (
        (checkpoint, {"intermediate_size": 64}, "must not change the checkpoint's sizes"),
        (checkpoint, {"num_hidden_layers": 5}, "lacks 9 weights .* would be random"),
        (checkpoint, {"num_hidden_layers": 3}, "holds 9 weights .* does not use"),
        (str(tmp_path / "nowhere"), {}, "nowhere"),
        (memory, {"memory": "none"}, "holds 3 weights .*router"),
        (
            gpt2,
            {"type": "depth_llama"},
            "is a gpt2, but model.type: depth_llama needs a checkpoint of type depth_llama or",
        ),
    ):
        with refused(words):
            made(asked(checkpoint=folder, **options))
    with refused(r"97 tokens, but the model has 96 embeddings"):
        made(asked(checkpoint=checkpoint), vocab_size=97)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"hidden_act": "glow"},
            "^The settings do not describe a llama: model.hidden_act is 'glow', which it does not know",
        ),
        ({"hidden_size": "wide"}, "^The settings do not describe a llama: .*hidden_size"),
        ({"num_attention_heads": 5}, "^The settings do not describe a llama: .*number of attention heads"),
    ],
)
def test_settings_that_make_no_model_are_refused(options, words):
    with refused(words):
        made(asked(**options))


FLAGGED = [
    name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name], "is_decoder", True) is False
    and name not in ("reformer", "bigbird_pegasus", "bert-japanese")
]  # fmt: skip


@pytest.mark.parametrize("model_type", FLAGGED)
def test_classes_with_the_option_is_decoder_are_refused_if_they_obey_it(model_type):
    config = zoo.config_for(model_type, is_decoder=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 90, (1, 8))
    changed = ids.clone()
    changed[0, -1] = 91
    with torch.no_grad():
        earlier, other = (model(input_ids=given).logits[0, :-1] for given in (ids, changed))
    assert reads_later_tokens(config, type(model)) == (not torch.allclose(earlier, other, atol=1e-6))


def test_special_tokens_lie_inside_the_vocabulary(tmp_path):
    """GPT-2's own end of text is 50256; a tokenizer of 300 tokens has another, and no beginning."""
    gpt2 = layer(TrainSettings, {"model": {"type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}}).model
    tokenizer = train_tokenizer(["a few words", "and others"], vocab_size=300)
    build_config(gpt2, vocab_size=300, special_tokens=special_tokens(tokenizer)).save_pretrained(tmp_path)
    saved = tf.AutoConfig.from_pretrained(tmp_path)
    assert (saved.bos_token_id, saved.eos_token_id, saved.pad_token_id) == (None, tokenizer.eos_token_id, None)
    planned, original = build_config(gpt2, vocab_size=300), build_config(gpt2, vocab_size=50257)
    assert (planned.bos_token_id, planned.eos_token_id) == (None, None)
    assert (original.bos_token_id, original.eos_token_id) == (50256, 50256)
