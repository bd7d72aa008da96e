"""What layers cause, against plain loops over transformers' models (`causes`), in float64, for ten families."""

from __future__ import annotations

import copy
import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose
from sklearn.linear_model import Ridge

import fulldepth
from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from measurement import causes
from measurement.causes import FAMILIES, LAYERS
from refusals import refused

NEAR = {"rtol": 1e-8, "atol": 1e-11}
LENS = {"rel": 1e-6, "abs": 3e-7}
"""Losses of lenses pass through float32."""
LENGTHS = [9, 17, 30, 5, 12, 22, 8, 33, 11]
PARTS = ["layer", "attention", "mlp"]
SEPARATE = [name for name, family in FAMILIES.items() if family.separate]


def near(family):
    """BLOOM computes shares of attention in float32, whose last digit depends on the padding."""
    return NEAR if family.separate else {"rtol": 1e-6, "atol": 1e-8}


def cuts(length):
    """Multiples of 8 inside a document."""
    return range(8, length, 8)


def ids_of(texts):
    """Ids of every document."""
    return causes.tokenizer()(texts)["input_ids"]


# The reference itself, on cases whose answer is known.


@pytest.mark.parametrize("name", FAMILIES)
def test_reference_skips_nothing_but_the_part(name):
    """Skipping attention and MLP one by one, and both: the states before are kept, and the sites add up."""
    family = FAMILIES[name]
    model = family.build()
    ids = ids_of(causes.texts([14]))[0]
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


def zeroed(model, layers, paths):
    """The Llama with these matrices of these layers (1-based) set to zero."""
    with torch.no_grad():
        for layer in layers:
            for path in paths:
                model.model.layers[layer - 1].get_submodule(path).weight.zero_()
    return model


OUTPUTS = ["self_attn.o_proj", "mlp.down_proj"]


def test_reference_of_a_layer_without_weights_is_zero():
    model = zeroed(FAMILIES["llama"].build(), [2], OUTPUTS)
    with np.errstate(invalid="ignore"):  # the update of layer 2 is zero, and so is its change
        values, sums = causes.effects(model, FAMILIES["llama"], ids_of(causes.texts([12, 20])), "layer", cuts)
    of_second = {key: value for key, value in values.items() if key[1] == 2}
    assert len(of_second) == 6 * (LAYERS - 2) + 5
    assert set(of_second.values()) == {0.0}
    loss = sums["loss_added", 2, None]
    assert causes.ratio_error(*loss) == causes.jackknife_error(*loss) == 0
    assert values["mean_all", 1, 3] > 0.01


def test_reference_without_attention_no_token_changes_later_ones():
    model = zeroed(FAMILIES["llama"].build(), [2, 3, 4], OUTPUTS[:1])
    values, _ = causes.effects(model, FAMILIES["llama"], ids_of(causes.texts([12, 20])), "layer", cuts)
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
    values, _ = causes.effects(model, family, ids_of(causes.texts([12, 20])), "mlp", cuts)
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


def rows(results, measure):
    """(statistic, site, layer, other) -> value of one measure; `other` is None where there is none."""
    table = results.table[results.table.measure == measure]
    return {
        (row.statistic, row.site, row.layer, None if pd.isna(row.other) else row.other): row.value
        for row in table.itertuples()
    }


@pytest.fixture(scope="module")
def documents():
    """Texts of unequal length, as they are given to `fulldepth.measure`."""
    return causes.texts(LENGTHS)


def measured(model, documents, measures, **options):
    """One sequence for each document, several of them padded in a batch."""
    options = {"one_per_row": True, "sequence_length": 64, "batch_size": 4, **options}
    return fulldepth.measure(model, documents, tokenizer=causes.tokenizer(), measures=measures, **options)


def check_effects(found, model, family, documents, part, cuts, begin=1):
    """All statistics of one part, and the standard errors of means over documents."""
    values, sums = causes.effects(model, family, documents, part, cuts, begin)
    expected = {(statistic, part, layer, other): value for (statistic, layer, other), value in values.items()}
    assert_allclose([found[key] for key in expected], list(expected.values()), **NEAR)
    errors = [found[f"standard_error_of_{statistic}", part, layer, other] for statistic, layer, other in sums]
    assert_allclose(errors, [causes.ratio_error(*of_documents) for of_documents in sums.values()], **NEAR)
    return errors, sums


