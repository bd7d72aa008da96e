"""Plans of families beyond the table, against the stock model with hooks that zero or scale a branch."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from families import zoo
from fulldepth.execution import find_anatomy
from fulldepth.skip import export, load
from skip import planned
from skip.exports.test_export import relative

LLAMA_LIKE = "olmo phi phi3 granite mixtral qwen3_moe gpt_oss cohere starcoder2 smollm3 deepseek_v3 gemma"
PARTS = {
    **dict.fromkeys(LLAMA_LIKE.split(), ("self_attn", "mlp")),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "opt": ("self_attn", "fc2"),
    "falcon": ("self_attention", "mlp"),
}
"""Model type -> the modules whose output a block adds to its stream, read in the source of transformers."""
DESIGNS = ("granite", "cohere", "gpt_oss", "deepseek_v3", "olmo2", "opt", "falcon-two-norms")
"""On every push: a factor on branches, parallel blocks, stacked experts, latent attention, norms after branches."""
FALCONS = {"falcon-two-norms": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2}}


def families(*without):
    """All of them as parameters; those beyond `DESIGNS` are thorough."""
    rest = pytest.mark.thorough
    names = [name for name in [*PARTS, *FALCONS] if name not in without]
    return [pytest.param(name, marks=() if name in DESIGNS else rest) for name in names]


def blocks_of(model):
    body = model.base_model
    body = getattr(body, "decoder", body)
    return body.h if hasattr(body, "h") else body.layers


def zeroed(output):
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


@torch.no_grad()
def logits_without(model, tokens, blocks=(), granularity="layer"):
    """Logits at once, with hooks that zero branches; token 0 is padding on the left."""
    attention, mlp = PARTS.get(model.config.model_type, ("", ""))
    names = {"attention": (attention,), "mlp": (mlp,), "layer": (attention, mlp)}[granularity]
    mask = (tokens != 0).long()
    with ExitStack() as hooks:
        for layer in blocks:
            for name in names:
                module = blocks_of(model)[layer - 1].get_submodule(name)
                hooks.callback(module.register_forward_hook(lambda m, a, output: zeroed(output)).remove)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        return model(input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=False).logits


@torch.no_grad()
def logits_in_steps(model, tokens):
    """Half of the tokens at once, then one after the other with the cache."""
    mask, half, cache, found = (tokens != 0).long(), tokens.shape[1] // 2, None, []
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for begin, end in [(0, half), *((at, at + 1) for at in range(half, tokens.shape[1]))]:
        given = {"attention_mask": mask[:, :end], "position_ids": places[:, begin:end], "past_key_values": cache}
        outputs = model(input_ids=tokens[:, begin:end], use_cache=True, **given)
        cache = outputs.past_key_values
        found.append(outputs.logits)
    return torch.cat(found, dim=1), cache


class Scaled:
    """The definition of the scalars, by hooks on the stock modules: `x' = b_att A + s_att x`, `y = b_mlp M + s_mlp x'`.

    A block that multiplies what it adds by g adds `g (A + (s - 1) x / g)`. Parallel blocks add `b_mlp M` to
    `s_mlp (b_att A + s_att x)`.
    """

    def __init__(self, model, plan, hooks):
        self.gain, self.stream = getattr(model.config, "residual_multiplier", 1.0), None
        attention, mlp = PARTS[model.config.model_type]
        for layer, block in enumerate(blocks_of(model), start=1):
            own = dict.fromkeys(planned.NAMES, 1.0) | plan.scalars.get(str(layer), {})
            if layer in plan.blocks:
                own |= {f"b_{'att' if plan.granularity == 'attention' else 'mlp'}": 0.0}
            for module, hook in (
                (attention, lambda m, a, out, own=own: self.mix(out, own["b_att"], own["s_att"])),
                (mlp, lambda m, a, out, own=own: self.mix(out, own["b_mlp"], own["s_mlp"])),
            ):
                hooks.callback(block.get_submodule(module).register_forward_hook(hook).remove)
            hooks.callback(block.register_forward_pre_hook(self.begin, with_kwargs=True).remove)

    def begin(self, module, args, kwargs):
        self.stream = args[0] if args else kwargs["hidden_states"]

    def mix(self, output, b, s):
        branch = output[0] if isinstance(output, tuple) else output
        added = b * branch + (s - 1) / self.gain * self.stream.view_as(branch)
        self.stream = self.stream + self.gain * added.view_as(self.stream)
        return (added, *output[1:]) if isinstance(output, tuple) else added


def check_folding(model, blocks, granularity, healed, most):
    """Folded weights give the logits of hooks on the stock modules; afterwards the model is as it was."""
    tokens = zoo.inputs(model, 3)["input_ids"]
    values = planned.scalars(blocks, 3, granularity) if healed else None
    plan, plainly = planned.plan(model, blocks, granularity, values), logits_without(model, tokens)
    with ExitStack() as hooks:
        if healed:
            Scaled(model, plan, hooks)
        expected = logits_without(model, tokens, [] if healed else blocks, granularity)
    with planned.folded(model, plan) as folding:
        got = logits_without(model, tokens)
    assert relative(plainly, expected) > 1e-3
    assert relative(got, expected) < most
    assert folding.logit_error < most
    assert torch.equal(logits_without(model, tokens), plainly)


@pytest.mark.parametrize("family", families("falcon-two-norms"))
def test_plans_of_any_family_are_folded(family):
    """Skipped branches are zeros; scalars fold where norms see only the direction of the stream.

    In float64 and with eps far below: rounding of norms in float32 is all that is left.
    """
    model = zoo.build(family, "causal-lm")
    for granularity, blocks in (("attention", [2]), ("mlp", [3, 1]), ("layer", [2])):
        check_folding(model, blocks, granularity, False, 1e-6)
    if family == "olmo2":
        return
    model = model.double()
    model.set_experts_implementation("eager")  # the others know no float64
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(200)  # OLMo's eps is no setting
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 1e-30)
    for granularity, blocks in (("attention", [2]), ("mlp", [3, 1])):
        check_folding(model, blocks, granularity, True, 1e-5)


def turning(family):
    """A tiny model whose attention is far from uniform, with rotary positions of a base of its own."""
    kind, fields = family.partition("-")[0], FALCONS.get(family, {})
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
    attention, mlp = PARTS[model.config.model_type]
    own = {"olmo2": ("self_attn", "mlp"), "opt": ("self_attn", "fc1")}.get(model.config.model_type, (attention, mlp))
    return {"attention": own[:1], "mlp": {*own[1:], mlp}}[granularity]


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("family", families())
def test_fast_leaves_parts_of_any_family_out_and_computes_the_plan(family, tmp_path):
    """Healed attention and unhealed MLPs; at once, by steps with a cache, with padding, and after saving again."""
    model = turning(family)
    tokens = zoo.inputs(model, 3)["input_ids"]
    tokens[1, :5] = 0
    read = tokens != 0
    for granularity, blocks, healed in (("attention", [1, 3], True), ("mlp", [2], family == "olmo2")):
        values = planned.scalars(blocks, 3, granularity) if healed else None
        plan = planned.plan(model, blocks, granularity, values=values)
        with ExitStack() as hooks:
            if healed:
                Scaled(model, plan, hooks)
            expected = logits_without(model, tokens, [] if healed else blocks, granularity)
        report = export(plan, model, "fast", tmp_path / granularity)
        made = load(report.path)
        made.save_pretrained(tmp_path / f"again-{granularity}")
        for found in (made, load(tmp_path / f"again-{granularity}")):
            assert type(found) is type(made)
            assert relative(logits_without(found, tokens)[read], expected[read]) < 1e-5
        stepped, cache = logits_in_steps(made, tokens)
        assert relative(stepped[read], expected[read]) < 1e-5
        assert len(cache.layers) == (1 if granularity == "attention" else 3)
        removed = [blocks_of(model)[n - 1].get_submodule(part) for n in blocks for part in parts(model, granularity)]
        assert report.parameters <= model.num_parameters() - sum(w.numel() for m in removed for w in m.parameters())
        assert find_anatomy(made).layers_with("attention") == ([2] if granularity == "attention" else [1, 2, 3])
