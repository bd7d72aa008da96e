"""Attention and MLP found by sums: against the table's names, blocks with decoys, and stock models with zeros."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import tiny_models as tm
from families import zoo
from fulldepth.execution import capture, find_anatomy, verify
from fulldepth.hf import anatomy_candidates, skipping
from refusals import refused

ROLES = ("attention", "attention_branch", "mlp", "mlp_branch", "mlp_norm", "value")
LISTED = [name for name, tower in tm.DESIGNS if tower is None and name in tm.BUILDERS and "detr" not in name]


@pytest.mark.parametrize("name", [name for name in LISTED if name not in ("depth_llama-tree", "depth_llama-hyper")])
def test_sums_name_what_the_table_names(name):
    """The hand-written row of a family against the same model of which the blocks alone are known."""
    model = tm.build(name)
    [listed] = anatomy_candidates(model)
    nameless = dict.fromkeys((*ROLES, "attention_norm"))
    proposed = replace(listed, family=replace(listed.family, **nameless, design="pre", is_proposed=True))
    found = verify([proposed], tm.inputs(model)).anatomy
    assert found.family.design == listed.family.design
    for layer in listed.layers:
        for role in ROLES:
            if role == "value" and listed.family.value_part != "whole":
                continue  # a part of a projection of queries, keys and values has no name
            if role == "mlp_norm" and listed.family.design == "parallel":
                continue
            assert found.part(layer, role) is listed.part(layer, role), (layer, role)


class Container(nn.Module):
    """A module that adds what is inside to its input itself, as the attention of BLOOM does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states, residual):
        """residual + inner(states)."""
        return residual + self.inner(states)


class Mixed(nn.Module):
    """The mean over all positions so far, then a matrix: reads and gives states."""

    def __init__(self):
        super().__init__()
        self.end = nn.Linear(tm.WIDTH, tm.WIDTH)

    def forward(self, hidden_states):
        """[B, T, D] in a tuple, as attention gives it."""
        count = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        return self.end(hidden_states.cumsum(1) / count), None


class Scale(nn.Module):
    """A gain for each channel, behind a branch."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(tm.WIDTH) + 0.5)

    def forward(self, states):
        """states * gain."""
        return states * self.gain


class Block(nn.Module):
    """A block whose modules have names that say nothing, with modules whose outputs it does not add."""

    def __init__(self, design, scaled, contained, other_name):
        super().__init__()
        self.design, self.contained, self.name = design, contained, "q" if other_name else "p"
        self.norm_1, self.norm_2 = nn.LayerNorm(tm.WIDTH), nn.LayerNorm(tm.WIDTH)
        setattr(self, self.name, Mixed())
        self.r = nn.Sequential(nn.Linear(tm.WIDTH, 24), nn.GELU(), nn.Linear(24, tm.WIDTH))
        self.decoy = nn.Linear(tm.WIDTH, tm.WIDTH)
        self.shared = nn.Dropout(0.5)  # runs behind both branches, so it is neither
        self.scale_1, self.scale_2 = (Scale(), Scale()) if scaled else (nn.Identity(), nn.Identity())
        if contained:
            self.c = Container(self.r)

    def forward(self, hidden_states):
        """The sums of the design."""
        x = hidden_states
        mix = getattr(self, self.name)
        self.decoy(x)
        if self.design == "post":
            x = self.norm_1(x + self.shared(self.scale_1(mix(x)[0])))
            return self.norm_2(x + self.shared(self.scale_2(self.r(x))))
        a = self.shared(self.scale_1(mix(self.norm_1(x))[0]))
        if self.design == "parallel":
            return x + a + self.shared(self.scale_2(self.r(self.norm_2(x))))
        x = x + a
        self.decoy(x)
        if self.contained:
            return self.c(self.norm_2(x), x)
        return x + self.shared(self.scale_2(self.r(self.norm_2(x))))


def toy_of(make_block):
    """A `Toy` with blocks of one's own."""
    model = tm.toy()
    model.layers = nn.ModuleList(make_block(number) for number in range(len(model.layers)))
    return model.eval()


