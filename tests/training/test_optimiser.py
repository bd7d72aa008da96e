"""Which parameters weight decay acts on: one step of AdamW without gradients shrinks those that the rule names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification

import tiny_models
from fulldepth.settings import layer
from fulldepth.settings.train import TrainSettings
from fulldepth.training.model import build_config, build_model
from fulldepth.training.plan import plan
from fulldepth.training.trainer import parameter_groups
from refusals import refused

SIZES = {**tiny_models.SIZES, "vocab_size": 64}
MODELS = {
    "llama": {"type": "llama", **SIZES},
    "gpt2": {"type": "gpt2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    **{name: {"type": "depth_llama", **SIZES, "memory": name} for name in ("static", "dynamic", "kv")},
    "hyper": {"type": "depth_llama", **SIZES, "residual": "hyper", "tie_word_embeddings": True},
}
RATE, ROUTERS, DECAY = 0.25, 0.5, 0.125  # powers of two: the factors are exact


def asked(name, decay):
    rates = {"learning_rate": RATE, "weight_decay": DECAY, "decay": decay}
    if MODELS[name].get("memory"):
        rates["router_learning_rate"] = ROUTERS
    return layer(TrainSettings, {"model": MODELS[name], "sequence_length": 16, **rates})


def shrinks(key, name, decay):
    """The rules as the papers say them, by the parameters' names."""
    if decay == "all":
        return True
    if decay == "routers" or ".router." in key:
        return ".router." in key and name != "static"
    return not any(part in key for part in ("norm", "ln_", "embed", "wte", "wpe", "bias", "static_"))


@pytest.mark.parametrize("decay", ["matrices", "all", "routers"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_without_gradients_shrinks_what_the_rule_names(name, decay):
    settings = asked(name, decay)
    config = build_config(settings.model, positions=16)
    model = build_model(config, settings)
    if decay == "routers" and name not in ("dynamic", "kv"):
        for call in (lambda: parameter_groups(model, settings), lambda: plan(settings, config)):
            with refused(r"decay=routers has no effect"):
                call()
        return
    torch.optim.AdamW(parameter_groups(tiny_models.ones(model), settings), lr=1.0).step()
    for key, parameter in model.named_parameters():
        rate = ROUTERS if ".router." in key else RATE
        expected = 1 - rate * DECAY if shrinks(key, name, decay) else 1.0
        assert (parameter == expected).all(), key


def test_embeddings_that_are_no_modules_do_not_decay():
    """DINOv2 with registers has its positions, class, mask and register tokens as plain parameters."""
    config = Dinov2WithRegistersConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4, num_labels=3
    )
    model = Dinov2WithRegistersForImageClassification(config)
    groups = {group["name"]: group for group in parameter_groups(model, asked("llama", "matrices"))}
    decaying = {id(parameter) for parameter in groups["decay"]["params"]}
    found = {name for name, parameter in model.named_parameters() if id(parameter) in decaying}
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    assert found == {f"{name}.weight" for name in linear}
    assert groups["no decay"]["weight_decay"] == 0