@pytest.mark.parametrize("name", SEPARATE)
def test_layer_effect(name, documents):
    """All parts in both scopes. No document has more than four multiples of 8, the number of t that are drawn."""
    family = FAMILIES[name]
    model = family.build()
    found = rows(measured(model, documents, ["layer_effect"], effect_parts=PARTS), "layer_effect")
    for part in PARTS:
        check_effects(found, model, family, ids_of(documents), part, cuts)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layer_effect_of_all_tokens_with_the_first(name, documents):
    family = FAMILIES[name]
    model = family.build()
    found = rows(measured(model, documents, ["layer_effect"], effect_first=True), "layer_effect")
    check_effects(found, model, family, ids_of(documents), "layer", cuts, begin=0)


def test_errors_are_jackknifes_over_documents_of_one_length():
    """Then leaving out one document after the other gives the same as the linear formula, whatever is averaged."""
    family = FAMILIES["llama"]
    model = family.build()
    documents = causes.texts([20] * 9)
    found = rows(measured(model, documents, ["layer_effect"]), "layer_effect")
    errors, sums = check_effects(found, model, family, ids_of(documents), "layer", cuts)
    assert_allclose(errors, [causes.jackknife_error(*of_documents) for of_documents in sums.values()], **NEAR)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_positions_than_multiples_of_eight(count):
    """Of 8, 16, 24 and 32 some are drawn: the numbers are those of one choice."""
    family = FAMILIES["llama"]
    model = family.build()
    documents = causes.texts([35])
    found = rows(measured(model, documents, ["layer_effect"], effect_positions=count), "layer_effect")
    agree = []
    for chosen in itertools.combinations((8, 16, 24, 32), count):
        values, _ = causes.effects(model, family, ids_of(documents), "layer", lambda length, chosen=chosen: chosen)
        got = [found[statistic, "layer", layer, other] for statistic, layer, other in values]
        agree.append(np.allclose(got, list(values.values()), **NEAR))
    assert sum(agree) == 1


def test_layer_effect_refuses_parts_that_are_not_separate(documents):
    """BLOOM's modules add the stream themselves."""
    with refused("attention"):
        measured(FAMILIES["bloom"].build(), documents, ["layer_effect"], effect_parts=["attention"])


# What layers contribute to the stream.


@pytest.mark.parametrize("name", FAMILIES)
def test_contribution(name, documents):
    """Means and errors by documents, with and without the first token."""
    family = FAMILIES[name]
    model = family.build()
    found = rows(measured(model, documents, ["contribution"]), "contribution")
    for begin, suffix in ((0, ""), (1, ":no-first")):
        expected = causes.contributions(model, family, ids_of(documents), begin)
        keys = [(statistic + suffix, site, layer, None) for site, statistic, layer in expected]
        errors = [("standard_error_of_" + statistic, *place) for statistic, *place in keys]
        of_documents = expected.values()
        assert_allclose([found[key] for key in keys], [s.sum() / n.sum() for s, n in of_documents], **near(family))
        assert_allclose([found[key] for key in errors], [causes.ratio_error(*s) for s in of_documents], **near(family))
    assert {site for _, site, *_ in found} == ({"layer", "attention", "mlp"} if family.separate else {"layer"})


# The linear lens.

FITTED = [30, 20, 25] * 20
LINEAR = ["lens_accuracy", "lens_loss", "linear_lens_accuracy", "linear_lens_loss"]


@pytest.fixture(scope="module")
def fitting(tmp_path_factory):
    """A file of 60 other documents, of 1,440 positions with a target."""
    path = tmp_path_factory.mktemp("fit") / "other.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in causes.texts(FITTED, seed=7)))
    return str(path)


