"""What layers cause, against plain loops over models of transformers and `depth_llama` (`causes`), in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose

import fulldepth
import tiny_models
from fulldepth.architectures import DepthLlamaForCausalLM
from measurement import causes
from measurement.causes import FAMILIES, LAYERS, Family, marked
from refusals import refused

NEAR = {"rtol": 1e-8, "atol": 1e-11}
PARTS = ["layer", "attention", "mlp"]


def near(family):
    """BLOOM's shares of attention and Mamba's scan are float32, whose last digit depends on the padding."""
    return NEAR if family.double else {"rtol": 1e-6, "atol": 1e-7}


def cuts(length):
    """Multiples of 8 inside a document."""
    return range(8, length, 8)


# The reference itself, on cases whose answer is known.


@pytest.mark.parametrize("name", FAMILIES)
def test_reference_skips_nothing_but_the_part(name):
    """Skipping attention and MLP one by one, and both: the states before are kept, and the sites add up."""
    family = FAMILIES[name]
    model = family.build()
    ids = causes.ids_of(causes.texts([14]))[0]
    plain, _ = causes.run(model, family, ids)
    with torch.no_grad():
        stock = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert_allclose(plain[:-1], torch.cat(stock)[:-1].numpy(), rtol=1e-12)
    for part in PARTS:
        skipped, _ = causes.run(model, family, ids, part, 2, 1, 14)
        assert_allclose(skipped[:2], plain[:2], rtol=1e-12)
        assert_allclose(skipped[:, 0], plain[:, 0], rtol=1e-12)  # the first token is left alone
        assert not np.allclose(skipped[2:, 1:], plain[2:, 1:], rtol=1e-2)
        if part == "layer":
            assert_allclose(skipped[2, 1:], plain[1, 1:], rtol=0)
        later, _ = causes.run(model, family, ids, part, 2, 1, 8)
        assert not np.allclose(later[-1, 8:], plain[-1, 8:], rtol=1e-4), "no later token reads the skipped ones"
    attention, mlp = causes.branches(model, family, ids)
    assert_allclose(plain[:-1] + attention + mlp, plain[1:], rtol=1e-6, atol=1e-6)


def test_reference_of_a_layer_without_weights_is_zero():
    model = causes.zeroed(FAMILIES["llama"].build(), [2])
    with np.errstate(invalid="ignore"):  # the update of layer 2 is zero, and so is its change
        values, _, sums = causes.effects(model, FAMILIES["llama"], causes.ids_of(causes.texts([12, 20])), "layer", cuts)
    of_second = {key: value for key, value in values.items() if key[1] == 2}
    assert len(of_second) == 6 * (LAYERS - 2) + 7
    assert set(of_second.values()) == {0.0}
    loss = sums["loss_added", 2, None]
    assert causes.ratio_error(*loss) == causes.jackknife_error(*loss) == 0
    assert values["mean_all", 1, 3] > 0.01


def test_reference_without_attention_no_token_changes_later_ones():
    model = causes.zeroed(FAMILIES["llama"].build(), [2, 3, 4], ["self_attn.o_proj"])
    values, *_ = causes.effects(model, FAMILIES["llama"], causes.ids_of(causes.texts([12, 20])), "layer", cuts)
    future = {key: value for key, value in values.items() if key[0].endswith("future")}
    assert max(future.values()) == 0
    assert min(value for key, value in values.items() if key[0] == "mean_all") > 0.01


def test_reference_of_layers_that_ignore_the_stream():
    """Layers that add a constant: nothing before changes their updates, but the output is changed."""
    family = FAMILIES["gpt2"]
    model = family.build()
    with torch.no_grad():
        for block in model.transformer.h[2:]:
            block.mlp.c_proj.weight.zero_()
            block.attn.c_proj.weight.zero_()
    values, *_ = causes.effects(model, family, causes.ids_of(causes.texts([12, 20])), "mlp", cuts)
    assert max(values[name, 1, other] for name in ("max_all", "max_future") for other in (3, 4)) < 1e-12
    assert values["mean_all", 1, 2] > 0.01
    assert values["divergence_all", 1, None] > 0.01
    assert values["divergence_all", 3, None] > 0


def test_reference_errors_agree_for_documents_of_one_length():
    sums = np.random.default_rng(0).normal(size=12)
    counts = np.full(12, 9)
    assert causes.ratio_error(sums, counts) == pytest.approx(causes.jackknife_error(sums, counts), rel=1e-12)
    assert causes.ratio_error(sums, counts) == pytest.approx(sums.std(ddof=1) / 9 / np.sqrt(12), rel=1e-12)


# The effect of layers on later layers and on the output.


@pytest.fixture(scope="module")
def documents():
    """Texts of unequal length."""
    return causes.texts(causes.LENGTHS)


def measured(model, documents, measure, **options):
    """Rows of one measure, with a sequence for each document."""
    return causes.rows(fulldepth.measure(model, documents, measures=[measure], **causes.reading(**options)), measure)


def check_effects(found, model, family, documents, part, cuts, begin=1, close=NEAR):
    """All statistics of one part, and their standard errors by documents; returns those of `effects`."""
    values, errors, sums = causes.effects(model, family, documents, part, cuts, begin)
    got = [found[statistic, part, layer, other] for statistic, layer, other in values]
    assert_allclose(got, list(values.values()), **close)
    got = [found[f"standard_error_of_{statistic}", part, layer, other] for statistic, layer, other in errors]
    assert_allclose(got, list(errors.values()), **close)
    return values, {key: errors[key] for key in sums}, sums


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_layer_effect(name, documents):
    """All parts in both scopes. No document has more than four multiples of 8, the number of t that are drawn."""
    family = FAMILIES[name]
    model = family.build()
    options = causes.reading(effect_parts=PARTS)
    results = fulldepth.measure(model, documents, measures=["layer_effect"], **options)
    found = causes.rows(results, "layer_effect")
    for part in PARTS:
        values, *_ = check_effects(found, model, family, causes.ids_of(documents), part, cuts, close=near(family))
        later = [[values["mean_future", n, other] for other in range(n + 1, LAYERS + 1)] for n in range(1, LAYERS)]
        suffix = "" if part == "layer" else f"_{part}"
        for headline, value in (
            ("effect_on_later", np.mean([np.mean(of_layer) for of_layer in later])),
            ("effect_on_prediction", np.mean([values["divergence_all", n, None] for n in range(1, LAYERS + 1)])),
        ):
            assert_allclose(results.headline[headline + suffix]["value"], value, rtol=near(family)["rtol"])
            assert "of one layer" in results.headline[headline + suffix]["sentence"] or part == "layer"


@pytest.mark.parametrize("design", ["tree", "static", "dynamic", "kv", "hyper"])
def test_layer_effect_of_layers_that_read_more_than_the_one_before(design, documents):
    """Trees, memories and Hyper-Connections: removing a layer removes both of its branches."""
    model = tiny_models.build(f"depth_llama-{design}", dtype=torch.float64)
    family = Family(DepthLlamaForCausalLM, {}, serial=False)
    found = measured(model, documents, "layer_effect", effect_parts=PARTS)
    for part in PARTS:
        check_effects(found, model, family, causes.ids_of(documents), part, cuts)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layer_effect_of_all_tokens_with_the_first(name, documents):
    family = FAMILIES[name]
    model = family.build()
    found = measured(model, documents, "layer_effect", effect_first=True)
    check_effects(found, model, family, causes.ids_of(documents), "layer", cuts, begin=0)


def test_errors_are_jackknifes_over_documents_of_one_length():
    """Then leaving out one document after the other gives the same as the linear formula, whatever is averaged."""
    family = FAMILIES["llama"]
    model = family.build()
    documents = causes.texts([20] * 9)
    found = measured(model, documents, "layer_effect")
    _, errors, sums = check_effects(found, model, family, causes.ids_of(documents), "layer", cuts)
    jackknifed = [causes.jackknife_error(*of_documents) for of_documents in sums.values()]
    assert_allclose(list(errors.values()), jackknifed, **NEAR)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_positions_than_multiples_of_eight(count):
    """Of 8, 16, 24 and 32 some are drawn: the numbers are those of one choice."""
    family = FAMILIES["llama"]
    model = family.build()
    documents = causes.texts([35])
    ids = causes.ids_of(documents)
    found = measured(model, documents, "layer_effect", effect_positions=count)
    agree = []
    for chosen in itertools.combinations((8, 16, 24, 32), count):
        values, *_ = causes.effects(model, family, ids, "layer", lambda length, chosen=chosen: chosen)
        got = [found[statistic, "layer", layer, other] for statistic, layer, other in values]
        agree.append(np.allclose(got, list(values.values()), **NEAR))
    assert sum(agree) == 1


SIZES = {"vocab_size": 64, "hidden_size": causes.WIDTH, "num_hidden_layers": LAYERS, **causes.MARKS}
BERT = {**SIZES, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 64, "is_decoder": True}
WHOLE = {
    "no two modules of a block give what it adds": Family(
        tf.MambaForCausalLM, {**SIZES, "state_size": 4, "conv_kernel": 2}, "backbone.layers", double=False
    ),
    "its norms follow the residual sums": Family(tf.BertLMHeadModel, BERT, "bert.encoder.layer"),
}
"""Reason why parts cannot be removed -> a model of which whole layers can."""


@pytest.mark.parametrize("reason", WHOLE)
def test_layer_effect_of_layers_whose_parts_cannot_be_removed(reason, documents):
    """A whole layer can be removed whatever is in it."""
    family = WHOLE[reason]
    found = measured(family.build(), documents, "layer_effect")
    check_effects(found, family.build(), family, causes.ids_of(documents), "layer", cuts, close=near(family))
    with refused(reason):
        measured(family.build(), documents, "layer_effect", effect_parts=["attention"])


# What layers contribute to the stream.


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_contribution(name, documents):
    """Means and errors by documents, with and without the first token."""
    family = FAMILIES[name]
    model = family.build()
    found = measured(model, documents, "contribution")
    for begin, suffix in ((0, ""), (1, ":no-first")):
        expected = causes.contributions(model, family, causes.ids_of(documents), begin)
        keys = [(statistic + suffix, site, layer, None) for site, statistic, layer in expected]
        errors = [("standard_error_of_" + statistic, *place) for statistic, *place in keys]
        of_documents = expected.values()
        assert_allclose([found[key] for key in keys], [s.sum() / n.sum() for s, n in of_documents], **near(family))
        assert_allclose([found[key] for key in errors], [causes.ratio_error(*s) for s in of_documents], **near(family))
    assert {site for _, site, *_ in found} == {"layer", "attention", "mlp"}
