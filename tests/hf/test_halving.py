"""RWKV's `rescale_every`: the stream keeps its scale, with the logits of the stock model that halves it."""

import pytest
import torch
import transformers as tf
from torch.testing import assert_close

import tiny_models as tm
from fulldepth.execution import capture, find_anatomy, verify
from fulldepth.hf import anatomy_candidates, load_checkpoint, open_model, truncated
from refusals import refused

DEPTH = 7


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of seven layers whose stream the stock model halves after the second, fourth and sixth."""
    torch.manual_seed(0)
    sizes = {"vocab_size": tm.VOCAB, "hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 48}
    model = tf.RwkvForCausalLM(tf.RwkvConfig(**sizes, num_hidden_layers=DEPTH, rescale_every=2))
    tm.strengthened(model, 3.0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def stock_logits(folder, ids):
    return tf.RwkvForCausalLM.from_pretrained(folder).eval()(input_ids=ids).logits


@torch.no_grad()
def test_a_loaded_model_has_the_stock_logits_and_a_stream_that_is_a_sum(folder):
    loaded = load_checkpoint(folder, device="cpu")
    assert "halves its residual stream after every 2 layers" in loaded.warnings[0]
    ids = tm.token_ids(2, 10)
    expected = stock_logits(folder, ids)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    verified = verify(anatomy_candidates(loaded.model), batch, optional=("head", "branches"))
    anatomy = verified.anatomy
    assert verified.classifier is not None
    with capture(anatomy, ["residual"]) as activations:
        logits = loaded.model(input_ids=ids).logits
        states = activations["residual"]
    assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    halved = tf.RwkvForCausalLM.from_pretrained(folder).eval()(input_ids=ids, output_hidden_states=True).hidden_states
    allowed = 1e-4 * max(float(state.abs().max()) for state in states)
    for layer in range(1, DEPTH + 1):
        assert_close(states[layer], halved[layer - 1] * 2 ** (layer // 2), rtol=1e-3, atol=allowed)


@torch.no_grad()
def test_first_layers_compute_the_same_in_the_stock_class(folder, tmp_path):
    ids = tm.token_ids(2, 10)
    cut = truncated(find_anatomy(load_checkpoint(folder, device="cpu").model), 4)
    cut.save_pretrained(tmp_path / "cut")
    whole = load_checkpoint(folder, device="cpu").model
    for block in whole.rwkv.blocks[4:]:
        block.forward = lambda hidden, state=None, **_: (hidden, state, None)
    expected = whole(input_ids=ids).logits
    assert_close(stock_logits(tmp_path / "cut", ids), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_model_in_memory_is_refused_with_the_way_to_load_it(folder):
    with refused(r"from_pretrained.NAME, rescale_every=0., which gives the same logits"):
        open_model(tf.RwkvForCausalLM.from_pretrained(folder))
    open_model(tf.RwkvForCausalLM.from_pretrained(folder, rescale_every=0))
