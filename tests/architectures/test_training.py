"""What training needs of the model: recomputation, optimiser groups, precision, and checkpoints that come back."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch.testing import assert_close

from architectures.combinations import (
    EVERY,
    KINDS,
    SWITCHES,
    build,
    llama_configuration,
    padded,
    randomise,
    tokens,
)
from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from fulldepth.hf.caches import CACHE
from tiny_models import gradients, same_weights

NEW = {
    "static": r"self_attn\.(router|memory_norm)\.",
    "dynamic": r"self_attn\.(router|memory_norm)\.",
    "kv": r"self_attn\.router\.",
    "tree": r"tree_norms\.",
    "hyper": r"(attention|mlp)_connection\.",
    "tree-static": r"self_attn\.(router|memory_norm)\.|tree_norms\.",
}
"""What each form adds to Llama's parameters."""


def learn(model, batch):
    """Loss and gradients of one training step."""
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


@KINDS
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(name, reentrant):
    batch = padded()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model = build(name, attention_dropout=0.3)
    loss, expected = learn(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    calls = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    found_loss, found = learn(model, batch)
    assert len(calls) == 2, "the layer was not computed a second time"
    assert_close(found_loss, loss, rtol=1e-12, atol=0)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


@EVERY
def test_a_saved_model_comes_back_bit_by_bit(name, tmp_path):
    model, ids = build(name, dtype=torch.float32), tokens()
    logits = model(ids).logits
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    again, info = tf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is DepthLlamaForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ours, theirs = (json.loads(one.config.to_json_string()) for one in (again, model))
    assert {**ours, "_name_or_path": "", "dtype": ""} == {**theirs, "_name_or_path": "", "dtype": ""}
    expected = model.state_dict()
    assert set(stored) == set(expected) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert same_weights(again, model)
    assert torch.equal(again.eval()(ids).logits, logits)
    bare = tf.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(bare.eval()(ids).last_hidden_state, model.model(ids).last_hidden_state)


def error(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@KINDS
@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_half_precision_is_finite_and_near(name, way):
    """Logits within three times the error of plain Llama in the same precision, and finite gradients."""
    ids, errors = tokens(3, 12), {}
    for case in ("serial", name):
        model = build(case, dtype=torch.float32, spread=0.5)
        exact = model(ids).logits
        if way == "bfloat16":
            model = model.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            output = model.train()(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())
        assert output.logits.dtype == torch.bfloat16
        errors[case] = error(output.logits.detach(), exact.detach())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            cache = model.eval()(ids[:, :8], use_cache=True)[CACHE]
            rest = model(ids[:, 8:], **{CACHE: cache}, use_cache=True).logits
        errors[f"{case}-cached"] = error(rest, exact.detach()[:, 8:])
    for case in (name, f"{name}-cached"):
        assert errors[case] < max(3 * errors["serial"], 0.01), errors
        assert errors[case] < 0.1, errors


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama checkpoint: folder and model."""
    folder = tmp_path_factory.mktemp("llama")
    model = randomise(tf.LlamaForCausalLM(llama_configuration())).eval()
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("name", ["serial", *NEW])
def test_a_llama_checkpoint_can_be_continued(name, llama):
    """Only what the form adds is missing, and it starts as in a fresh model, which the oracle tests."""
    folder, plain = llama
    config = DepthLlamaConfig.from_llama(plain.config, **SWITCHES[name])
    torch.manual_seed(0)
    model, info = DepthLlamaForCausalLM.from_pretrained(folder, config=config, output_loading_info=True)
    added = {key for key in model.state_dict() if name in NEW and re.search(NEW[name], key)}
    assert set(info["missing_keys"]) == added
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    for key, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    fresh = DepthLlamaForCausalLM(config).state_dict()
    for key in added:
        tensor = model.state_dict()[key]
        assert tensor.isfinite().all()
        if "router" in key and config.memory in ("static", "dynamic"):
            assert 0.3 < tensor.std() / fresh[key].std() < 3, key
        else:
            assert torch.equal(tensor, fresh[key]), key
