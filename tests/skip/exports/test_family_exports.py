"""Exports without blocks of every family that has them, against the stock model with hooks that scale its branches."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from families import zoo
from fulldepth.execution import find_anatomy
from fulldepth.skip import export, load
from skip import planned
from skip.exports.older_reader import in_steps
from skip.exports.test_export import relative
from skip.plain import branches_of

FALCONS = {"falcon-two-norms": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2}}
ZOO = "olmo phi phi3 granite mixtral qwen3_moe gpt_oss cohere starcoder2 smollm3 deepseek_v3 gemma olmo2 opt falcon"
DESIGNS = ("llama", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_neox-serial", "granite", "cohere", "gpt_oss")
DESIGNS += ("deepseek_v3", "olmo2", "opt")
"""On every push: parallel blocks, a factor on branches, stacked experts, latent attention, norms after branches."""


def families(*others):
    """All of them as parameters; those beyond `DESIGNS` are thorough."""
    names = [*planned.FAMILIES, *ZOO.split(), *others]
    return [pytest.param(name, marks=() if name in (*DESIGNS, *others) else pytest.mark.thorough) for name in names]


@torch.no_grad()
def logits_of(model, tokens):
    """Logits at once; token 0 is padding on the left."""
    mask = (tokens != 0).long()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=False).logits


def turning(family):
    """A tiny model whose attention is far from uniform, with rotary positions of a base of its own."""
    kind, fields = family.partition("-")[0], FALCONS.get(family, {})
    if family in planned.FAMILIES:
        return tiny_models.build(family)
    rope = getattr(zoo.config_for(kind), "rope_parameters", None) or {}
    if "rope_theta" in rope:
        fields = fields | {"rope_parameters": rope | {"rope_theta": 300.0}}
    model = zoo.build(kind, "causal-lm", **fields)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key", "q_b_proj")) and weight.ndim == 2:
                weight.mul_(3.0)
    return model


def parts(model, granularity):
    """The modules of a block that hold the weights of its attention or its MLP."""
    attention, mlp = {"opt": ("self_attn", "fc1")}.get(model.config.model_type, branches_of(model))
    attention, mlp = (name.replace("post_attention_layernorm", "self_attn") for name in (attention, mlp))
    return attention if granularity == "attention" else mlp.replace("post_feedforward_layernorm", "mlp")


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("family", families(*FALCONS))
def test_fast_leaves_parts_of_any_family_out_and_computes_the_plan(family, tmp_path):
    """Whatever the norms' eps, which is not small here; at once, in steps, with padding, and after saving again."""
    model = turning(family)
    tokens = tiny_models.token_ids(2, 16, seed=3)
    tokens[1, :5] = 0
    read = tokens != 0
    for granularity, blocks in (("attention", [1, 3]), ("mlp", [2])):
        plan = planned.plan(model, blocks, granularity, values=planned.scalars(blocks, 3, granularity))
        oracle = planned.scaled(model, plan)
        oracle.set_experts_implementation("eager")  # the others know no float64
        oracle = oracle.float() if family == "gemma2" else oracle  # NaN in float64 with padding
        expected = logits_of(oracle, tokens)[read]
        report = export(plan, model, "fast", tmp_path / granularity)
        made = load(report.path)
        made.save_pretrained(tmp_path / f"again-{granularity}")
        for found in (made, load(tmp_path / f"again-{granularity}")):
            assert type(found) is type(made)
            assert relative(logits_of(found, tokens)[read], expected) < 1e-5
        stepped, cache = in_steps(made, tokens)
        assert relative(stepped[read], expected) < 1e-5
        assert len(cache.layers) == (1 if granularity == "attention" else 3)
        removed = [planned.layers(model)[n - 1].get_submodule(parts(model, granularity)) for n in blocks]
        assert report.parameters <= model.num_parameters() - sum(w.numel() for m in removed for w in m.parameters())
        assert find_anatomy(made).layers_with("attention") == ([2] if granularity == "attention" else [1, 2, 3])
