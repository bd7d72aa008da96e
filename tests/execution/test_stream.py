"""The stream from block to block: shared blocks, wrong lists, partial stacks, heads found by following tensors."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
import transformers as tf
from torch.testing import assert_close

import tiny_models
from families import zoo
from fulldepth.execution import capture, find_anatomy, verify
from fulldepth.hf import anatomy_candidates
from refusals import refused


def albert_by_hand(model, inputs):
    """h_0..h_L of ALBERT: the embeddings in the blocks' width, and the state after each call of a group."""
    body = model.albert
    state = body.encoder.embedding_hidden_mapping_in(body.embeddings(inputs["input_ids"]))
    mask = torch.zeros(inputs["attention_mask"].shape, dtype=state.dtype)
    mask = mask.masked_fill(inputs["attention_mask"] == 0, torch.finfo(state.dtype).min)[:, None, None]
    groups, layers = body.encoder.albert_layer_groups, model.config.num_hidden_layers
    states = [state]
    for layer in range(layers):
        for inner in groups[int(layer / (layers / len(groups)))].albert_layers:
            state = inner(state, attention_mask=mask)
        states.append(state)
    return states


@torch.no_grad()
@pytest.mark.parametrize(("groups", "inner", "branches"), [(2, 1, True), (1, 2, False)])
def test_albert_has_a_layer_for_each_call_of_a_shared_block(groups, inner, branches):
    sizes = {"num_hidden_layers": 4, "num_hidden_groups": groups, "inner_group_num": inner}
    model = zoo.build("albert", "masked-lm", **sizes).double()
    inputs = tiny_models.inputs(model)
    found = verify(anatomy_candidates(model), inputs, optional=("branches",))
    assert (found.anatomy.num_layers, found.branches) == (4, branches)
    assert found.classifier is not None
    with capture(found.anatomy, ["residual"]) as activations:
        for _ in range(2):  # the second pass starts at layer 1 again
            model(**inputs)
    expected = albert_by_hand(model, inputs)
    real = inputs["attention_mask"].bool()
    for got, state in zip(activations["residual"], expected, strict=True):
        assert_close(got[real], state[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("model_type", "task", "options", "reason"),
    [
        ("deberta-v2", "masked-lm", {"conv_kernel_size": 3}, "layer 2 of encoder.layer does not read"),
        ("xlm", "causal-lm", {}, "attentions"),
        ("funnel", "masked-lm", {}, "is only a part of the stack"),
    ],
)
def test_lists_that_are_not_the_stream_are_refused(model_type, task, options, reason):
    model = zoo.build(model_type, task, **options)
    with refused(reason):
        verify(anatomy_candidates(model), zoo.inputs(model, seed=1), optional=("head", "branches"))


def test_a_list_that_ends_before_the_model_does_is_refused():
    """Blocks of another class after the list, as where a list holds the first half of the layers."""
    model = tiny_models.build("llama")
    extra = tiny_models.ToyBlock("tensor")
    body, plain = model.model, model.model.norm.forward
    body.norm.forward = MethodType(lambda self, states: plain(extra(states)), body.norm)
    assert verify(anatomy_candidates(model), tiny_models.inputs(model)).classifier is not None  # a norm of its own kind
    body.norm.forward = plain
    body.register_forward_hook(lambda module, args, output: output.__class__(last_hidden_state=extra(output[0])))
    with refused("is not the model's last hidden state"):
        verify(anatomy_candidates(model), tiny_models.inputs(model))


def test_a_block_that_does_not_run_is_noticed():
    model = tiny_models.build("llama")
    model.model.config.num_hidden_layers = 2  # the forward pass takes so many of the three blocks
    with refused("1 of the 3 blocks of layers do not run"):
        verify(anatomy_candidates(model), tiny_models.inputs(model))


def test_the_text_of_a_model_is_found_beside_a_deeper_vision_tower():
    config = zoo.config_for("llava")
    config.vision_config.num_hidden_layers = 7
    torch.manual_seed(0)
    model = tf.LlavaModel(config).eval()
    assert verify(anatomy_candidates(model), zoo.inputs(model, seed=1)).anatomy.num_layers == 3
    vision = anatomy_candidates(tf.SiglipModel(zoo.config_for("siglip")).eval(), tower="vision")
    assert vision[0].config.image_size == 32  # by which pictures are scaled where there is no processor
    pixels = torch.randn(2, 3, 32, 32)
    assert verify(vision, {"pixel_values": pixels}).anatomy.family.modality == "images"


def test_an_unlisted_family_is_proven_on_inputs_of_its_own_kind():
    model = zoo.build("dinov2", "image-classification").train()
    assert find_anatomy(model).num_layers == 3
    assert model.training


@pytest.mark.parametrize("decodes", [True, False])
def test_a_model_that_sees_the_next_token_has_no_lens(decodes):
    model = zoo.build("bert", "causal-lm", is_decoder=decodes)
    found = verify(anatomy_candidates(model), zoo.inputs(model, seed=1), optional=("head",))
    assert (found.classifier is not None) is decodes
    assert ("reads later tokens" in found.unproven.get("head", "")) is not decodes


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "olmo2"])
@pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 1, 1, 2, 2)])
def test_a_module_may_stand_in_several_places_of_the_list(name, order):
    model = tiny_models.build(name)
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in order])
    model.config.num_hidden_layers = len(order)
    inputs = tiny_models.inputs(model)
    found = verify(anatomy_candidates(model), inputs, optional=("branches",))
    assert found.anatomy.num_layers == len(order)
    with capture(found.anatomy, ["residual"]) as activations:
        states = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        for got, state in zip(activations["residual"][:-1], states[:-1], strict=True):
            assert_close(got, state)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (tf.BertForQuestionAnswering, {**tiny_models.ENCODER, "num_labels": 2}),
        (tf.LlamaForQuestionAnswering, tiny_models.DECODER),
        (
            tf.DistilBertForQuestionAnswering,
            {"vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
        ),
        (tf.ViTForMaskedImageModeling, {**tiny_models.VISION, "encoder_stride": 4}),
    ],
)
def test_the_stream_ends_before_predictions_of_any_name(kind, options):
    """These models give no last hidden state, and call their predictions start_logits or reconstruction."""
    model = tiny_models.strengthened(kind(kind.config_class(**options)).eval(), 4.0)
    inputs = tiny_models.inputs(model)
    found = verify(anatomy_candidates(model), inputs, optional=("branches", "head"))
    assert found.branches
    assert found.classifier is None
    with capture(found.anatomy, ["residual"]) as activations:
        model(**inputs)
    stock = model(**inputs, output_hidden_states=True).hidden_states
    for got, state in zip(activations["residual"][:-1], stock, strict=False):
        assert_close(got, state)
    assert_close(found.anatomy.normalise(activations["residual"][-1]), found.anatomy.body(**inputs).last_hidden_state)