def test_reference_of_a_fixed_map():
    """Layers 3 and 4 that add nothing: least squares finds the identity; reading states on is reading the model."""
    family = FAMILIES["llama"]
    model = zeroed(family.build(), [3, 4], OUTPUTS)
    ids = ids_of(causes.texts([60]))[0]
    states, logits = causes.run(model, family, ids)
    fitted = Ridge(alpha=1e-9).fit(states[2], states[4])
    assert_allclose(fitted.predict(states[2]), states[4], rtol=1e-6, atol=1e-8)
    assert_allclose(causes.continued(model, family, ids, states[2]), logits, rtol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_linear_lens(name, documents, fitting):
    """scikit-learn's ridge on states of the fitting documents; the strength of the ridge is read from the results."""
    family = FAMILIES[name]
    model = family.build()
    results = measured(model, documents, LINEAR, fit=fitting, fit_sequences=60, lens_tokens=None)
    found = {measure: rows(results, measure) for measure in LINEAR}
    strengths = results.meta["linear_lens"]["ridge"]
    fitted = [causes.run(model, family, ids)[0][:, :-1] for ids in ids_of(causes.texts(FITTED, seed=7))]
    fitted = np.concatenate(fitted, axis=1)  # [L+1, positions with a target, D]
    ids = ids_of(documents)
    states = [causes.run(model, family, each)[0] for each in ids]
    unseen = np.concatenate(states, axis=1)
    for layer in range(LAYERS + 1):
        lens = None if layer == LAYERS else Ridge(strengths[layer], solver="cholesky").fit(fitted[layer], fitted[-1])
        mapped = [of_document[layer] if lens is None else lens.predict(of_document[layer]) for of_document in states]
        plain = causes.predicted(model, family, ids, [of_document[layer] for of_document in states])
        linear = causes.predicted(model, family, ids, mapped)
        for measure, of_plain, of_linear, sign in zip(("accuracy", "loss"), plain, linear, (1, -1), strict=True):
            here = found[f"linear_lens_{measure}"]
            sums, counts = causes.totals(of_linear)
            assert here["mean", "residual", layer, None] == pytest.approx(sums.sum() / counts.sum(), **LENS)
            error = here["standard_error", "residual", layer, None]
            assert error == pytest.approx(causes.ratio_error(sums, counts), **LENS)
            if lens is None:  # the identity
                last = found[f"lens_{measure}"]["mean", "residual", layer, None]
                assert here["mean", "residual", layer, None] == pytest.approx(last, rel=1e-12)
                continue
            sums, counts = causes.totals(of_linear, of_plain)
            assert here["gain", "residual", layer, None] == pytest.approx(sign * sums.sum() / counts.sum(), **LENS)
            error = here["standard_error_of_gain", "residual", layer, None]
            assert error == pytest.approx(causes.ratio_error(sums, counts), **LENS)
        if lens is not None:  # on documents that chose nothing, another strength is hardly better
            missed = [
                (
                    (
                        Ridge(strengths[layer] * factor).fit(fitted[layer], fitted[-1]).predict(unseen[layer])
                        - unseen[-1]
                    )
                    ** 2
                )
                for factor in (1e-6, 1e-3, 0.1, 1, 10, 1e3)
            ]
            assert missed[3].sum() < 1.1 * min(each.sum() for each in missed)


def test_linear_lens_reads_no_document_that_is_measured(documents, fitting, tmp_path):
    """Measured documents are left out of the file to fit on, and of the measured data when no file is named."""
    model = FAMILIES["llama"].build()
    options = {"fit_sequences": 60, "lens_tokens": None, "order": "first", "max_sequences": len(documents)}
    rest = documents + causes.texts(FITTED, seed=7)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(json.dumps({"text": text}) + "\n" for text in rest[::-1]))
    alone, of_rest, of_mixed = (
        measured(model, data, LINEAR, **options, **named)
        for data, named in ((documents, {"fit": fitting}), (rest, {}), (documents, {"fit": str(mixed)}))
    )
    for results in (of_rest, of_mixed):
        assert results.meta["linear_lens"]["positions"] == sum(FITTED) - len(FITTED)
    for measure in LINEAR:
        expected, got = rows(alone, measure), rows(of_rest, measure)
        means = [key for key in expected if key[0] == "mean"]
        assert_allclose([got[key] for key in means], [expected[key] for key in means], rtol=1e-7)
    with refused(None, "documents"):
        measured(model, rest, LINEAR, fit=str(mixed))


