"""Folding against the definition of the scaled model, computed in float64 block by block."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_models
from families import zoo
from fulldepth.execution import find_anatomy
from fulldepth.hf import skipping
from fulldepth.skip.exports import fold as room
from fulldepth.skip.exports.fold import fold
from refusals import refused
from skip import planned
from skip.exports.test_export import logits, relative
from skip.exports.test_family_exports import families

SETS = [("attention", [2]), ("attention", [1, 2, 3]), ("mlp", [3, 1]), ("layer", [2])]


def exact(name):
    """A model in float64 beside whose stream eps is nothing."""
    model = tiny_models.build(name) if name in planned.FAMILIES else zoo.build(name, "causal-lm")
    model = model.double()
    model.set_experts_implementation("eager")  # the others know no float64
    for norm in model.modules():
        for field in ("eps", "variance_epsilon"):
            if hasattr(norm, field):
                setattr(norm, field, 1e-30)
    if name == "olmo":  # its eps is no setting
        model.get_input_embeddings().weight.data.mul_(200)
    return model


@pytest.mark.parametrize("name", families())
def test_nothing_but_eps_keeps_folding_from_being_exact(name):
    model, plain = exact(name), None
    # transformers computes RMSNorm in float32 whatever the model's precision
    rounding = 1e-11 if name in ("gpt2", "gpt_neox", "gpt_neox-serial") else 1e-5
    for granularity, blocks in SETS:
        plan = planned.plan(model, blocks, granularity, values=None if name == "olmo2" else "fitted")
        expected, plain = logits(planned.scaled(model, plan)), logits(model)
        assert relative(plain, expected) > 1e-3  # the plan does something
        with planned.folded(model, plan) as folding:
            assert relative(logits(model), expected) < rounding
        assert folding.logit_error < rounding
        assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_eps_costs_is_measured_and_said(name):
    """A stream hardly larger than eps: the error is not rounding, and is reported as large as it is."""
    model = tiny_models.build(name, dtype=torch.float64)
    model.get_input_embeddings().weight.data.mul_(0.2)
    plan = planned.plan(model)
    expected = logits(planned.scaled(model, plan))
    with planned.folded(model, plan, most=1.0) as folding:
        error = relative(logits(model), expected)
    assert error > 1e-6
    assert error / 4 < folding.logit_error < error * 4  # other tokens, the same eps


def test_a_bias_of_zeros_in_the_first_layer_hides_no_weights_of_the_others():
    """Branches of a kind have the same output weights, and one of each kind is probed."""
    model = exact("gpt2")
    with torch.no_grad():
        for index, block in enumerate(model.transformer.h):
            for part in (block.attn, block.mlp):
                part.c_proj.bias.fill_(0.4 if index else 0.0)
    plan = planned.plan(model, [3], "attention")
    expected = logits(planned.scaled(model, plan))
    with planned.folded(model, plan):
        assert relative(logits(model), expected) < 1e-11


def test_skipped_branches_are_zeros_and_a_plan_without_scalars_changes_nothing_else():
    model = tiny_models.build("gpt2")
    before = copy.deepcopy(model.state_dict())
    folding = fold(model, planned.plan(model, values=None))
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {"transformer.h.1.attn.c_proj.weight", "transformer.h.1.attn.c_proj.bias"}
    assert not any(model.state_dict()[name].any() for name in changed)
    assert folding.stream_scale == (1.0,) * 7
    assert folding.logit_error < 1e-6


def test_negative_factors_of_branches_fold():
    model = exact("llama")
    values = planned.scalars([2])
    values["1"]["b_att"], values["3"]["b_mlp"] = -0.75, 0.0
    plan = planned.plan(model, values=values)
    expected = logits(planned.scaled(model, plan))
    fold(model, plan)
    assert relative(logits(model), expected) < 2e-6


def unfoldable(case):
    """A model and a plan that cannot be folded."""
    name, _, cause = case.partition(" ")
    model = tiny_models.build(name, dtype=torch.float16 if cause == "overflow" else torch.float32)
    values = planned.scalars([2], tiny_models.LAYERS)
    if cause == "int8":
        projection = model.model.layers[0].self_attn.o_proj
        projection.weight = nn.Parameter(projection.weight.detach().to(torch.int8), requires_grad=False)
    values["3"] |= {"zero": {"s_att": 0.0}, "negative": {"s_mlp": -0.5}, "overflow": {"b_mlp": 1e8}}.get(cause, {})
    return model, planned.plan(model, values=values)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("bert", "norms come after the sums"),
        ("depth_llama-tree", "tree"),
        ("depth_llama-hyper", "several residual streams"),
        ("depth_llama-static", "a memory of earlier layers"),
        ("olmo2", "depends on the scale of the stream"),
        ("llama zero", "s_att of layer 3"),
        ("llama negative", "s_mlp of layer 3"),
        ("llama int8", r"o_proj\.weight of the attention of layer 1"),
        ("llama overflow", "float16"),
        ("llama misplaced", "Folding is refused"),
    ],
)
def test_what_cannot_be_folded_is_refused_and_stays_as_it_is(case, reason, monkeypatch):
    """Should the factors go elsewhere than to the ends of branches, nothing wrong leaves this room."""
    model, plan = unfoldable(case)
    if case == "llama misplaced":
        halves = {(layer, role): 0.5 for layer in (1, 2, 3) for role in ("attention", "mlp")}
        monkeypatch.setattr(room, "branch_factors", lambda *args, **kwargs: (halves, (1.0,) * 7))
    before = copy.deepcopy(model.state_dict())
    with refused(reason):
        fold(model, plan)
    assert tiny_models.same_weights(model, before)


@torch.no_grad()
def test_the_error_that_rounding_may_excuse_is_that_of_a_bfloat16_model_against_itself_in_float32():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.mul_(4.0 if weight.ndim == 2 else 1.0)  # blocks that count
    precise = copy.deepcopy(model.bfloat16()).float()
    plan, anatomy = planned.plan(model, [5, 7], values=None), find_anatomy(model)
    tokens = room.probes(anatomy)
    expected = room.scaled_logits(anatomy, plan, tokens)
    with skipping(find_anatomy(precise), [5, 7]):
        exact = precise(tokens).logits
    with skipping(find_anatomy(precise), [5, 8]):
        other = precise(tokens).logits
    rounding, estimate = relative(expected, exact), room.rounding_error(anatomy, plan, tokens, expected)
    assert rounding / 1.5 <= estimate <= 4 * rounding
    assert relative(other, exact) > 1.5 * estimate
    assert not any(block._forward_hooks for block in anatomy.blocks)
