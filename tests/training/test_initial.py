"""Weights at the start of a run: their distribution, their exact scale, and that nothing else of the model changes."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as tf
from scipy import stats
from torch import nn
from transformers.pytorch_utils import Conv1D

from fulldepth.settings import layer
from fulldepth.settings.train import TrainSettings
from fulldepth.training.model import build_config, build_model
from fulldepth.training.plan import plan
from refusals import refused
from tiny_models import same_weights

WIDTH, FFN, HEADS, KV_HEADS, HEAD, VOCAB = 64, 160, 4, 2, 16, 128
SIZES = {"hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": 3, "vocab_size": VOCAB}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
MODELS = {
    "llama": {"type": "llama", **SIZES, "pad_token_id": 3},
    "tied": {"type": "llama", **SIZES, "tie_word_embeddings": True},
    "dynamic": {"type": "depth_llama", **SIZES, "memory": "dynamic", "residual": "tree", "tree": {"2": [0, 1]}},
    "hyper": {"type": "depth_llama", **SIZES, "residual": "hyper"},
    "gpt2": {"type": "gpt2", "hidden_size": WIDTH, "num_hidden_layers": 2, "n_head": 4, "vocab_size": VOCAB},
}


def asked(model, seed=5, **initializer):
    return layer(TrainSettings, {"model": model, "seed": seed, "sequence_length": 16, "initializer": initializer})


def made(settings):
    return build_model(build_config(settings.model, positions=16), settings)


def inputs(model):
    """Name of each matrix of products and embeddings -> its inputs; an embedding has as many as channels."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            found[f"{name}.weight"] = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_truncated_normal_weights_have_the_formulas_distribution(name):
    """scipy's truncated normal: support, standard deviation of each matrix, and all of them together."""
    plain, model = made(asked(MODELS[name])), made(asked(MODELS[name], distribution="truncated-normal"))
    law, widths, pooled = stats.truncnorm(-3, 3), inputs(model), []
    for key, parameter in model.named_parameters():
        if key not in widths:  # norms, biases, routers, connections
            assert torch.equal(parameter, plain.get_parameter(key)), key
            continue
        drawn = parameter.detach() * math.sqrt(widths[key])
        if getattr(model.config, "pad_token_id", None) is not None and "embed_tokens" in key:
            assert not drawn[3].any()
            drawn = torch.cat([drawn[:3], drawn[4:]])
        drawn = drawn.flatten().double()
        assert drawn.abs().max() <= 3 + 1e-6
        spread = law.std() * math.sqrt((law.stats("k") + 2) / (4 * drawn.numel()))  # of an estimated deviation
        assert abs(drawn.std().item() - law.std()) < 4.5 * spread, key
        pooled.append(drawn)
    assert stats.kstest(torch.cat(pooled).numpy(), law.cdf).pvalue > 1e-3
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (name in ("tied", "gpt2"))


@pytest.mark.parametrize(
    ("name", "distribution"), [*((name, "model") for name in MODELS), ("llama", "truncated-normal")]
)
def test_output_scale_multiplies_what_writes_into_the_stream_and_nothing_else(name, distribution):
    plain = made(asked(MODELS[name], distribution=distribution)).state_dict()
    scaled = made(asked(MODELS[name], distribution=distribution, output_scale=0.5)).state_dict()
    outputs = [key for key in plain if key.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight"))]
    assert len(outputs) == 2 * (2 if name == "gpt2" else 3)
    for key, weight in plain.items():
        assert torch.equal(scaled[key], 0.5 * weight if key in outputs else weight), key


@pytest.mark.parametrize("memory", ["static", "dynamic", "kv"])
def test_key_and_value_projections_that_read_a_memory_are_uniform(memory):
    """kaiming_uniform_(a = sqrt 5): bound sqrt(6 / ((1 + a^2) inputs)), with the inputs that torch counts."""
    shape = {**MODELS["llama"], "type": "depth_llama", "memory": memory, "hidden_size": 128, "num_attention_heads": 8}
    whole = nn.init._calculate_fan_in_and_fan_out(torch.empty(1, KV_HEADS, 128, 16))[0]
    plain = made(asked(shape)).state_dict()
    for start, counted in (("fan-in", 128), *([("pseudocode", whole)] if memory != "kv" else [])):
        bound = math.sqrt(6 / ((1 + 5) * counted))
        found = made(asked(shape, memory=start)).state_dict()
        first = 0 if memory == "kv" else 1  # layer 1 has no memory; with kv its keys and values are others' memory
        drawn = {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in range(first, 3) for p in "kv"}
        assert {key for key in plain if not torch.equal(plain[key], found[key])} == drawn
        weights = torch.cat([found[key].flatten() for key in sorted(drawn)]).double()
        assert 0.999 * bound < weights.abs().max() <= bound * (1 + 1e-6)
        assert stats.kstest(weights.numpy(), stats.uniform(-bound, 2 * bound).cdf).pvalue > 1e-3
    assert whole == KV_HEADS * 128 * 16


@pytest.mark.parametrize(
    ("model", "initializer", "words"),
    [
        (MODELS["llama"], {"memory": "fan-in"}, ["initializer.memory", "model.memory"]),
        (MODELS["hyper"], {"memory": "fan-in"}, ["initializer.memory", "model.memory"]),
        ({**MODELS["llama"], "type": "depth_llama", "memory": "kv"}, {"memory": "pseudocode"}, ["static", "dynamic"]),
        ({"type": "phi", **SIZES}, {"output_scale": 2.0}, ["output_scale", "phi"]),
        ({"type": "mixtral", **SIZES, "num_local_experts": 2}, {"distribution": "truncated-normal"}, ["mlp.gate"]),
    ],
)
def test_a_start_that_the_model_cannot_have_is_refused_and_by_the_dry_run_too(model, initializer, words):
    settings = asked(model, **initializer)
    config = build_config(settings.model, positions=16)
    for call in (lambda: build_model(config, settings), lambda: plan(settings, config)):
        with refused(None, *words):
            call()


def test_a_checkpoints_weights_are_never_drawn_again(tmp_path):
    made(asked(MODELS["llama"], 9)).save_pretrained(tmp_path)
    stored = tf.LlamaForCausalLM.from_pretrained(tmp_path)
    settings = asked({"checkpoint": str(tmp_path)}, distribution="truncated-normal", output_scale=0.5)
    assert same_weights(made(settings), stored)
