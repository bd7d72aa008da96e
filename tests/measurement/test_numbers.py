"""The numbers, against plain numpy on states that come straight from transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf

from fulldepth.measurement import measure
from measurement import oracle

T, N = 16, 9
EXACT = {"rtol": 1e-9, "atol": 1e-10}
SINGLE = {"rtol": 3e-6, "atol": 1e-7}
"""For what passes through float32 on its way: the sampled tokens (kept in half the memory) and the losses."""


def windows(tokenizer, text_file):
    """[N, T] ids: the text as one stream, cut."""
    ids = tokenizer(text_file.read_text())["input_ids"]
    return torch.tensor(ids[: N * T]).view(N, T)


@pytest.fixture(scope="module")
def llama(trained, text_file, tokenizer):
    """Results in float64, the same states through hooks of our own, and the model."""
    results = measure(
        trained, text_file, max_sequences=N, sequence_length=T, batch_size=4, dtype="float64", order="first"
    )
    model = tf.LlamaForCausalLM.from_pretrained(trained, dtype=torch.float64).eval()
    ids = windows(tokenizer, text_file)
    states, inner = oracle.taps(
        model,
        "model.layers",
        {"input_ids": ids},
        middle=("post_attention_layernorm", "in"),
        value=("self_attn.v_proj", "out"),
    )
    return results, states, inner, model, ids


def matrix(results, measure_name, statistic):
    rows = results.table[(results.table.measure == measure_name) & (results.table.statistic == statistic)]
    return rows.pivot(index="layer", columns="other", values="value").to_numpy()


@pytest.mark.parametrize(("suffix", "start"), [("", 0), (":no-first", 1)])
def test_displacement_norms_and_cosines(llama, suffix, start):
    results, states, *_ = llama
    states = states[:, :, start:].reshape(len(states), -1, states.shape[-1])  # [L+1, tokens, D]
    psi = oracle.psi(states[:-1], states[1:])
    near = {"rtol": 0, "atol": 2**-13}
    for statistic, of in (("mean", np.mean), ("std", np.std)):
        found = results.values("displacement", statistic + suffix, "residual")
        np.testing.assert_allclose(found, of(psi, axis=1), **EXACT)
    for share in (5, 50, 95):
        found = results.values("displacement", f"p{share:02d}" + suffix, "residual")
        np.testing.assert_allclose(found, np.percentile(psi, share, axis=1), **near)
    ratio = np.linalg.norm(states[:-1], axis=-1) / np.linalg.norm(states[1:] - states[:-1], axis=-1)
    np.testing.assert_allclose(results.values("norm_ratio", "mean" + suffix), ratio.mean(1), **EXACT)
    centred = states - states.mean(1, keepdims=True)
    for statistic, x, tolerance in (("mean_raw", states, EXACT), ("mean", centred, SINGLE)):
        expected = [[oracle.cosines(a, b).mean() for b in x] for a in x]
        np.testing.assert_allclose(matrix(results, "cosine", statistic + suffix), expected, **tolerance)
    for share in (25, 50, 75):
        found = results.values("cosine", f"p{share}" + suffix, other=3)
        expected = np.percentile(oracle.cosines(centred, centred[-1]), share, axis=1)
        np.testing.assert_allclose(found, expected, **SINGLE)
    for statistic, of in (("debiased", oracle.cka_debiased), ("biased", oracle.cka_biased)):
        expected = [[of(a, b) for b in states] for a in states]
        np.testing.assert_allclose(matrix(results, "cka", statistic + suffix), expected, **SINGLE)


def test_jump_rate_and_the_normed_reading(llama):
    results, states, _, model, _ = llama
    mean = oracle.psi(states[:-1], states[1:]).mean((1, 2))
    expected = {layer: oracle.jump(mean, layer) for layer in (2, 3)}
    assert results.values("jump_rate", "value").to_dict() == pytest.approx(expected, rel=1e-9)
    with torch.no_grad():
        normed = model.model.norm(torch.from_numpy(states[-1])).numpy()
    found = results.values("displacement", "mean", "final_normed")
    assert found.to_dict() == {3: pytest.approx(oracle.psi(states[-2], normed).mean())}


@pytest.mark.parametrize("site", ["residual", "attention"])
def test_coherence(llama, site):
    results, states, inner, *_ = llama
    ends = states[1:] if site == "residual" else inner["middle"]
    for layer in (1, 2, 3):
        cells = oracle.coherence_cells(states[layer - 1], ends[layer - 1])
        corrected = np.maximum(0, (N * cells - 1) / (N - 1))
        expected = {"mean": cells.mean(), "mean_corrected": corrected.mean()}
        expected["share_0.3_0.7"] = ((cells >= 0.3) & (cells <= 0.7)).mean()
        shares = np.histogram(np.minimum(cells, 1.0), bins=np.linspace(0, 1, 11))[0] / cells.size
        expected |= {f"bin_{i}": share for i, share in enumerate(shares)}
        for statistic, value in expected.items():
            assert results.values("coherence", statistic, site)[layer] == pytest.approx(value, abs=1e-9), statistic


def test_lens(llama):
    results, _, _, model, ids = llama
    logits = oracle.exits(model, "model.layers", {"input_ids": ids})[:, :, :-1]  # [L+1, N, T-1, V]
    with torch.no_grad():
        np.testing.assert_allclose(logits[-1], model(input_ids=ids).logits[:, :-1].numpy(), **EXACT)
    targets, best = ids[:, 1:].numpy(), logits.argmax(-1)
    accuracy = (best == targets).mean((1, 2))
    assert accuracy[-1] > 0.3, "the model has learnt too little for this test to mean anything"
    np.testing.assert_allclose(results.values("lens_accuracy", "mean"), accuracy, **EXACT)
    loss = -np.take_along_axis(oracle.log_softmax(logits), targets[None, ..., None], -1).mean((1, 2, 3))
    np.testing.assert_allclose(results.values("lens_loss", "mean"), loss, **SINGLE)

    settled = [next(n for n in (1, 2, 3) if len(set(column[n:])) == 1) for column in best.reshape(4, -1).T]
    counts = np.bincount(settled, minlength=4)[1:]
    assert results.values("saturation", "count").tolist() == counts.tolist()
    np.testing.assert_allclose(results.values("saturation", "share"), counts / counts.sum())
    np.testing.assert_allclose(results.values("saturation", "cumulative"), counts.cumsum() / counts.sum())

    depths = results.table[results.table.measure == "effective_depth"].set_index("statistic").value
    assert depths["eps=0.05"] == next((n for n in (1, 2, 3) if accuracy[n] >= 0.95), 3)
    assert depths["relative_eps=0.05"] == next(n for n in (1, 2, 3) if accuracy[n] >= 0.95 * accuracy[3])


def test_lens_grid_shows_what_stopping_at_each_layer_predicts(llama, tokenizer):
    results, _, _, model, ids = llama
    samples = results.meta["lens_grid"]["samples"]
    assert len(samples) == 3
    logits = oracle.exits(model, "model.layers", {"input_ids": ids})
    chances = np.exp(oracle.log_softmax(logits))
    for index, sample in enumerate(samples):
        assert sample["tokens"] == [tokenizer.decode([i]) for i in ids[index].tolist()]
        assert sample["targets"] == [*sample["tokens"][1:], ""]
        for layer in range(4):
            best = logits[layer, index].argmax(-1)
            assert [cell[0] for cell in sample["grid"][layer]] == [tokenizer.decode([i]) for i in best.tolist()]
            shown = [cell[1] for cell in sample["grid"][layer]]
            np.testing.assert_allclose(shown, chances[layer, index].max(-1), atol=5.1e-5)
        best = logits[:, index].argmax(-1)
        settled = [next(n for n in (1, 2, 3) if len(set(best[n:, t])) == 1) for t in range(T)]
        assert sample["saturation"] == settled


def test_mmd_between_two_models_and_to_itself(trained, checkpoint, text_file, tokenizer):
    other, options = (
        checkpoint("llama", 1),
        {"max_sequences": 4, "sequence_length": T, "dtype": "float64", "order": "first"},
    )
    found = measure(trained, text_file, measures=["mmd"], reference=str(other), **options)
    ids = {"input_ids": windows(tokenizer, text_file)[:4]}
    mine, theirs = (
        oracle.taps(tf.LlamaForCausalLM.from_pretrained(f, dtype=torch.float64).eval(), "model.layers", ids)[0]
        for f in (trained, other)
    )
    expected = [oracle.mmd(a.reshape(4 * T, -1), b.reshape(4 * T, -1)) for a, b in zip(mine, theirs, strict=True)]
    np.testing.assert_allclose(found.values("mmd", "value"), expected, rtol=1e-7)
    itself = measure(trained, text_file, measures=["mmd"], reference=str(trained), **options)
    np.testing.assert_allclose(itself.values("mmd", "value"), 0, atol=1e-12)


def test_text_classifier(checkpoint, ragged_tsv, ragged_texts, bert_tokenizer):
    folder = checkpoint("bert-classifier")
    results = measure(folder, ragged_tsv, sequence_length=64, batch_size=5, dtype="float64")
    model = tf.BertForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    labels = np.array([label for _, label in ragged_texts])
    states, logits = [], []
    for text, _ in ragged_texts:  # one by one: no padding at all
        inputs = bert_tokenizer(text, return_tensors="pt")
        states.append(oracle.taps(model, "bert.encoder.layer", dict(inputs))[0][:, 0, 0])
        logits.append(oracle.exits(model, "bert.encoder.layer", dict(inputs))[:, 0])
    states, logits = np.stack(states, 1), np.stack(logits, 1)  # [L+1, samples, D or classes]
    psi = oracle.psi(states[:-1], states[1:])
    np.testing.assert_allclose(results.values("displacement", "mean"), psi.mean(1), **EXACT)
    expected = [oracle.nc1(x, labels) for x in states[1:]]
    np.testing.assert_allclose(results.values("nc1", "value")[1:], expected, **SINGLE)
    accuracy = (logits.argmax(-1) == labels).mean(1)
    np.testing.assert_allclose(results.values("lens_accuracy", "mean"), accuracy, **EXACT)
    loss = -np.take_along_axis(oracle.log_softmax(logits), labels[None, :, None], -1).mean((1, 2))
    np.testing.assert_allclose(results.values("lens_loss", "mean"), loss, **SINGLE)