@given(
    design=st.sampled_from(["pre", "post", "parallel"]),
    scaled=st.booleans(),
    contained=st.booleans(),
    mixed_names=st.booleans(),
    silent=st.booleans(),
    massive=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_branches_are_found_whatever_they_are_called(
    design, scaled, contained, mixed_names, silent, massive, dtype, seed
):
    torch.manual_seed(seed)
    contained = contained and design == "pre"
    model = toy_of(lambda number: Block(design, scaled, contained, mixed_names and number == 1)).to(dtype)
    if silent:  # the first block's branches give nothing, as in a folded export
        for module in (model.layers[0].p.end, model.layers[0].r[2]):
            for weight in module.parameters():
                weight.data.zero_()
    inputs = tm.inputs(model)
    if massive and design != "post":  # a channel of the first token, beside which branches are small
        model.embed.weight.data[inputs["input_ids"][0, 0], 5] = 3000.0
    found = verify(anatomy_candidates(model), inputs, optional=("branches",))
    family = found.anatomy.family
    assert found.branches, found.unproven
    assert (family.design, family.mlp) == (design, "r")
    assert set(family.attention.split("|")) == ({"p", "q"} if mixed_names else {"p"})
    assert family.mlp_branch == ("scale_2" if scaled and not contained else "r")
    if scaled:
        assert family.attention_branch == "scale_1"
    norms = {"pre": (None, "norm_2"), "post": ("norm_1", "norm_2"), "parallel": (None, None)}
    assert (family.attention_norm, family.mlp_norm) == norms[design]


class Louder(nn.Module):
    """A block that multiplies the stream, or adds a parameter to it: no sum of two modules' outputs."""

    def __init__(self, factor, shift):
        super().__init__()
        self.block = Block("pre", False, False, False)
        self.factor, self.shift = factor, nn.Parameter(torch.full((tm.WIDTH,), shift))

    def forward(self, hidden_states):
        """factor * block + shift."""
        return self.factor * self.block(hidden_states) + self.shift


@pytest.mark.parametrize(("factor", "shift"), [(1.02, 0.0), (1.0, 0.05)])
def test_a_block_that_adds_more_than_two_modules_has_no_known_branches(factor, shift):
    model = toy_of(lambda number: Louder(factor, shift))
    found = verify(anatomy_candidates(model), tm.inputs(model), optional=("branches",))
    assert not found.branches
    assert found.unproven["branches"] == "no two modules of a block give what it adds to its input"
    assert (found.anatomy.family.attention, found.anatomy.family.mlp) == (None, None)


class MlpFirst(nn.Module):
    """A block that computes its MLP before its attention, both of x or one after the other."""

    def __init__(self, parallel):
        super().__init__()
        self.parallel, self.norm_1, self.norm_2 = parallel, nn.LayerNorm(tm.WIDTH), nn.LayerNorm(tm.WIDTH)
        self.attention, self.feed = Mixed(), nn.Linear(tm.WIDTH, tm.WIDTH)

    def forward(self, hidden_states):
        """The sum of both."""
        added = self.feed(self.norm_1(hidden_states))
        middle = hidden_states if self.parallel else hidden_states + added
        mixed = self.attention(self.norm_2(middle))[0]
        return middle + mixed + added if self.parallel else middle + mixed


def test_an_mlp_that_is_computed_first_is_not_taken_for_the_attention():
    parallel, serial = toy_of(lambda number: MlpFirst(True)), toy_of(lambda number: MlpFirst(False))
    family = verify(anatomy_candidates(parallel), tm.inputs(parallel), optional=("branches",)).anatomy.family
    assert (family.design, family.attention, family.mlp) == ("parallel", "attention", "feed")
    assert not verify(anatomy_candidates(serial), tm.inputs(serial), optional=("branches",)).branches


def test_blocks_of_two_designs_have_no_known_branches():
    model = toy_of(lambda number: Block("post" if number else "pre", False, False, False))
    assert not verify(anatomy_candidates(model), tm.inputs(model), optional=("branches",)).branches


MIXERS = {
    "bamba": "mamba|self_attn",
    "granitemoehybrid": "mamba|self_attn",
    "jamba": "mamba|self_attn",
    "lfm2_moe": "conv|self_attn",
    "recurrent_gemma": "temporal_block",
    "inkling_text": "self_attn",
    "dbrx": "norm_attn_norm.attn",
}
"""Model type -> what takes the place of attention."""


@torch.no_grad()
@pytest.mark.parametrize("model_type", MIXERS)
def test_layers_without_a_found_branch_are_the_stock_model_with_its_output_zeroed(model_type):
    """Also while text is generated, with and without a cache."""
    model = zoo.build(model_type, "causal-lm", **({"num_local_experts": 0} if model_type == "granitemoehybrid" else {}))
    anatomy = find_anatomy(model)
    assert anatomy.family.attention == MIXERS[model_type]
    inputs = zoo.inputs(model, seed=3)
    whole = model(**inputs, use_cache=False).logits
    for part in ("attention", "mlp"):
        for layer in anatomy.layers:
            branch = anatomy.part(layer, f"{part}_branch")
            hook = branch.register_forward_hook(lambda module, args, output: zeros_like(output))
            expected = model(**inputs, use_cache=False).logits
            hook.remove()
            assert not torch.equal(expected, whole)
            with skipping(anatomy, [layer], part):
                assert_close(model(**inputs, use_cache=False).logits, expected)
                texts = [
                    model.generate(inputs["input_ids"][:1], max_new_tokens=4, do_sample=False, use_cache=cached)
                    for cached in (True, False)
                ]
                assert torch.equal(*texts)


def zeros_like(output):
    """What a module gives, with zeros for its state."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def test_a_part_that_adds_the_stream_itself_is_measured_and_not_skipped():
    model = zoo.build("bloom", "causal-lm")
    assert verify(anatomy_candidates(model), zoo.inputs(model, seed=1)).branches
    with refused("its attention or its MLP adds the stream itself"), skipping(find_anatomy(model), [1]):
        pass


@torch.no_grad()
def test_the_branches_of_a_scaled_encoder_are_what_dinov2_adds():
    """Norm, attention and the scale behind it, and the same for the MLP, called one by one."""
    model = tm.strengthened(tf.Dinov2Model(tf.Dinov2Config(**tm.VISION, drop_path_rate=0.1)), 4.0).double().eval()
    anatomy = find_anatomy(model)
    sites = ("residual", "attention_output", "attention_branch", "mlp_branch")
    with capture(anatomy, sites) as activations:
        model(**tm.inputs(model))
        states = {site: activations[site] for site in sites}
    for number, block in enumerate(model.encoder.layer):
        x = states["residual"][number]
        added = block.layer_scale1(block.attention(block.norm1(x))[0])
        assert_close(states["attention_branch"][number], added)
        assert_close(states["attention_output"][number], x + added)
        assert_close(states["mlp_branch"][number], block.layer_scale2(block.mlp(block.norm2(x + added))))
