"""The lens between attention and MLP, against the stock model's own states in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from torch.nn import functional as F

from fulldepth.errors import FulldepthError
from fulldepth.measurement import measure
from measurement import oracle

T, N = 16, 6
BOTH = ["residual", "attention_output"]
SIZES = {"order": "first", "max_sequences": N, "sequence_length": T, "batch_size": 4, "dtype": "float64", "exact": True}
LENS = ["lens_accuracy", "lens_loss", "saturation", "effective_depth"]
MIDDLE = {"llama": "post_attention_layernorm", "gemma2": "pre_feedforward_layernorm"}
CLASSES = {"llama": tf.LlamaForCausalLM, "gemma2": tf.Gemma2ForCausalLM}


@pytest.mark.parametrize("family", MIDDLE)
def test_it_reads_what_the_stock_model_has_after_attention(family, checkpoint, text_file, tokenizer):
    folder = checkpoint(family)
    results = measure(folder, text_file, measures=LENS, lens_sites=BOTH, **SIZES)
    model = CLASSES[family].from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    ids = torch.tensor(tokenizer(text_file.read_text())["input_ids"][: N * T]).view(N, T)
    states, inner = oracle.taps(model, "model.layers", {"input_ids": ids}, middle=(MIDDLE[family], "in"))
    for site, layers in (("residual", states), ("attention_output", inner["middle"])):
        losses, accuracies = [], []
        for layer in layers:
            with torch.no_grad():
                logits = model.lm_head(model.model.norm(torch.from_numpy(np.asarray(layer))))[:, :-1]
            if cap := getattr(model.config, "final_logit_softcapping", None):
                logits = cap * torch.tanh(logits / cap)
            losses.append(float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())))
            accuracies.append(float((logits.argmax(-1) == ids[:, 1:]).double().mean()))
        np.testing.assert_allclose(results.values("lens_loss", "mean", site), losses, rtol=3e-6)
        np.testing.assert_allclose(results.values("lens_accuracy", "mean", site), accuracies, rtol=1e-12)
    rows = results.table[(results.table.measure == "lens_loss") & (results.table.site == "attention_output")]
    assert sorted(rows.layer.unique()) == list(range(1, len(states)))
    # everything else is what it is without the option
    plain = measure(folder, text_file, measures=LENS, **SIZES).table
    same = results.table[results.table.site != "attention_output"].reset_index(drop=True)
    assert same.astype(str).equals(plain.astype(str))


def test_classifiers_are_read_there_too(checkpoint, ragged_tsv):
    folder = checkpoint("llama-classifier")
    results = measure(folder, ragged_tsv, measures=LENS, lens_sites=BOTH, **SIZES | {"sequence_length": 64})
    plain = measure(folder, ragged_tsv, measures=LENS, **SIZES | {"sequence_length": 64})
    inner = results.values("lens_loss", "mean", "attention_output")
    outer = results.values("lens_loss", "mean", "residual")
    assert len(inner) == len(outer) - 1
    assert np.isfinite(inner).all()
    np.testing.assert_array_equal(outer, plain.values("lens_loss", "mean"))


@pytest.mark.parametrize(
    ("family", "measures"),
    [("gpt_neox", LENS), ("bert", LENS), ("depth_llama-hyper", LENS), ("llama", ["displacement"])],
)
def test_where_there_is_no_such_stream_it_is_refused(family, measures, checkpoint, text_file):
    with pytest.raises(FulldepthError, match="lens_sites: attention_output"):
        measure(checkpoint(family), text_file, measures=measures, lens_sites=BOTH, **SIZES)
