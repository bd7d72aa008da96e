"""The classifier against stock transformers: states out of `output_hidden_states`, logits out of the model."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tiny_models
from families import zoo
from fulldepth.execution import find_anatomy
from fulldepth.hf import Classifier
from fulldepth.hf.modes import state_in, with_state
from refusals import refused


@torch.no_grad()
def stock(model, batch):
    """Residual states `[L+1, B, T, D]` before the final norm, and logits, by transformers alone."""
    for config in (model.config, getattr(model.config, "vision_config", None)):
        if config is not None:
            config.tie_last_hidden_states = False
    output = model(**batch, output_hidden_states=True)
    states = output.decoder_hidden_states if "decoder_hidden_states" in output else output.hidden_states
    logits = output.prediction_logits if "prediction_logits" in output else output.logits
    return torch.stack(states), logits


def classifier_of(model):
    return Classifier(find_anatomy(model))


@torch.no_grad()
def by_hand(name, model, states):
    """Logits of any layer's states `[B, T, D]`, from the model's own modules and formulas of its source."""
    if name == "bert":
        head = model.cls.predictions
        dense, norm = head.transform.dense, head.transform.LayerNorm
        hidden = F.gelu(F.linear(states, dense.weight, dense.bias))
        hidden = F.layer_norm(hidden, (32,), norm.weight, norm.bias, eps=model.config.layer_norm_eps)
        return hidden @ model.bert.embeddings.word_embeddings.weight.T + head.decoder.bias
    if name.startswith("detr"):
        for _ in range(2 if name == "detr-auxiliary" else 1):
            states = model.model.decoder.layernorm(states)
        return model.class_labels_classifier(states)
    if name == "vit":
        return model.classifier(model.vit.layernorm(states[:, 0]))
    if name == "clip-classifier":
        return model.classifier(states[:, 1:].mean(1))
    plain = model.lm_head(model.model.norm(states))
    if name == "gemma2":
        assert plain.abs().max() > 6  # so that the cap matters
        return 3 * torch.tanh(plain / 3)
    return plain * {"granite": 1 / 4, "cohere": 0.25, "llama": 1.0}[name]


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "granite", "cohere", "bert", "detr", "detr-auxiliary", "vit", "clip-classifier"]
)
@torch.no_grad()
def test_heads_give_the_models_logits_and_the_same_formula_at_every_layer(name):
    model = tiny_models.build(name)
    if name == "gemma2":
        model.lm_head.weight.mul_(20)
    batch = tiny_models.inputs(model, batch=4)
    states, expected = stock(model, batch)
    classifier = classifier_of(model)
    assert classifier.per_token is (name not in ("vit", "clip-classifier"))
    for layer, state in enumerate(states):
        if classifier.per_token:
            got = classifier.tokens(state.flatten(0, 1)).view(*state.shape[:2], -1)
        else:
            got = classifier.sequences(state, torch.ones(states.shape[1:3]))
        assert_close(got, by_hand(name, model, state), rtol=1e-4, atol=1e-4)
        if layer == len(states) - 1:
            assert_close(got, expected, rtol=1e-4, atol=1e-4)


SCALED = {
    "falcon_h1": {"lm_head_multiplier": 0.3, "embedding_multiplier": 4.0},
    "recurrent_gemma": {"logits_soft_cap": 2.0},
    "xlstm": {"output_logit_soft_cap": 2.0},
}
"""Model type -> the factor or the soft cap of its logits, as its configuration names it."""


@pytest.mark.parametrize("model_type", SCALED)
@torch.no_grad()
def test_a_factor_and_a_soft_cap_of_any_name_are_those_of_the_stock_class(model_type):
    """The class itself reads an earlier layer, because its last block gives that layer's states."""
    model = zoo.build(model_type, "causal-lm", **SCALED[model_type])
    ids = tiny_models.token_ids(2, 12)
    anatomy = find_anatomy(model)
    states = []
    hooks = [
        block.register_forward_hook(lambda *call: states.append(state_in(call[2]).clone())) for block in anatomy.blocks
    ]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for state in states:
        hook = anatomy.blocks[-1].register_forward_hook(lambda *call, state=state: with_state(call[2], state))
        expected = model(input_ids=ids, use_cache=False).logits
        hook.remove()
        assert_close(Classifier(anatomy).tokens(state), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert-bare", "clip-text"])
def test_a_model_without_a_head_has_no_classifier(name):
    model = tiny_models.build(name)
    with refused(f"{type(model).__name__} has no prediction head"):
        classifier_of(model)
