"""The lens between attention and MLP, against the stock model's own states in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf

from fulldepth.errors import FulldepthError
from fulldepth.measurement import measure
from measurement import oracle
from metrics.oracle import of_lens

T, N = 16, 6
SIZES = {"order": "first", "max_sequences": N, "batch_size": 4, "dtype": "float64", "exact": True}
LENS = ["lens_accuracy", "lens_loss", "saturation", "effective_depth"]
MIDDLE = {"llama": "post_attention_layernorm", "gemma2": "pre_feedforward_layernorm"}
BOTH = ["residual", "attention_output"]


@torch.no_grad()
@pytest.mark.parametrize("family", MIDDLE)
def test_it_reads_what_the_stock_model_has_after_attention(family, checkpoint, text_file, windows):
    results = measure(checkpoint(family), text_file, measures=LENS, lens_sites=BOTH, sequence_length=T, **SIZES)
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    model = tf.AutoModelForCausalLM.from_pretrained(checkpoint(family), **options).eval()
    ids = windows(N, T)
    states, inner = oracle.taps(model, "model.layers", {"input_ids": ids}, middle=MIDDLE[family])
    for site, layers in zip(BOTH, (states, inner["middle"]), strict=True):
        logits = model.lm_head(model.model.norm(torch.from_numpy(layers)))[:, :, :-1].flatten(1, 2)
        if cap := getattr(model.config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        accuracies, losses, _ = of_lens(logits.numpy(), ids[:, 1:].flatten().numpy())
        found = results.values("lens_loss", "mean", site)
        assert found.index[0] == (site == "attention_output")
        np.testing.assert_allclose(found, losses, rtol=3e-6)
        np.testing.assert_allclose(results.values("lens_accuracy", "mean", site), accuracies, rtol=1e-12)
    # everything else is what it is without the option
    plain = measure(checkpoint(family), text_file, measures=LENS, sequence_length=T, **SIZES).table
    same = results.table.query("site != 'attention_output'").reset_index(drop=True)
    assert same.astype(str).equals(plain.astype(str))


@pytest.mark.parametrize(
    ("family", "measures"),
    [("gpt_neox", LENS), ("bert", LENS), ("depth_llama-hyper", LENS), ("llama", ["displacement"])],
)
def test_where_there_is_no_such_stream_it_is_refused(family, measures, checkpoint, text_file):
    with pytest.raises(FulldepthError, match="lens_sites: attention_output"):
        measure(checkpoint(family), text_file, measures=measures, lens_sites=BOTH, sequence_length=T, **SIZES)
