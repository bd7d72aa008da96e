"""A model that was tampered with, or described wrongly, is refused, and the message says what failed."""

import types

import pytest
import torch
import transformers as tf

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.execution import verify
from fulldepth.hf import anatomy_candidates

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


def test_a_right_description_stands(llama):
    found = check(llama, name="mine")
    assert found.branches
    assert found.chained
    assert found.classifier is not None


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({"attention": "mlp", "mlp": "self_attn"}, r"in layer 1, x \+ attention misses"),
        ({"mlp_norm": "input_layernorm"}, r"in layer 1, x \+ attention misses"),
        ({"mlp_branch": "mlp.up_proj"}, "layer 1"),
        ({"mlp_branch": "self_attn"}, r"in layer 1, x' \+ mlp misses"),
        ({"attention_branch": "self_attn.q_proj"}, r"in layer 1, x \+ attention misses"),
        ({"branch_scale": "rms_norm_eps"}, r"in layer 1, x \+ attention misses"),
        ({"design": "post"}, r"in layer 1, norm\(x \+ attention\) misses"),
        ({"final_norm": "layers.0.input_layernorm"}, "is not the model's last hidden state"),
        ({"head": "lm_head", "normed": False}, "the head applied to h_L misses the model's own logits"),
        ({"attention": "self_atn"}, r"Layer 1 .* has no known attention.*anatomy\.attention"),
    ],
)
def test_a_wrong_description_is_refused_with_the_reason(llama, override, reason):
    with pytest.raises(FulldepthError, match=reason) as error:
        check(llama, **override)
    assert REFUSED in str(error.value)
    assert "without these the residual stream alone is measured" in str(error.value)


def test_a_parallel_model_called_serial_is_refused():
    neox = tiny_models.build("gpt_neox")
    serial = {
        "blocks": "layers",
        "attention": "attention",
        "mlp": "mlp",
        "mlp_norm": "post_attention_layernorm",
        "final_norm": "final_layer_norm",
    }
    with pytest.raises(FulldepthError, match=r"pre design: in layer 1, x \+ attention misses"):
        verify(anatomy_candidates(neox, override=serial), tiny_models.inputs(neox))
    assert verify(anatomy_candidates(neox, override=serial | {"design": "parallel"}), tiny_models.inputs(neox)).branches


@pytest.mark.parametrize("nulls", [("attention", "mlp"), ("attention",), ("mlp",)])
def test_without_branches_the_residual_stream_alone_is_proven(llama, nulls):
    found = check(llama, **dict.fromkeys(nulls))
    assert not found.branches
    assert found.chained
    assert found.classifier is not None


def test_without_branches_the_head_is_still_checked(llama):
    with pytest.raises(FulldepthError, match="misses the model's own logits"):
        check(llama, attention=None, mlp=None, head="lm_head", normed=False)


def tamper(module, change):
    """Replace a module's forward by one that changes what it gives."""
    plain = module.forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: change(plain(*args, **kwargs)), module)


def test_a_block_that_adds_something_of_its_own_is_refused(llama):
    tamper(llama.model.layers[1], lambda out: out + 0.01 * out.roll(1, -1))
    with pytest.raises(FulldepthError, match=r"in layer 2, x' \+ mlp misses the block's own state by .*e-0"):
        check(llama)
    assert not check(llama, attention=None, mlp=None).branches


def test_a_block_that_scales_attention_before_it_adds_it_is_refused(llama):
    block = llama.model.layers[2]

    def forward(self, hidden_states, **kwargs):
        after = hidden_states + 0.9 * self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        return after + self.mlp(self.post_attention_layernorm(after))

    block.forward = types.MethodType(forward, block)
    with pytest.raises(FulldepthError, match=r"in layer 3, x \+ attention misses"):
        check(llama)


def test_blocks_that_do_not_read_what_the_one_before_gave_are_refused():
    model = tiny_models.build("llama")
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.01, *args[1:]))
    with pytest.raises(FulldepthError, match="layer 2 of layers does not read what layer 1 gives"):
        check(model)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", lambda logits: 2 * torch.tanh(logits / 2)),  # a soft-cap that no configuration tells of
        ("gemma2", torch.atanh),  # likewise one that is told of and not applied
        ("llama", lambda logits: 1.01 * logits),
        ("gpt2", lambda logits: logits + 0.1 * logits.std() * (torch.arange(tiny_models.VOCAB) == 7)),
        ("bert", lambda logits: logits.roll(1, 1)),
        ("vit", lambda logits: logits.flip(-1)),
    ],
)
def test_a_head_that_does_more_than_the_lens_is_refused(name, change):
    model = tiny_models.build(name)

    def tampered(output):
        output.logits = change(output.logits / (3 if name == "gemma2" else 1))
        return output

    tamper(model, tampered)
    with pytest.raises(FulldepthError, match="the head applied to h_L misses the model's own logits by"):
        check(model)


