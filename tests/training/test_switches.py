"""An architecture that nothing of ours knows says its own cost, weights and stock class, and the dry run has them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as tf
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from fulldepth.settings import layer
from fulldepth.settings.train import TrainSettings
from fulldepth.skip.exports.formats import as_stock
from fulldepth.training.model import build_model
from fulldepth.training.plan import plan
from refusals import refused
from tiny_models import SIZES, same_weights
from training.test_plan import TIME, VOCAB, config_of, counted, tokens


class BlendConfig(tf.LlamaConfig):
    """A Llama with one switch: each MLP reads, besides its input, a learnt causal blend of all positions' inputs."""

    model_type = "blend_llama"
    stock_model_type = "llama"
    blend: bool = False

    @property
    def switches(self):
        return {"blend": True} if self.blend else {}

    def stock_config(self):
        own = ("blend", "model_type", "architectures")
        return tf.LlamaConfig(**{name: value for name, value in self.to_dict().items() if name not in own})

    def extra_flops(self, sequence_length):
        return 2.0 * self.num_hidden_layers * sequence_length * self.hidden_size if self.blend else 0.0


class BlendMLP(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.weights = nn.Parameter(torch.zeros(config.max_position_embeddings, config.max_position_embeddings))

    def forward(self, x):
        length = x.shape[1]
        return super().forward(
            x
            + torch.mm(self.weights[:length, :length].tril(), x.transpose(0, 1).flatten(1))
            .view(length, len(x), -1)
            .transpose(0, 1)
        )


class BlendForCausalLM(tf.LlamaForCausalLM):
    config_class = BlendConfig
    stock_class = tf.LlamaForCausalLM

    def __init__(self, config):
        super().__init__(config)
        if config.blend:
            for block in self.model.layers:
                block.mlp = BlendMLP(config)

    def added_parameters(self):
        return {name for name, _ in self.named_parameters() if name.endswith("mlp.weights")}


@pytest.fixture(autouse=True)
def blend_llama():
    """What a contributor writes at the end of the modelling file."""
    AutoConfig.register(BlendConfig.model_type, BlendConfig)
    AutoModelForCausalLM.register(BlendConfig, BlendForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop(BlendConfig.model_type)
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(BlendConfig)


def asked(model, **over):
    return layer(TrainSettings, {"model": {"type": "blend_llama", **model}, "sequence_length": TIME, **over})


def test_the_dry_run_has_the_cost_that_a_new_switch_declares():
    plans, operations = [], []
    for blend in (False, True):
        settings = asked(SIZES | {"blend": blend}, attention="eager")
        plans.append(plan(settings, config_of(settings)))
        operations.append(counted(partial(build_model(config_of(settings), settings), tokens()))[0])
    plain, switched = plans
    assert switched.flops.forward - plain.flops.forward == operations[1] - operations[0] > 0
    assert switched.step_flops - plain.step_flops == 3 * switched.flops.extra


def test_a_new_switch_starts_from_a_stock_checkpoint_and_keeps_its_own_start(tmp_path):
    torch.manual_seed(1)
    stock = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=TIME))
    stock.save_pretrained(tmp_path)
    settings = asked({"checkpoint": str(tmp_path), "blend": True})
    model = build_model(config_of(settings), settings)
    assert type(model) is BlendForCausalLM
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in stock.state_dict().items())
    with refused("blend True is no stock decoder; one without is a llama"):
        as_stock(model)
    off = asked({"checkpoint": str(tmp_path)})
    back = as_stock(build_model(config_of(off), off))
    assert type(back) is tf.LlamaForCausalLM
    assert same_weights(back, stock)
