"""The classifier against stock transformers: states out of `output_hidden_states`, logits out of the model."""

import pytest
import torch
import torch.nn.functional as F

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import Classifier, anatomy_candidates

TOKEN_HEADS = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_neox-serial"),
    *(
        "bert",
        "bert-pretraining",
        "roberta",
        "detr",
        "detr-auxiliary",
        "olmo2",
        "opt",
        "phi3",
        "granite",
        "cohere",
        "electra",
        "distilbert",
    ),
]
SEQUENCE_HEADS = [
    *("llama-classifier", "gpt2-classifier", "bert-classifier", "roberta-classifier", "vit", "deit", "clip-classifier"),
]


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


@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_token_heads_give_the_models_logits(name):
    model = tiny_models.build(name)
    states, expected = stock(model, tiny_models.inputs(model))
    classifier = classifier_of(model)
    assert classifier.per_token
    torch.testing.assert_close(
        classifier.tokens(states[-1].flatten(0, 1)), expected.flatten(0, 1), rtol=1e-5, atol=1e-5
    )
    one = classifier.tokens(states[-1, 1, 2:3])  # a position does not depend on its company
    torch.testing.assert_close(one[0], expected[1, 2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SEQUENCE_HEADS)
def test_sequence_heads_give_the_models_logits(name):
    model = tiny_models.build(name)
    batch = tiny_models.inputs(model, batch=4)
    states, expected = stock(model, batch)
    classifier = classifier_of(model)
    assert not classifier.per_token
    mask = batch.get("attention_mask", torch.ones(states.shape[1:3], dtype=torch.long))
    torch.testing.assert_close(classifier.sequences(states[-1], mask), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-classifier", "gpt2-classifier"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_token_that_is_no_padding_is_read(name, side):
    model = tiny_models.build(name)
    lengths = [3, 7, 1, 5]
    mask = torch.zeros(4, 7, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    if side == "left":
        mask = mask.flip(1)
    ids = torch.randint(3, tiny_models.VOCAB, mask.shape) * mask
    states, expected = stock(model, {"input_ids": ids, "attention_mask": mask})
    got = classifier_of(model).sequences(states[-1], mask)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    body = model.model if name.startswith("llama") else model.transformer
    norm = body.norm if name.startswith("llama") else body.ln_f
    for row, length in enumerate(lengths):
        position = 6 if side == "left" else length - 1
        torch.testing.assert_close(got[row], model.score(norm(states[-1, row, position])), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SEQUENCE_HEADS[:4])
@torch.no_grad()
def test_what_padding_holds_changes_nothing(name):
    model = tiny_models.build(name)
    batch = tiny_models.inputs(model)
    states, _ = stock(model, batch)
    spoilt = states[-1].clone()
    spoilt[batch["attention_mask"] == 0] = 1e3
    classifier = classifier_of(model)
    got = classifier.sequences(spoilt, batch["attention_mask"])
    torch.testing.assert_close(got, classifier.sequences(states[-1], batch["attention_mask"]), rtol=0, atol=0)


@torch.no_grad()
def test_gemmas_soft_cap_is_applied_at_every_layer():
    model = tiny_models.build("gemma2")
    model.lm_head.weight.mul_(20)
    states, expected = stock(model, tiny_models.inputs(model))
    assert 2.9 < expected.abs().max() <= 3
    for layer in states:
        plain = model.lm_head(model.model.norm(layer)).flatten(0, 1)
        assert plain.abs().max() > 6  # so that the cap matters
        got = classifier_of(model).tokens(layer.flatten(0, 1))
        torch.testing.assert_close(got, 3 * torch.tanh(plain / 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "factor"), [("granite", 1 / 4), ("cohere", 0.25), ("llama", 1.0)])
@torch.no_grad()
def test_logits_are_scaled_as_the_configuration_says(name, factor):
    model = tiny_models.build(name)
    states, _ = stock(model, tiny_models.inputs(model))
    for layer in states:
        plain = model.lm_head(model.model.norm(layer)).flatten(0, 1)
        got = classifier_of(model).tokens(layer.flatten(0, 1))
        torch.testing.assert_close(got, factor * plain, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_berts_head_is_its_transform_and_its_biased_decoder():
    model = tiny_models.build("bert")
    states, _ = stock(model, tiny_models.inputs(model))
    head = model.cls.predictions
    dense, norm = head.transform.dense, head.transform.LayerNorm
    for layer in states:
        hidden = F.layer_norm(
            F.gelu(F.linear(layer, dense.weight, dense.bias)),
            (32,),
            norm.weight,
            norm.bias,
            eps=model.config.layer_norm_eps,
        )
        expected = hidden @ model.bert.embeddings.word_embeddings.weight.T + head.decoder.bias
        assert head.decoder.bias.abs().max() > 0.1
        got = classifier_of(model).tokens(layer.flatten(0, 1))
        torch.testing.assert_close(got, expected.flatten(0, 1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_vit_reads_its_first_token_and_clip_the_mean_of_its_patches():
    for name in ("vit", "clip-classifier"):
        model = tiny_models.build(name)
        states, _ = stock(model, tiny_models.inputs(model))
        mask = torch.ones(states.shape[1:3])
        for layer in states:
            if name == "vit":
                expected = model.classifier(model.vit.layernorm(layer[:, 0]))
            else:
                expected = model.classifier(layer[:, 1:].mean(1))
            got = classifier_of(model).sequences(layer, mask)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_detr_with_auxiliary_losses_normalises_twice():
    for name, times in (("detr", 1), ("detr-auxiliary", 2)):
        model = tiny_models.build(name)
        states, _ = stock(model, tiny_models.inputs(model))
        expected = states[-1]
        for _ in range(times):
            expected = model.model.decoder.layernorm(expected)
        got = classifier_of(model).tokens(states[-1].flatten(0, 1))
        torch.testing.assert_close(got, model.class_labels_classifier(expected).flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert-bare", "clip-text", "clip-vision"])
def test_a_model_without_a_head_has_no_classifier(name):
    model = tiny_models.build(name)
    with pytest.raises(FulldepthError, match=f"{type(model).__name__} has no prediction head"):
        classifier_of(model)


def test_a_head_that_is_not_where_the_family_keeps_it_is_reported():
    model = tiny_models.build("llama")
    anatomy = anatomy_candidates(model)[0]
    del model.lm_head
    with pytest.raises(FulldepthError, match="LlamaForCausalLM has no head where expected"):
        Classifier(anatomy)
