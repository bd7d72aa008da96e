"""A model that was tampered with, or described wrongly, is refused, and the message says what failed."""

import types

import pytest
import torch

import tiny_models
from fulldepth.execution import verify
from fulldepth.hf import anatomy_candidates
from refusals import refused

LLAMA = {
    "blocks": "layers",
    "attention": "self_attn",
    "mlp": "mlp",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "final_norm": "norm",
    "value": "self_attn.v_proj",
}
REFUSED = "LlamaForCausalLM is refused, because its anatomy could not be proven"


def check(model, **override):
    chosen = {**LLAMA, **override} if override else None
    return verify(anatomy_candidates(model, override=chosen), tiny_models.inputs(model))


@pytest.fixture
def llama():
    return tiny_models.build("llama")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({"attention": "mlp", "mlp": "self_attn"}, r"in layer 1, x \+ attention misses"),
        ({"mlp_branch": "self_attn"}, r"in layer 1, x' \+ mlp misses"),
        ({"attention_branch": "self_attn.q_proj"}, r"in layer 1, x \+ attention misses"),
        ({"design": "post"}, r"in layer 1, norm\(x \+ attention\) misses"),
        ({"final_norm": "layers.0.input_layernorm"}, "is not the model's last hidden state"),
        ({"head": "lm_head", "normed": False}, "the head applied to h_L misses the model's own logits"),
        ({"attention": "self_atn"}, r"Layer 1 .* has no known attention.*anatomy\.attention"),
    ],
)
def test_a_wrong_description_is_refused_with_the_reason(llama, override, reason):
    with refused(reason, REFUSED):
        check(llama, **override)


@pytest.mark.parametrize("nulls", [("attention", "mlp"), ("mlp",)])
def test_without_branches_the_residual_stream_alone_is_proven(llama, nulls):
    llama.train()
    found = check(llama, **dict.fromkeys(nulls))
    assert (found.branches, found.chained, found.classifier is None) == (False, True, False)
    assert llama.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())


def tamper(module, change):
    """Replace a module's forward by one that changes what it gives."""
    plain = module.forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: change(plain(*args, **kwargs)), module)


def test_a_block_that_adds_something_of_its_own_is_refused(llama):
    tamper(llama.model.layers[1], lambda out: out + 0.01 * out.roll(1, -1))
    with refused(r"in layer 2, x' \+ mlp misses the block's own state by .*e-0"):
        check(llama)
    assert not check(llama, attention=None, mlp=None).branches


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", lambda logits: 2 * torch.tanh(logits / 2)),  # a soft-cap that no configuration tells of
        ("gemma2", torch.atanh),  # likewise one that is told of and not applied
        ("llama", lambda logits: 1.01 * logits),
        ("llama", lambda logits: logits[..., :-1]),
        ("bert", lambda logits: logits.roll(1, 1)),
    ],
)
def test_a_head_that_does_more_than_the_lens_is_refused(name, change):
    model = tiny_models.build(name)

    def tampered(output):
        output.logits = change(output.logits / (3 if name == "gemma2" else 1))
        return output

    tamper(model, tampered)
    with refused("the head"):
        check(model)


@pytest.mark.parametrize(
    ("weight", "word"), [("model.layers.1.mlp.down_proj", "LlamaForCausalLM gives NaN"), ("lm_head", REFUSED)]
)
def test_broken_weights_are_refused(llama, weight, word):
    llama.get_parameter(f"{weight}.weight").data[3:] = float("nan")
    with refused(word):
        check(llama)


def test_a_parallel_model_called_serial_and_a_skewed_stream_are_refused(llama):
    neox = tiny_models.build("gpt_neox")
    serial = {"blocks": "layers", "attention": "attention", "mlp": "mlp", "mlp_norm": "post_attention_layernorm"}
    wrong, right = (
        anatomy_candidates(neox, override=serial | {"final_norm": "final_layer_norm", "design": design})
        for design in ("pre", "parallel")
    )
    with refused(r"in layer 1, x \+ attention misses"):
        verify(wrong, tiny_models.inputs(neox))
    assert verify([*wrong, *right], tiny_models.inputs(neox)).anatomy.family.design == "parallel"
    llama.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.01, *args[1:]))
    with refused("layer 2 of layers does not read what layer 1 gives"):
        check(llama)


@pytest.mark.parametrize("branches", [True, False])
def test_blocks_that_overwrite_their_input_are_refused(branches):
    model = tiny_models.toy("in-place")
    override = tiny_models.TOY_ANATOMY | ({} if branches else {"attention": None, "mlp": None})
    with refused(r"Toy is refused.*overwrote its own state.*in place"):
        verify(anatomy_candidates(model, override=override), tiny_models.inputs(model))
