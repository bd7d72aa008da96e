"""The error that rounding may excuse: as large as that of a half-precision model against itself in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fulldepth.execution import find_anatomy
from fulldepth.hf import skipping
from fulldepth.skip.exports.fold import probes, rounding_error, scaled_logits
from skip import planned


def deep(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim == 2 else 1.0)  # blocks that count
    return model


@torch.no_grad()
@pytest.mark.parametrize("seed", range(2))
def test_it_is_the_size_of_what_rounding_does(seed):
    model = deep(seed).bfloat16()
    precise = copy.deepcopy(model).float()
    plan, anatomy = planned.plan(model, [5, 7], values=None), find_anatomy(model)
    ids = probes(anatomy)
    expected = scaled_logits(anatomy, plan, ids)
    with skipping(find_anatomy(precise), [5, 7]):
        exact = precise(ids).logits
    with skipping(find_anatomy(precise), [5, 8]):
        other = precise(ids).logits
    rounding = float((expected.float() - exact).abs().max() / exact.abs().max())
    estimate = rounding_error(anatomy, plan, ids, expected)
    assert rounding / 1.5 <= estimate <= 4 * rounding
    assert float((other - exact).abs().max() / exact.abs().max()) > 1.5 * estimate
    assert not any(block._forward_hooks for block in anatomy.blocks)
