"""Masked language models: everything is measured on the text as it is, only the lens on masked text."""

from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import torch
import transformers as tf

from fulldepth.measurement import measure
from fulldepth.reporting import render
from measurement import oracle

LM = {"lens_accuracy", "lens_loss", "saturation", "effective_depth"}
T, N = 16, 5
EXACT = {"rtol": 1e-9, "atol": 1e-10}
SINGLE = {"rtol": 3e-6, "atol": 1e-7}
"""For losses, which pass through float32."""
FEW = {"order": "first", "max_sequences": N, "sequence_length": T, "batch_size": N, "dtype": "float64"}


def clean_windows(tokenizer, text_file):
    """[N, T] ids: the text as one stream, cut, each window between [CLS] and [SEP]."""
    ids = tokenizer(text_file.read_text(), add_special_tokens=False)["input_ids"]
    body = torch.tensor(ids[: N * (T - 2)]).view(N, T - 2)
    ends = torch.ones(N, 1, dtype=torch.int64)
    return torch.cat([tokenizer.cls_token_id * ends, body, tokenizer.sep_token_id * ends], dim=1)


def hidden_states(model, ids):
    """[L+1, N, T, D] what transformers returns; BERT has no final norm, so the last one is the stream itself."""
    with torch.no_grad():
        found = model(input_ids=ids, output_hidden_states=True).hidden_states
    return np.stack([h.numpy() for h in found])


def check_clean(results, states):
    """The measures that read no prediction, against states of the text as it is."""
    psi = oracle.psi(states[:-1], states[1:]).reshape(len(states) - 1, -1)
    np.testing.assert_allclose(results.values("displacement", "mean", "residual"), psi.mean(1), **EXACT)
    ratio = np.linalg.norm(states[:-1], axis=-1) / np.linalg.norm(states[1:] - states[:-1], axis=-1)
    np.testing.assert_allclose(results.values("norm_ratio", "mean"), ratio.mean((1, 2)), **EXACT)
    cells = [oracle.coherence_cells(a, b).mean() for a, b in pairwise(states)]
    np.testing.assert_allclose(results.values("coherence", "mean", "residual"), cells, atol=1e-9)
    entropy = [np.mean([oracle.entropy(z) for z in layer]) for layer in states]
    np.testing.assert_allclose(results.values("renyi_entropy", "mean:plain:1", "residual"), entropy, rtol=1e-8)


def test_only_the_lens_reads_masked_text(checkpoint, text_file, bert_tokenizer):
    folder = checkpoint("bert")
    results = measure(folder, text_file, grid_samples=N, **FEW)
    model = tf.BertForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids = clean_windows(bert_tokenizer, text_file)
    check_clean(results, hidden_states(model, ids))

    shown = results.meta["lens_grid"]["samples"]  # the grid says where the masks are
    masked = torch.tensor([[token == "[MASK]" for token in sample["tokens"]] for sample in shown])
    assert masked.sum(1).tolist() == [round(0.15 * (T - 2))] * N
    inputs = {"input_ids": ids.masked_fill(masked, bert_tokenizer.mask_token_id)}
    logits = oracle.exits(model, "bert.encoder.layer", inputs)[:, masked.numpy()]  # [L+1, M, V]
    targets = ids[masked].numpy()
    loss = -np.take_along_axis(oracle.log_softmax(logits), targets[None, :, None], -1).mean((1, 2))
    np.testing.assert_allclose(results.values("lens_loss", "mean"), loss, **SINGLE)
    best = logits.argmax(-1)
    np.testing.assert_allclose(results.values("lens_accuracy", "mean"), (best == targets).mean(1), **EXACT)
    settled = [next(n for n in (1, 2, 3) if len(set(column[n:])) == 1) for column in best.T]
    assert results.values("saturation", "count").tolist() == np.bincount(settled, minlength=4)[1:].tolist()

    assert results.meta["data"]["masked_share"] == 0.15
    assert "15 % of its tokens masked" in results.meta["token_policy"]["sentence"]
    assert "15 % of its tokens masked" in render(results.table, results.meta)


def test_without_a_mask_token_only_the_lens_is_left_out(checkpoint, text_file, tokenizer, tmp_path):
    folder = tmp_path / "bert"
    shutil.copytree(checkpoint("bert"), folder)
    tokenizer.save_pretrained(folder)
    results = measure(folder, text_file, **FEW)
    left_out = {entry["measure"]: entry["reason"] for entry in results.meta["left_out"]}
    assert left_out.keys() >= LM
    assert all("no mask token" in left_out[name] for name in LM)
    assert results.meta["lens_grid"] is None
    ids = torch.tensor(tokenizer(text_file.read_text())["input_ids"][: N * T]).view(N, T)
    check_clean(results, hidden_states(tf.BertForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval(), ids))