def test_linear_lens_of_few_positions_warns_with_both_numbers(documents, tmp_path):
    """Six documents of 24 targets on average, for 32 channels."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"text": text}) + "\n" for text in causes.texts(FITTED[:6], seed=7)))
    results = measured(FAMILIES["llama"].build(), documents, LINEAR, fit=str(few))
    assert any("144" in line and "160" in line for line in results.meta["warnings"])


# LayerNorm scaling.


@pytest.fixture(scope="module")
def scaled():
    """A depth_llama with LayerNorm scaling, in float64."""
    torch.manual_seed(3)
    model = DepthLlamaForCausalLM(DepthLlamaConfig(**causes.GROUPED, norm_scaling=True)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight)) if weight.ndim == 1 else weight.mul_(5)
    return model.double()


SINGLE = {"rtol": 2e-5, "atol": 2e-6}
"""transformers computes RMSNorm in float32."""


@torch.no_grad()
def test_norm_scaling_is_that_of_a_forward_pass_by_hand(scaled):
    documents = ids_of(causes.texts([14, 9]))
    padded = torch.tensor([documents[0], documents[1] + [0] * 5])
    mask = torch.tensor([[1] * 14, [1] * 9 + [0] * 5])
    logits = scaled(input_ids=padded, attention_mask=mask).logits.numpy()
    for row, ids in enumerate(documents):
        expected = causes.scaled_llama(scaled.state_dict(), scaled.config, ids)
        assert_allclose(logits[row, : len(ids)], expected, **SINGLE)


@torch.no_grad()
def test_norm_scaling_is_undone_by_gains_and_off_by_default(scaled):
    """Gains times sqrt(l) give the Llama that the model is without the switch."""
    weights = {name: tensor.clone() for name, tensor in scaled.state_dict().items()}
    plain = tf.LlamaForCausalLM(tf.LlamaConfig(**causes.GROUPED)).double().eval()
    plain.load_state_dict(weights)
    unscaled = DepthLlamaForCausalLM(DepthLlamaConfig(**causes.GROUPED)).double().eval()
    unscaled.load_state_dict(weights)
    undone = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in undone.items():
        if "layernorm" in name:
            tensor.mul_((int(name.split(".")[2]) + 1) ** 0.5)
    ids = torch.tensor(ids_of(causes.texts([14])))
    expected = plain(input_ids=ids).logits.numpy()
    assert_allclose(unscaled(input_ids=ids).logits.numpy(), expected, **SINGLE)
    assert not np.allclose(scaled(input_ids=ids).logits.numpy(), expected, rtol=1e-2)
    scaled.load_state_dict(undone)
    assert_allclose(scaled(input_ids=ids).logits.numpy(), expected, **SINGLE)
    scaled.load_state_dict(weights)


@torch.no_grad()
@pytest.mark.slow
def test_norm_scaling_is_exported_as_a_stock_llama(scaled, tmp_path):
    """Folded into the gains: read by transformers alone, against the pass by hand without attention of layer 2."""
    tokenizer = causes.tokenizer()
    copy.deepcopy(scaled).float().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = [{"text": text} for text in causes.texts([40] * 12)]
    search = {"given": [2], "fit": False, "sequence_length": 16, "dtype": "float32"}
    fulldepth.skip.search(str(tmp_path / "model"), data, output=tmp_path / "plan", **search)
    plan = fulldepth.skip.Plan.load(tmp_path / "plan" / "plan.json")
    fulldepth.skip.export(plan, str(tmp_path / "model"), "folded", tmp_path / "folded")
    config = tf.AutoConfig.from_pretrained(tmp_path / "folded")
    assert config.model_type == "llama"
    stock, report = tf.LlamaForCausalLM.from_pretrained(
        tmp_path / "folded", dtype=torch.float64, output_loading_info=True
    )
    assert not any(report.values())
    ids = ids_of(causes.texts([14], seed=5))[0]
    expected = causes.scaled_llama(scaled.state_dict(), scaled.config, ids, skipped={2})
    got = stock.eval()(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    full = causes.scaled_llama(scaled.state_dict(), scaled.config, ids)
    assert np.abs(full - expected).max() > 0.1, "the attention of layer 2 does nothing here"
