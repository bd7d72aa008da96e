"""Masked language models: everything is measured on the text as it is, only the lens on masked text."""

from __future__ import annotations

import shutil

import numpy as np
import torch
import transformers as tf
from numpy.testing import assert_allclose

from fulldepth.measurement import measure
from measurement import oracle
from metrics.oracle import of_lens, steps

T, N = 16, 5
FEW = {"order": "first", "max_sequences": N, "sequence_length": T, "batch_size": N, "dtype": "float64"}
NAMES = ["displacement", "lens_accuracy", "lens_loss", "saturation", "effective_depth"]


@torch.no_grad()
def check_clean(results, model, ids):
    """Displacement is that of the text as it is; BERT has no final norm, so its last hidden state is the stream."""
    states = np.stack([h.numpy() for h in model(input_ids=ids, output_hidden_states=True).hidden_states])
    assert_allclose(results.values("displacement", "mean", "residual"), steps(states).mean((1, 2)), rtol=1e-9)


def test_only_the_lens_reads_masked_text(checkpoint, text_file, bert_tokenizer):
    results = measure(checkpoint("bert"), text_file, measures=NAMES, grid_samples=N, **FEW)
    model = tf.BertForMaskedLM.from_pretrained(checkpoint("bert"), dtype=torch.float64).eval()
    text = bert_tokenizer(text_file.read_text(), add_special_tokens=False)["input_ids"]
    body = torch.tensor(text[: N * (T - 2)]).view(N, T - 2)
    ends = torch.ones(N, 1, dtype=torch.int64)  # each window stands between [CLS] and [SEP]
    ids = torch.cat([bert_tokenizer.cls_token_id * ends, body, bert_tokenizer.sep_token_id * ends], dim=1)
    check_clean(results, model, ids)

    shown = results.meta["lens_grid"]["samples"]  # the grid says where the masks are
    masked = torch.tensor([[token == "[MASK]" for token in sample["tokens"]] for sample in shown])
    assert masked.sum(1).tolist() == [round(0.15 * (T - 2))] * N
    inputs = {"input_ids": ids.masked_fill(masked, bert_tokenizer.mask_token_id)}
    logits = oracle.exits(model, "bert.encoder.layer", inputs)[0][:, masked.numpy()]  # [L+1, M, V]
    accuracy, loss, counts = of_lens(logits, ids[masked].numpy())
    assert_allclose(results.values("lens_loss", "mean"), loss, rtol=3e-6)
    assert_allclose(results.values("lens_accuracy", "mean"), accuracy)
    assert results.values("saturation", "count").tolist() == counts.tolist()
    assert results.meta["data"]["masked_share"] == 0.15
    assert "15 % of its tokens masked" in results.meta["token_policy"]["sentence"]


def test_without_a_mask_token_only_the_lens_is_left_out(checkpoint, text_file, tokenizer, windows, tmp_path):
    shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    results = measure(tmp_path / "bert", text_file, **FEW)
    left_out = {entry["measure"]: entry["reason"] for entry in results.meta["left_out"]}
    assert all("no mask token" in left_out[name] for name in NAMES[1:])
    assert results.meta["lens_grid"] is None
    check_clean(
        results, tf.BertForMaskedLM.from_pretrained(checkpoint("bert"), dtype=torch.float64).eval(), windows(N, T)
    )
