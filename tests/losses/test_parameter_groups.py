"""`DepthTrainer` asks a model for its parameter groups; models without any keep the Trainer's."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from fulldepth.losses import DepthTrainer
from refusals import refused
from tiny_models import BUILDERS, SIZES, ones

RATE, ROUTERS, DECAY = 0.25, 0.5, 0.125  # powers of two: the factors are exact


def shrunk(model, folder, **options):
    """The factor that one step without gradients leaves of each weight, all of which are 1."""
    arguments = tf.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", learning_rate=RATE, weight_decay=DECAY
    )
    trainer = DepthTrainer(model, arguments, **options)
    ones(model)
    optimizer = trainer.create_optimizer()
    assert optimizer is trainer.optimizer
    assert trainer.optimizer_cls_and_kwargs is options.get("optimizer_cls_and_kwargs")
    optimizer.step()
    return {name: float(parameter.detach().flatten()[0]) for name, parameter in model.named_parameters()}


def memory_model():
    return DepthLlamaForCausalLM(DepthLlamaConfig(vocab_size=64, memory="dynamic", **SIZES))


@pytest.mark.parametrize(
    ("options", "router", "matrix", "norm"),
    [
        ({}, 1 - RATE * DECAY, 1 - RATE * DECAY, 1.0),
        ({"group_options": {"router_learning_rate": ROUTERS}}, 1 - ROUTERS * DECAY, 1 - RATE * DECAY, 1.0),
        ({"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1.0})}, 1 - RATE * DECAY, 1 - RATE * DECAY, 1.0),
    ],
)
def test_the_models_own_groups(tmp_path, options, router, matrix, norm):
    model = memory_model()
    model.model.embed_tokens.requires_grad_(False)
    for name, factor in shrunk(model, tmp_path, **options).items():
        if "embed" in name:
            assert factor == 1.0
        else:
            assert factor == (router if "router.weight" in name else norm if "norm" in name else matrix), name


def test_other_models_keep_the_trainers_groups(tmp_path):
    """The Trainer lets embeddings decay; groups of our own would not."""
    factors = shrunk(BUILDERS["llama"](), tmp_path)
    assert factors["model.embed_tokens.weight"] == 1 - RATE * DECAY
    assert factors["model.norm.weight"] == 1.0
    with refused("LlamaForCausalLM has no parameter groups of its own"):
        shrunk(BUILDERS["llama"](), tmp_path, group_options={"decay": "all"})
