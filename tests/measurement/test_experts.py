"""Spectral norms of mixtures of experts, whose matrices transformers stores as one parameter for all experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf

import tiny_models
from fulldepth.execution.weights import feed_projections, projection_names
from fulldepth.hf import anatomy_candidates
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


def expected(model):
    """(site, layer, statistic) -> value and count of every parameter of two dimensions or more in the blocks."""
    found = {}
    for layer, block in enumerate(model.base_model.layers, start=1):
        for name, parameter in block.named_parameters():
            values = parameter.detach().double().numpy()
            if name.endswith("bias") or values.ndim < 2:
                continue
            norms = np.linalg.svd(values, compute_uv=False)[..., 0]
            site = name.removesuffix(".weight")
            if values.ndim == 2:
                found[site, layer, "value"] = (float(norms), 1)
            else:
                found[site, layer, "mean"] = (norms.mean(), len(norms))
                found[site, layer, "max"] = (norms.max(), len(norms))
    return found


def keyed(rows):
    return {(row.site, row.layer, row.statistic): (row.value, row.count) for row in rows}


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_has_its_norm(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    anatomy = anatomy_candidates(model)[0]
    metric = SpectralNorm(
        Setup(num_layers=anatomy.num_layers, width=anatomy.width, projections=projection_names(anatomy))
    )
    assert feed_projections(metric, anatomy) == []
    wanted = expected(model)
    assert any(statistic == "max" for _, _, statistic in wanted)
    got = keyed(metric.rows())
    assert got.keys() == wanted.keys()
    for key, (value, count) in wanted.items():
        assert got[key] == (pytest.approx(value, rel=1e-6), count), key


def test_experts_that_cannot_be_read_are_said():
    """Experts packed by a quantiser, say: there is no stack of matrices, and that is not passed over."""
    model = MODELS["mixtral"]().eval()
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.zeros(4, 32, 2, 24), requires_grad=False)
    del experts.gate_up_proj
    anatomy = anatomy_candidates(model)[0]
    metric = SpectralNorm(
        Setup(num_layers=anatomy.num_layers, width=anatomy.width, projections=projection_names(anatomy))
    )
    assert feed_projections(metric, anatomy) == ["mlp.experts"]
