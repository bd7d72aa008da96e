"""Folding against the definition of the scaled model, computed in float64 block by block."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.skip.exports import fold as room
from fulldepth.skip.exports.fold import branch_factors, fold
from skip import planned

SETS = [("attention", [2]), ("attention", [1, 2, 3]), ("mlp", [3, 1]), ("layer", [2])]
RMS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]


def ids(batch=3, length=18):
    return torch.randint(3, tiny_models.VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model):
    tokens = ids()
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits


def relative(got, expected):
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def norms(model):
    return [m for m in model.modules() if hasattr(m, "variance_epsilon") or "Norm" in type(m).__name__]


def set_eps(model, eps):
    for norm in norms(model):
        setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", eps)
    return model


def loud(model, factor=50.0):
    """A model whose stream starts at an ordinary size, beside which eps is nothing."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(factor)
    return model


@pytest.mark.parametrize("name", planned.FAMILIES)
def test_nothing_but_eps_keeps_folding_from_being_exact(name):
    model = set_eps(tiny_models.build(name, dtype=torch.float64), 1e-30)
    rounding = 2e-6 if name in RMS else 1e-11  # transformers computes RMSNorm in float32 whatever the model's precision
    for granularity, blocks in SETS:
        plan = planned.plan(model, blocks, granularity)
        expected = logits(planned.scaled(model, plan))
        assert relative(logits(model), expected) > 1e-2  # the plan does something
        with planned.folded(model, plan) as folding:
            assert relative(logits(model), expected) < rounding
        assert folding.logit_error < rounding


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_eps_costs_is_measured_and_said(name):
    """A stream hardly larger than eps: the error is not rounding, and is reported as large as it is."""
    model = loud(tiny_models.build(name, dtype=torch.float64), 0.2)
    plan = planned.plan(model, [2])
    expected = logits(planned.scaled(model, plan))
    with planned.folded(model, plan, most=1.0) as folding:
        error = relative(logits(model), expected)
    assert error > 1e-6
    assert error / 4 < folding.logit_error < error * 4  # other tokens, the same eps


def test_a_bias_of_zeros_in_the_first_layer_hides_no_weights_of_the_others():
    """Branches of a kind have the same output weights, and one of each kind is probed."""
    model = set_eps(tiny_models.build("gpt2", dtype=torch.float64), 1e-30)
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
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    folding = fold(model, planned.plan(model, [2], values=None))
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {"transformer.h.1.attn.c_proj.weight", "transformer.h.1.attn.c_proj.bias"}
    assert not any(model.state_dict()[name].any() for name in changed)
    assert folding.stream_scale == (1.0,) * 7
    assert folding.logit_error < 1e-6


def test_gemma_zeroes_a_gain_of_one_plus_weight():
    model = tiny_models.build("gemma2", dtype=torch.bfloat16)
    fold(model, planned.plan(model, [3], values=None))
    assert torch.equal(model.model.layers[2].post_attention_layernorm.weight, torch.full((32,), -1.0).bfloat16())


@given(
    st.lists(st.tuples(*[st.floats(0.1, 3.0)] * 4), min_size=3, max_size=3),
    st.sets(st.integers(1, 3)),
    st.sampled_from(["attention", "mlp", "layer"]),
    st.booleans(),
)
def test_factors_follow_the_recursion(values, blocks, granularity, parallel):
    """With branches that are constants, the stored stream times its scale is the stream of the definition."""
    own = {str(n): dict(zip(planned.NAMES, v, strict=True)) for n, v in enumerate(values, start=1)}

    class Plan:
        scalars = own

    Plan.blocks, Plan.granularity = blocks, granularity
    factors, scales = branch_factors(Plan, 3, parallel=parallel)  # type: ignore[arg-type]
    x = stored = 1.0
    for layer, (b_att, s_att, b_mlp, s_mlp) in enumerate(values, start=1):
        a, m = 0.3 * layer, 0.7 / layer
        removed = granularity if layer in blocks else ""
        assert scales[2 * layer - 2] * stored == pytest.approx(x)
        x1 = x if removed in ("attention", "layer") else b_att * a + s_att * x
        between = stored + factors[layer, "attention"] * a
        assert parallel or scales[2 * layer - 1] * between == pytest.approx(x1)
        x = x1 if removed in ("mlp", "layer") else b_mlp * m + s_mlp * x1
        stored = between + factors[layer, "mlp"] * m
    assert scales[-1] * stored == pytest.approx(x)


def state(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same(model, before):
    return all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(("name", "value"), [("s_att", 0.0), ("s_mlp", -0.5)])
def test_factors_of_the_stream_have_to_be_positive(name, value):
    model = tiny_models.build("llama")
    values = planned.scalars([2])
    values["3"][name] = value
    before = state(model)
    with pytest.raises(FulldepthError, match=rf"{name} of layer 3"):
        fold(model, planned.plan(model, [2], values=values))
    assert same(model, before)


def test_negative_factors_of_branches_fold():
    model = set_eps(tiny_models.build("llama", dtype=torch.float64), 1e-30)
    values = planned.scalars([2])
    values["1"]["b_att"], values["3"]["b_mlp"] = -0.75, 0.0
    plan = planned.plan(model, [2], values=values)
    expected = logits(planned.scaled(model, plan))
    fold(model, plan)
    assert relative(logits(model), expected) < 2e-6


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert", "norms come after the sums"),
        ("depth_llama-tree", "tree"),
        ("depth_llama-hyper", "several residual streams"),
        ("depth_llama-static", "states of several layers"),
        ("olmo2", "sees the scale of the stream"),
    ],
)
def test_families_that_cannot_be_folded_are_refused_with_the_reason(name, reason):
    model = tiny_models.build(name)
    with pytest.raises(FulldepthError, match=reason):
        fold(model, planned.plan_of(model, [2]))


def test_quantised_weights_are_refused():
    model = tiny_models.build("llama")
    projection = model.model.layers[0].self_attn.o_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(FulldepthError, match=r"o_proj\.weight of the attention of layer 1"):
        fold(model, planned.plan(model, [2]))


def test_numbers_too_large_for_the_precision_are_refused():
    model = tiny_models.build("llama", dtype=torch.float16)
    values = planned.scalars([2])
    values["1"]["b_mlp"] = 1e8
    before = state(model)
    with pytest.raises(FulldepthError, match=r"too large for torch.float16.*float32"):
        fold(model, planned.plan(model, [2], values=values))
    assert same(model, before)


def test_a_folding_that_changes_predictions_is_refused_and_undone(monkeypatch):
    """Should the factors go elsewhere than to the ends of branches, nothing wrong leaves this room."""
    model = tiny_models.build("llama")
    halves = {(layer, role): 0.5 for layer in (1, 2, 3) for role in ("attention", "mlp")}
    monkeypatch.setattr(room, "branch_factors", lambda *args, **kwargs: (halves, (1.0,) * 7))
    before = state(model)
    with pytest.raises(FulldepthError, match="Folding is refused"):
        fold(model, planned.plan(model, [2]))
    assert same(model, before)


def test_the_definition_used_here_is_the_stock_model_without_scalars():
    for name in planned.FAMILIES:
        model = tiny_models.build(name, dtype=torch.float64)
        plain = planned.plan(model, [1], values=None).model_copy(update={"blocks": []})
        assert relative(logits(planned.scaled(model, plain)), logits(model)) < 1e-12
