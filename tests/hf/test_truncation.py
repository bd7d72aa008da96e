"""`truncated`: the first layers of a model against the hidden states of the whole one, by transformers alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from torch import nn

import tiny_models
from families import verdicts, zoo
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import Switches, anatomy_candidates, truncated

NAMES = [name for name in tiny_models.BUILDERS | tiny_models.UNLISTED if not name.startswith(("detr", "clip"))]


def blocks_of(model):
    """The longest list of modules, found without the package's table."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def logits_of(model, inputs):
    output = model(**inputs)
    return next(output[name] for name in ("logits", "prediction_logits", "last_hidden_state") if name in output)


def stopped(model, layers, blocks=blocks_of):
    """The whole model, whose later blocks return what they are given: an oracle without configurations."""
    whole = copy.deepcopy(model)
    for block in blocks(whole)[layers:]:
        original = block.forward

        def identity(*args, forward=original, **kwargs):
            state = args[0] if args else kwargs["hidden_states"]
            output = forward(*args, **kwargs)
            return (state, *output[1:]) if isinstance(output, tuple) else state

        block.forward = identity
    return whole


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_first_layers_are_a_model_of_the_same_class(name):
    model = tiny_models.build(name, dtype=torch.float64)
    inputs = tiny_models.inputs(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = model.config.to_dict()
    for layers in (1, 2, 3):
        cut = truncated(find_anatomy(model), layers)
        assert type(cut) is type(model)
        assert len(blocks_of(cut)) == layers
        torch.testing.assert_close(
            logits_of(cut, inputs), logits_of(stopped(model, layers), inputs), rtol=1e-9, atol=1e-9
        )
        own = {id(parameter) for parameter in model.parameters()}
        assert all(id(parameter) in own for parameter in cut.parameters())
    assert model.config.to_dict() == config
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


@torch.no_grad()
def test_lists_of_the_configuration_are_cut_and_survive_saving(tmp_path):
    model = tiny_models.build("gemma3")
    cut = truncated(model, 2)
    assert cut.config.layer_types == ["sliding_attention", "full_attention"]
    cut.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    inputs = tiny_models.inputs(model)
    assert torch.equal(again(**inputs).logits, cut(**inputs).logits)


@torch.no_grad()
@pytest.mark.parametrize("tower", ["text", "vision"])
def test_one_tower_of_two_is_cut(tower):
    model = tiny_models.build("clip")
    (anatomy,) = anatomy_candidates(model, tower=tower)
    cut = truncated(anatomy, 2)
    assert getattr(cut.config, f"{tower}_config").num_hidden_layers == 2
    assert cut.config.to_dict() != model.config.to_dict()


@torch.no_grad()
def test_shared_layers_are_cut_where_their_groups_allow_it():
    plain = zoo.build("albert", "masked-lm", num_hidden_layers=4)
    assert truncated(plain, 3).config.num_hidden_layers == 3
    grouped = zoo.build("albert", "masked-lm", num_hidden_layers=4, num_hidden_groups=2)
    cut = truncated(grouped, 2)
    inputs = zoo.inputs(grouped, 1)
    expected = grouped.predictions(grouped.albert(**inputs, output_hidden_states=True).hidden_states[2])
    torch.testing.assert_close(cut(**inputs).logits, expected)
    with pytest.raises(FulldepthError, match="share 2 groups of weights; use 4 or a multiple of it"):
        truncated(zoo.build("albert", "masked-lm", num_hidden_layers=8, num_hidden_groups=2), 5)


@pytest.mark.parametrize(("name", "layers"), [("llama", 0), ("llama", 4), ("bert", -1)])
def test_layers_out_of_range_are_refused(name, layers):
    with pytest.raises(FulldepthError, match=f"has 3 layers; it cannot be cut to its first {layers}"):
        truncated(tiny_models.build(name), layers)


def test_models_that_cannot_be_cut_are_refused_with_the_reason():
    t5 = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_heads=2))
    with pytest.raises(FulldepthError, match="it is an encoder-decoder"):
        truncated(anatomy_candidates(t5, tower="decoder")[0], 2)
    with pytest.raises(FulldepthError, match=r"its final norm also stands between layers \(auxiliary_loss\)"):
        truncated(tiny_models.build("detr-auxiliary"), 2)
    model = tiny_models.build("llama")
    anatomy = find_anatomy(model)
    with Switches(anatomy) as switches:
        switches.skip([2])
        with pytest.raises(FulldepthError, match="functions of its modules are replaced"):
            truncated(anatomy, 2)


@torch.no_grad()
@pytest.mark.parametrize("encoder_layers", [2, 3])
def test_of_a_detector_the_decoder_alone_is_cut(encoder_layers):
    """Against a stock model that is built with so many decoder layers, its backbone and encoder the same."""
    config = copy.deepcopy(tiny_models.build("detr").config)
    config.encoder_layers = encoder_layers
    torch.manual_seed(0)
    model = tf.DetrForObjectDetection(config).to(torch.float64).eval()
    before, weights = model.config.to_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    inputs = {"pixel_values": torch.rand(2, 3, 32, 40, dtype=torch.float64), "pixel_mask": torch.ones(2, 32, 40)}
    inputs["pixel_mask"][1, :, 30:] = 0
    for layers in (1, 2, 3):
        cut = truncated(find_anatomy(model), layers)
        stock = tf.DetrForObjectDetection(tf.DetrConfig(**{**before, "decoder_layers": layers})).double().eval()
        assert not stock.load_state_dict(model.state_dict(), strict=False).missing_keys
        assert cut.config.to_dict() == {**before, "decoder_layers": layers}
        assert cut.state_dict().keys() == stock.state_dict().keys()
        got, expected = cut(**inputs), stock(**inputs)
        torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-12)
        torch.testing.assert_close(got.pred_boxes, expected.pred_boxes, rtol=0, atol=1e-12)
    assert model.config.to_dict() == before
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_every_stock_decoder_is_right_or_refused():
    """No decoder of the table is cut wrongly: logits against the whole model with later blocks switched off."""
    right, no_tensor_in = set(), {"openai-gpt"}  # its blocks return lists
    for model_type in set(verdicts.CAUSAL.split()) - no_tensor_in:
        model = zoo.build(model_type, "causal-lm")
        try:
            cut = truncated(find_anatomy(model), 2)
        except FulldepthError:
            continue
        inputs = zoo.inputs(model, 3)
        whole = stopped(model, 2, lambda whole: find_anatomy(whole).block_list)
        got, expected = (verdicts.stock_output(each, inputs).logits for each in (cut, whole))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()), msg=model_type)
        right.add(model_type)
    assert right >= {"llama", "gemma3_text", "gpt2", "qwen3_moe", "bart", "olmo2", "falcon", "opt", "smollm3", "jamba"}
    assert len(right) > 90
