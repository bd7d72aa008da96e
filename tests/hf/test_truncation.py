"""`truncated`: the first layers of a model against the hidden states of the whole one, by transformers alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from torch.testing import assert_close

import tiny_models
from families import zoo
from fulldepth.execution import find_anatomy
from fulldepth.exit import export_layers
from fulldepth.hf import Switches, anatomy_candidates, truncated
from fulldepth.skip.exports.formats import FORMATS, check_format
from fulldepth.skip.search import search
from refusals import refused
from skip import planned
from skip.word_tokenizer import tokenizer


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert", "vit", "depth_llama-tree"])
def test_the_first_layers_are_a_model_of_the_same_class(name):
    """That their logits are right for every type is tested with the page of types."""
    model = tiny_models.build(name, dtype=torch.float64)
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    for layers in (1, 3):
        cut = truncated(find_anatomy(model), layers)
        assert type(cut) is type(model)
        assert find_anatomy(cut).num_layers == layers
        own = {id(parameter) for parameter in model.parameters()}
        assert all(id(parameter) in own for parameter in cut.parameters())
    inputs = tiny_models.inputs(model)
    assert_close(cut(**inputs)[0], model(**inputs)[0], rtol=0, atol=0)
    assert model.config.to_dict() == config
    assert tiny_models.same_weights(model, before)


@torch.no_grad()
def test_shared_layers_are_cut_where_their_groups_allow_it():
    plain = zoo.build("albert", "masked-lm", num_hidden_layers=4)
    assert truncated(plain, 3).config.num_hidden_layers == 3
    grouped = zoo.build("albert", "masked-lm", num_hidden_layers=4, num_hidden_groups=2)
    cut = truncated(grouped, 2)
    inputs = zoo.inputs(grouped, 1)
    expected = grouped.predictions(grouped.albert(**inputs, output_hidden_states=True).hidden_states[2])
    assert_close(cut(**inputs).logits, expected)


def skipped(layer):
    model = tiny_models.build("llama")
    switches = Switches(find_anatomy(model)).__enter__()
    switches.skip([layer])
    return find_anatomy(model)


@pytest.mark.parametrize(
    ("model", "layers", "reason"),
    [
        (lambda: tiny_models.build("llama"), 0, "3 layers"),
        (lambda: tiny_models.build("llama"), 4, "3 layers"),
        (
            lambda: anatomy_candidates(tf.T5ForConditionalGeneration(zoo.config_for("t5")), tower="decoder")[0],
            2,
            "encoder-decoder",
        ),
        (lambda: tiny_models.build("detr"), 2, "encoder-decoder"),
        (lambda: skipped(2), 2, "replaced"),
        (
            lambda: zoo.build("jamba", "causal-lm"),
            1,
            "class fails with them alone .`get_seq_length` can only",
        ),
        (lambda: zoo.build("albert", "masked-lm", num_hidden_layers=8, num_hidden_groups=2), 5, "multiple of it"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_with_the_reason(model, layers, reason):
    with refused(reason):
        truncated(model(), layers)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_layers_that_were_removed_by_hand_are_refused_with_both_numbers(name, tmp_path):
    """A measurement needs no configuration; what writes a model does."""
    model = tiny_models.build(name)
    anatomy = find_anatomy(model)
    plan = planned.plan(model, [2], "attention", None)
    for writes in (lambda: truncated(model, 1), lambda: search(model, [], 1), lambda: apply(plan, model, tmp_path)):
        del anatomy.block_list[1:2]
        with refused(r"has [12] layers in \S+, and its configuration makes 3"):
            writes()
        anatomy.block_list.append(anatomy.block_list[0])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_layers_that_are_one_module_are_refused_before_anything_is_written(name, tmp_path):
    model = tiny_models.build(name)
    blocks = find_anatomy(model).block_list
    blocks[1] = blocks[0]
    with refused("its layers share modules"):
        export_layers(model, tmp_path / "made", layers=2, tokenizer=tokenizer())
    assert not (tmp_path / "made").exists()


def apply(plan, model, folder):
    return check_format(model, plan, FORMATS["folded"])
