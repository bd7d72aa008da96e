"""Spectral norms of mixtures of experts, whose matrices transformers stores as one parameter for all experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import tiny_models
from fulldepth.hf import anatomy_candidates
from fulldepth.measurement.weights import feed_projections, projection_names
from fulldepth.metrics import Setup, SpectralNorm

FEW = {"num_experts_per_tok": 2}
MODELS = {
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**tiny_models.DECODER, num_local_experts=4, **FEW)),
    "gpt-oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**tiny_models.DECODER, num_local_experts=4, **FEW)),
    "jetmoe": lambda: tf.JetMoeForCausalLM(
        tf.JetMoeConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, intermediate_size=48, kv_channels=8,
            num_key_value_heads=2, num_local_experts=4, **FEW,
        )
    ),
}  # fmt: skip


def fed(model):
    """The measure of a model's weights, and the parts that could not be read."""
    anatomy = anatomy_candidates(model)[0]
    sizes = {"num_layers": anatomy.num_layers, "width": anatomy.width}
    metric = SpectralNorm(Setup(**sizes, projections=projection_names(anatomy)))
    return metric, feed_projections(metric, anatomy)


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_has_its_norm(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    expected = {}
    for layer, block in enumerate(model.base_model.layers, start=1):
        for path, parameter in block.named_parameters():
            if path.endswith("bias") or parameter.ndim < 2:
                continue
            norms = np.linalg.svd(parameter.detach().double().numpy(), compute_uv=False)[..., 0]
            of = {"value": norms} if parameter.ndim == 2 else {"mean": norms.mean(), "max": norms.max()}
            site, count = path.removesuffix(".weight"), norms.size
            for statistic, value in of.items():
                expected[site, layer, statistic] = pytest.approx(float(value), rel=1e-6), count
    metric, unread = fed(model)
    assert unread == []
    assert any(statistic == "max" for _, _, statistic in expected)
    assert {(row.site, row.layer, row.statistic): (row.value, row.count) for row in metric.rows()} == expected


def test_experts_that_cannot_be_read_are_said():
    """Experts packed by a quantiser, say: there is no stack of matrices, and that is not passed over."""
    model = MODELS["mixtral"]().eval()
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(torch.zeros(4, 32, 2, 24), requires_grad=False)
    del experts.gate_up_proj
    assert fed(model)[1] == ["mlp.experts"]
