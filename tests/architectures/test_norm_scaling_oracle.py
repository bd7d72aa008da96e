"""LayerNorm scaling against a forward pass that is written out (`measurement.causes`)."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose
from safetensors.torch import load_file

import fulldepth
from cli.conftest import main  # noqa: F401
from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from measurement import causes


@pytest.fixture(scope="module")
def scaled():
    """A depth_llama with LayerNorm scaling, in float64."""
    torch.manual_seed(3)
    model = DepthLlamaForCausalLM(DepthLlamaConfig(**causes.GROUPED, norm_scaling=True)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight)) if weight.ndim == 1 else weight.mul_(5)
    return model.double()


SINGLE = {"rtol": 2e-5, "atol": 2e-6}
"""transformers computes RMSNorm in float32."""


@torch.no_grad()
def test_norm_scaling_is_that_of_a_forward_pass_by_hand(scaled):
    documents = causes.ids_of(causes.texts([14, 9]))
    padded = torch.tensor([documents[0], documents[1] + [0] * 5])
    mask = torch.tensor([[1] * 14, [1] * 9 + [0] * 5])
    logits = scaled(input_ids=padded, attention_mask=mask).logits.numpy()
    for row, ids in enumerate(documents):
        expected = causes.scaled_llama(scaled.state_dict(), scaled.config, ids)
        assert_allclose(logits[row, : len(ids)], expected, **SINGLE)


@torch.no_grad()
def test_norm_scaling_is_undone_by_gains_and_off_by_default(scaled):
    """Gains times sqrt(l) give the Llama that the model is without the switch."""
    weights = {name: tensor.clone() for name, tensor in scaled.state_dict().items()}
    plain = tf.LlamaForCausalLM(tf.LlamaConfig(**causes.GROUPED)).double().eval()
    plain.load_state_dict(weights)
    unscaled = DepthLlamaForCausalLM(DepthLlamaConfig(**causes.GROUPED)).double().eval()
    unscaled.load_state_dict(weights)
    undone = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in undone.items():
        if "layernorm" in name:
            tensor.mul_((int(name.split(".")[2]) + 1) ** 0.5)
    ids = torch.tensor(causes.ids_of(causes.texts([14])))
    expected = plain(input_ids=ids).logits.numpy()
    assert_allclose(unscaled(input_ids=ids).logits.numpy(), expected, **SINGLE)
    assert not np.allclose(scaled(input_ids=ids).logits.numpy(), expected, rtol=1e-2)
    scaled.load_state_dict(undone)
    assert_allclose(scaled(input_ids=ids).logits.numpy(), expected, **SINGLE)
    scaled.load_state_dict(weights)


@torch.no_grad()
@pytest.mark.slow
def test_norm_scaling_is_exported_as_a_stock_llama(scaled, tmp_path):
    """Folded into the gains: read by transformers alone, against the pass by hand without attention of layer 2."""
    tokenizer = causes.tokenizer()
    copy.deepcopy(scaled).float().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = [{"text": text} for text in causes.texts([40] * 12)]
    search = {"given": [2], "fit": False, "sequence_length": 16, "dtype": "float32"}
    fulldepth.skip.search(str(tmp_path / "model"), data, output=tmp_path / "plan", **search)
    plan = fulldepth.skip.Plan.load(tmp_path / "plan" / "plan.json")
    fulldepth.skip.export(plan, str(tmp_path / "model"), "folded", tmp_path / "folded")
    config = tf.AutoConfig.from_pretrained(tmp_path / "folded")
    assert config.model_type == "llama"
    stock, report = tf.LlamaForCausalLM.from_pretrained(
        tmp_path / "folded", dtype=torch.float64, output_loading_info=True
    )
    assert not any(report.values())
    ids = causes.ids_of(causes.texts([14], seed=5))[0]
    expected = causes.scaled_llama(scaled.state_dict(), scaled.config, ids, skipped={2})
    got = stock.eval()(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    full = causes.scaled_llama(scaled.state_dict(), scaled.config, ids)
    assert np.abs(full - expected).max() > 0.1, "the attention of layer 2 does nothing here"


@torch.no_grad()
@pytest.mark.slow
def test_norm_scaling_of_a_run_is_exported_as_a_stock_llama(scaled, main, tmp_path):  # noqa: F811
    """A run that starts from the model, one small step long, against the pass by hand with the run's weights."""
    start = copy.deepcopy(scaled).float()
    start.save_pretrained(tmp_path / "model")
    causes.tokenizer().save_pretrained(tmp_path / "model")
    lines = [json.dumps({"text": text}) for text in causes.texts([40] * 40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    with torch.enable_grad():
        fulldepth.train(
            {"steps": 1, "global_batch_size": 2, "sequence_length": 16, "learning_rate": 1e-6, "save_every": 1},
            tmp_path / "run",
            model={"checkpoint": str(tmp_path / "model")},
            data={"name": str(tmp_path / "text.jsonl")},
        )
    code, _, error = main("train", "export", tmp_path / "run", "--stock", "--output", tmp_path / "stock")
    assert code == 0, error
    assert json.loads((tmp_path / "stock" / "config.json").read_text())["model_type"] == "llama"
    stock, report = tf.LlamaForCausalLM.from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert not any(report.values())
    weights = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    ids = causes.ids_of(causes.texts([14], seed=5))[0]
    expected = causes.scaled_llama(weights, scaled.config, ids)
    got = stock.double().eval()(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert_allclose(expected, causes.scaled_llama(start.state_dict(), scaled.config, ids), atol=1e-2)
