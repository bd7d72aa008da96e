"""Quantiles of the tokens' similarity, and the order of layer pairs under cosine and CKA, by numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
import transformers as tf

from fulldepth.data import open_source
from fulldepth.hf import load_processor
from fulldepth.measurement import measure


@pytest.fixture(scope="module")
def results(checkpoint, picture_folder):
    return measure(
        checkpoint("vit"), picture_folder, measures=["cosine", "cka"], token_policy="patches", dtype="float64"
    )


@torch.no_grad()
def test_quantiles_of_the_similarity_to_the_last_layer(results, checkpoint, picture_folder):
    folder = checkpoint("vit")
    model = tf.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float64).eval()
    images = [record.image() for record in open_source(picture_folder).records]
    pixels = load_processor(str(folder), model.config)(images=images, return_tensors="pt")["pixel_values"]
    hidden = model(pixel_values=pixels.double(), output_hidden_states=True).hidden_states
    states = np.stack([h[:, 1:].flatten(0, 1).numpy() for h in hidden])  # [L+1, N, D]
    states -= states.mean(1, keepdims=True)
    states /= np.linalg.norm(states, axis=-1, keepdims=True)
    cosine = (states * states[-1]).sum(-1)
    for name, share in {"p05": 5, "p25": 25, "p50": 50, "p75": 75, "p95": 95}.items():
        found = results.values("cosine", name, other=len(hidden) - 1)
        np.testing.assert_allclose(found, np.percentile(cosine, share, axis=1), atol=1e-5)
    box = results.figures()["cosine_spread"].data[0]
    np.testing.assert_allclose(box.lowerfence, np.percentile(cosine, 5, axis=1), atol=1e-5)


def test_cosine_against_cka(results):
    table = results.table
    values = {}
    for measure_name, statistic in (("cosine", "mean"), ("cka", "debiased")):
        rows = table[(table.measure == measure_name) & (table.statistic == statistic) & (table.site == "residual")]
        values[measure_name] = {(a, b): v for a, b, v in zip(rows.layer, rows.other, rows.value, strict=True) if a < b}
    pairs = sorted(values["cosine"])
    assert len(pairs) == 6
    x, y = ([values[name][pair] for pair in pairs] for name in ("cosine", "cka"))
    finding = results.headline["cosine_cka_order"]
    assert finding["value"] == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert f"Kendall {scipy.stats.kendalltau(x, y).statistic:.2f}" in finding["sentence"]
    points = results.figures()["cosine_against_cka"].data[0]
    assert sorted(points.x) == pytest.approx(sorted(x))
