"""The numbers, against plain numpy on states that come straight from transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from numpy.testing import assert_allclose
from sklearn.metrics import f1_score

from fulldepth.measurement import measure
from measurement import oracle
from metrics.oracle import cosines, mmd, nc1, of_lens, plain_cka, plain_coherence, psi, ratio, steps, zeta

T, N = 16, 9
EXACT = {"rtol": 1e-9, "atol": 1e-10}
SINGLE = {"rtol": 3e-6, "atol": 1e-7}
"""For what passes through float32 on its way: the sampled tokens (kept in half the memory) and the losses."""
WHOLE = {"sequence_length": T, "dtype": "float64", "order": "first"}


@pytest.fixture(scope="module")
def ids(windows):
    return windows(N, T)


@pytest.fixture(scope="module")
def model(trained):
    return tf.LlamaForCausalLM.from_pretrained(trained, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def results(trained, text_file):
    return measure(trained, text_file, max_sequences=N, batch_size=4, **WHOLE)


@pytest.fixture(scope="module")
def taps(model, ids):
    """The same states through hooks of our own."""
    return oracle.taps(model, "model.layers", {"input_ids": ids}, middle="post_attention_layernorm")


@pytest.fixture(scope="module")
def logits(model, ids):
    """[L+1, N, T, V] what stopping at each layer really predicts."""
    (found,) = oracle.exits(model, "model.layers", {"input_ids": ids})
    with torch.no_grad():
        assert_allclose(found[-1], model(input_ids=ids).logits.numpy(), **EXACT)
    return found


def check_lens(results, logits, targets):
    """Accuracies and losses of all layers; returns the accuracies and how many positions settle at each layer."""
    accuracy, loss, counts = of_lens(logits, targets)
    assert_allclose(results.values("lens_accuracy", "mean"), accuracy, **EXACT)
    assert_allclose(results.values("lens_loss", "mean"), loss, **SINGLE)
    return accuracy, counts


@pytest.mark.parametrize(("suffix", "start"), [("", 0), (":no-first", 1)])
def test_displacement_norms_and_similarity(results, taps, suffix, start):
    states = taps[0][:, :, start:].reshape(4, -1, taps[0].shape[-1])  # [L+1, tokens, D]
    for name, function in (("displacement", psi), ("norm_ratio", ratio)):
        expected = function(states[:-1], states[1:]).mean(1)
        assert_allclose(results.values(name, "mean" + suffix, "residual"), expected, **EXACT)
    table = results.table.set_index(["measure", "statistic"])
    for measured, statistic, of in (
        ("cosine", "mean_raw", lambda a, b: cosines(a, b).mean()),
        ("cosine", "mean", lambda a, b: cosines(a, b, center=True).mean()),
        ("cka", "debiased", lambda a, b: plain_cka(a, b, True)),
        ("cka", "biased", lambda a, b: plain_cka(a, b, False)),
    ):
        found = table.loc[[(measured, statistic + suffix)]].pivot(index="layer", columns="other", values="value")
        assert_allclose(found, [[of(a, b) for b in states] for a in states], **SINGLE)


def test_jump_rate_and_the_normed_reading(results, taps, model):
    states = taps[0]
    mean = steps(states).mean((1, 2))
    expected = {layer: zeta(mean, layer) for layer in (2, 3)}
    assert results.values("jump_rate", "value").to_dict() == pytest.approx(expected, rel=1e-9)
    with torch.no_grad():
        normed = model.model.norm(torch.from_numpy(states[-1])).numpy()
    found = results.values("displacement", "mean", "final_normed")
    assert found.to_dict() == {3: pytest.approx(psi(states[-2], normed).mean())}


@pytest.mark.parametrize("site", ["residual", "attention"])
def test_coherence(results, taps, site):
    states, inner = taps
    ends = states[1:] if site == "residual" else inner["middle"]
    for layer in (1, 2, 3):
        cells = plain_coherence(states[layer - 1], ends[layer - 1])
        expected = {"mean": cells.mean(), "mean_corrected": np.maximum(0, (N * cells - 1) / (N - 1)).mean()}
        for statistic, value in expected.items():
            assert results.values("coherence", statistic, site)[layer] == pytest.approx(value, abs=1e-9), statistic


def test_lens(results, logits, ids):
    predictions = logits[:, :, :-1].reshape(len(logits), -1, logits.shape[-1])
    accuracy, counts = check_lens(results, predictions, ids[:, 1:].flatten().numpy())
    assert accuracy[-1] > 0.3, "the model has learnt too little for this test to mean anything"
    assert results.values("saturation", "count").tolist() == counts.tolist()
    assert_allclose(results.values("saturation", "cumulative"), counts.cumsum() / counts.sum())
    depths = results.table.query("measure == 'effective_depth'").set_index("statistic").value
    assert depths["eps=0.05"] == next((n for n in (1, 2, 3) if accuracy[n] >= 0.95), 3)
    assert depths["relative_eps=0.05"] == next(n for n in (1, 2, 3) if accuracy[n] >= 0.95 * accuracy[3])


def test_mmd_between_two_models_and_to_itself(trained, model, checkpoint, text_file, ids):
    other = checkpoint("llama", 1)
    models = model, tf.LlamaForCausalLM.from_pretrained(other, dtype=torch.float64).eval()
    pairs = zip(*(oracle.taps(m, "model.layers", {"input_ids": ids[:4]})[0] for m in models), strict=True)
    expected = [mmd(a.reshape(4 * T, -1), b.reshape(4 * T, -1)) for a, b in pairs]
    for reference, values in ((other, expected), (trained, np.zeros(4))):
        found = measure(trained, text_file, measures=["mmd"], reference=str(reference), max_sequences=4, **WHOLE)
        assert_allclose(found.values("mmd", "value"), values, rtol=1e-7, atol=1e-12)


def test_text_classifier(checkpoint, ragged_tsv, ragged_texts, bert_tokenizer):
    folder = checkpoint("bert-classifier")
    results = measure(folder, ragged_tsv, sequence_length=64, batch_size=5, dtype="float64")
    model = tf.BertForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    labels = np.array([label for _, label in ragged_texts])
    inputs = [dict(bert_tokenizer(text, return_tensors="pt")) for text, _ in ragged_texts]  # one by one: no padding
    states = np.stack([oracle.taps(model, "bert.encoder.layer", each)[0][:, 0, 0] for each in inputs], 1)
    logits = np.concatenate(oracle.exits(model, "bert.encoder.layer", *inputs), 1)
    assert_allclose(results.values("displacement", "mean"), steps(states).mean(1), **EXACT)
    assert_allclose(results.values("nc1", "value")[1:], [nc1(x, labels) for x in states[1:]], **SINGLE)
    check_lens(results, logits, labels)
    expected = [f1_score(labels, layer.argmax(-1), average="macro") for layer in logits]
    assert_allclose(results.values("lens_f1", "macro"), expected, **EXACT)
