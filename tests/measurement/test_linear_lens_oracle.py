"""The linear lens against scikit-learn's ridge on states of transformers' models, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.linear_model import Ridge

import fulldepth
from data.conftest import jsonl
from measurement import causes
from measurement.causes import FAMILIES, LAYERS, marked
from refusals import refused

LENS = {"rel": 1e-6, "abs": 3e-7}
"""Losses of lenses pass through float32."""

FITTED = [30, 20, 25] * 20
LINEAR = ["lens_accuracy", "lens_loss", "linear_lens_accuracy", "linear_lens_loss"]


@pytest.fixture(scope="module")
def documents():
    """Texts of unequal length."""
    return causes.texts(causes.LENGTHS)


@pytest.fixture(scope="module")
def fitting(tmp_path_factory):
    """A file of 60 other documents, of 1,440 positions with a target."""
    path = tmp_path_factory.mktemp("fit") / "other.jsonl"
    return str(jsonl(path, *({"text": text} for text in causes.texts(FITTED, seed=7))))


def fitted_states(model, family):
    """States [L+1, N, D] of the N positions of the file that have a target."""
    documents = causes.ids_of(causes.texts(FITTED, seed=7))
    return np.concatenate([causes.run(model, family, ids)[0][:, :-1] for ids in documents], axis=1)


def test_reference_of_a_fixed_map():
    """Layers 3 and 4 that add nothing: least squares finds the identity; reading states on is reading the model."""
    family = FAMILIES["llama"]
    model = causes.zeroed(family.build(), [3, 4])
    ids = causes.ids_of(causes.texts([60]))[0]
    states, logits = causes.run(model, family, ids)
    fitted = Ridge(alpha=1e-9).fit(states[2], states[4])
    assert_allclose(fitted.predict(states[2]), states[4], rtol=1e-6, atol=1e-8)
    assert_allclose(causes.continued(model, family, ids, states[2]), logits, rtol=1e-10)


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_linear_lens(name, documents, fitting):
    """scikit-learn's ridge on states of the fitting documents; the strength of the ridge is read from the results."""
    family = FAMILIES[name]
    model = family.build()
    results = fulldepth.measure(
        model, documents, measures=LINEAR, **causes.reading(fit=fitting, fit_sequences=60, lens_tokens=None)
    )
    found = {measure: causes.rows(results, measure) for measure in LINEAR}
    strengths = results.meta["linear_lens"]["ridge"]
    fitted = fitted_states(model, family)
    ids = causes.ids_of(documents)
    states = [causes.run(model, family, each)[0] for each in ids]
    unseen = np.concatenate(states, axis=1)
    early = {"accuracy": [], "loss": []}  # of layers 1 and 2: what documents gain, and their numbers of positions
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
            if 1 <= layer <= LAYERS // 2:
                early[measure].append((sign * sums, counts))
            assert here["gain", "residual", layer, None] == pytest.approx(sign * sums.sum() / counts.sum(), **LENS)
            error = here["standard_error_of_gain", "residual", layer, None]
            assert error == pytest.approx(causes.ratio_error(sums, counts), **LENS)
        if lens is not None:  # on documents that chose nothing, another strength is hardly better
            missed = {}
            for factor in (1e-6, 1e-3, 0.1, 1, 10, 1e3):
                other = Ridge(strengths[layer] * factor).fit(fitted[layer], fitted[-1])
                missed[factor] = np.square(other.predict(unseen[layer]) - unseen[-1]).sum()
            assert missed[1] < 1.1 * min(missed.values())
    for measure, of_layers in early.items():
        sums, counts = np.mean(of_layers, axis=0)
        expected = sums.sum() / counts.sum(), causes.ratio_error(sums, counts)
        for name, value in zip(("gain", "standard_error_of_gain"), expected, strict=True):
            (got,) = results.values(f"linear_lens_{measure}", f"{name}_of_early_layers")
            assert got == pytest.approx(value, **LENS)


def test_linear_lens_reads_no_document_that_is_measured(documents, fitting, tmp_path):
    """Measured documents are left out of the file to fit on, and of the measured data when no file is named."""
    model = FAMILIES["llama"].build()
    options = {"fit_sequences": 60, "lens_tokens": None, "order": "first", "max_sequences": len(documents)}
    rest = documents + causes.texts(FITTED, seed=7)
    mixed = jsonl(tmp_path / "mixed.jsonl", *({"text": text} for text in rest[::-1]))
    alone, of_rest, of_mixed = (
        fulldepth.measure(model, data, measures=LINEAR, **causes.reading(**options, **named))
        for data, named in ((documents, {"fit": fitting}), (rest, {}), (documents, {"fit": str(mixed)}))
    )
    for results in (of_rest, of_mixed):
        assert results.meta["linear_lens"]["positions"] == sum(FITTED) - len(FITTED)
        for measure in LINEAR:
            expected, got = causes.rows(alone, measure), causes.rows(results, measure)
            means = [key for key in expected if key[0] == "mean"]
            assert_allclose([got[key] for key in means], [expected[key] for key in means], rtol=1e-7)
    with refused(None, "documents"):
        fulldepth.measure(model, rest, measures=LINEAR, **causes.reading(fit=str(mixed)))


def test_lens_grid_of_mapped_states(fitting):
    """Most probable tokens and their probabilities of one text, layer by layer."""
    family = FAMILIES["llama"]
    model = family.build()
    text = causes.texts([12], seed=11)
    options = {"tokenizer": causes.tokenizer(), "fit": fitting, "fit_sequences": 60, "top_k": 1}
    results = fulldepth.lens(model, text, linear=True, **options)
    (sample,) = results.meta["lens_grid"]["samples"]
    fitted = fitted_states(model, family)
    (ids,) = causes.ids_of(text)
    states, _ = causes.run(model, family, ids)
    for layer, strength in enumerate(results.meta["linear_lens"]["ridge"]):
        mapped = Ridge(strength, solver="cholesky").fit(fitted[layer], fitted[-1]).predict(states[layer])
        probabilities = np.exp(causes.log_softmax(causes.continued(model, family, ids, mapped)))
        words = causes.tokenizer().convert_ids_to_tokens(probabilities.argmax(-1).tolist())
        assert [token for token, _ in sample["grid"][layer]] == words
        assert_allclose([share for _, share in sample["grid"][layer]], probabilities.max(-1), atol=6e-5)