def test_a_head_of_another_width_is_refused(llama):
    def cut(output):
        output.logits = output.logits[..., :-1]
        return output

    tamper(llama, cut)
    with pytest.raises(FulldepthError, match=r"logits of shape \(2, 10, 96\), the model \(2, 10, 95\)"):
        check(llama)


def test_a_soft_cap_forgotten_by_the_lens_is_refused(monkeypatch):
    model = tiny_models.build("gemma2")
    plain = tf.Gemma2ForCausalLM.forward

    def forward(self, *args, **kwargs):
        monkeypatch.setattr(self.config, "final_logit_softcapping", 3.0)
        output = plain(self, *args, **kwargs)
        monkeypatch.setattr(self.config, "final_logit_softcapping", None)
        return output

    model.config.final_logit_softcapping = None
    monkeypatch.setattr(tf.Gemma2ForCausalLM, "forward", forward)
    with pytest.raises(FulldepthError, match="misses the model's own logits"):
        check(model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("weight", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_broken_weights_are_refused(llama, weight, bad):
    with torch.no_grad():
        llama.get_parameter(weight).fill_(bad)
    with pytest.raises(FulldepthError, match="NaN or infinite"):
        check(llama)


def test_a_broken_head_is_refused(llama):
    with torch.no_grad():
        llama.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(FulldepthError, match=REFUSED):
        check(llama)


def test_a_broken_final_norm_is_refused(llama):
    with torch.no_grad():
        llama.model.norm.weight[3] = float("nan")
    with pytest.raises(FulldepthError, match=REFUSED):
        check(llama)


@pytest.mark.parametrize("branches", [True, False])
def test_blocks_that_overwrite_their_input_are_refused(branches):
    model = tiny_models.toy("in-place")
    override = tiny_models.TOY_ANATOMY | ({} if branches else {"attention": None, "mlp": None})
    with pytest.raises(FulldepthError, match=r"Toy is refused.*overwrote its own state.*in place"):
        verify(anatomy_candidates(model, override=override), tiny_models.inputs(model))


@pytest.mark.parametrize("gives", ["tensor", "tuple"])
def test_plain_stacks_stand(gives):
    model = tiny_models.toy(gives)
    found = verify(anatomy_candidates(model, override=tiny_models.TOY_ANATOMY), tiny_models.inputs(model))
    assert found.branches
    assert found.classifier is None


def test_every_candidate_that_failed_is_told_of():
    model = tiny_models.build("olmo2")
    tamper(model.model.layers[0], lambda out: 1.5 * out)
    with pytest.raises(FulldepthError, match="Olmo2ForCausalLM is refused") as error:
        check(model)
    assert "pre design" in str(error.value)
    assert "parallel design" in str(error.value)


def test_the_first_candidate_that_stands_is_taken(llama):
    wrong = anatomy_candidates(llama, override={**LLAMA, "name": "wrong", "mlp_norm": "input_layernorm"})
    right = anatomy_candidates(llama, override={**LLAMA, "name": "right"})
    second = anatomy_candidates(llama, override={**LLAMA, "name": "second"})
    assert verify([*wrong, *right, *second], tiny_models.inputs(llama)).anatomy.family.name == "right"


def test_the_check_leaves_the_model_as_it_was(llama):
    llama.train()
    check(llama)
    assert llama.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())
    assert torch.is_grad_enabled()


def test_t5s_encoder_alone_gives_tuples_and_its_stock_states():
    """Blocks of three outputs; their parts have numbers for names, so the stream alone is measured."""
    config = tf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4)
    torch.manual_seed(0)
    model = tf.T5EncoderModel(config).eval()
    override = {"blocks": "block", "body": "encoder", "final_norm": "final_layer_norm"}
    found = verify(anatomy_candidates(model, override=override), tiny_models.inputs(model))
    assert found.chained
    assert not found.branches
