"""Both stacks of encoder-decoders, against numpy on transformers' own hidden states, logits and losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from numpy.testing import assert_allclose

import fulldepth
from data.conftest import jsonl
from measurement import oracle
from metrics.oracle import cosines, steps
from refusals import refused
from tiny_models import shaken

PAIRS = [
    ("translate: the cat sat", "le chat"),
    ("translate: a dog and a very old house", "un chien et une maison"),
    ("translate: no", "non"),
    ("translate: the rain falls on the sea", "la pluie tombe sur la mer"),
    ("translate: one more", "encore une fois"),
]
SMALL = {"vocab_size": 320, "d_model": 32, "pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
T5 = {**SMALL, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
BART = {**SMALL, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "bos_token_id": 0}
MODELS = {
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory, tokenizer):
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp(request.param) / request.param
    shaken(MODELS[request.param]()).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    jsonl(path, *({"input": a, "target": b} for a, b in PAIRS))
    return path


@torch.no_grad()
def test_both_stacks(folder, rows, tokenizer):
    results = fulldepth.measure(str(folder), str(rows), batch_size=2, dtype="float64", progress=False)
    stacks = {stack["name"]: stack["num_layers"] for stack in results.meta["stacks"]}
    assert stacks == {"encoder": 3, "decoder": 2}
    model = tf.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64).eval()
    blocks = "{}.block" if model.config.model_type == "t5" else "model.{}.layers"
    losses, right = [], []
    states = {name: [] for name in stacks}
    for pair in PAIRS:
        ids, labels = (torch.tensor([tokenizer(text)["input_ids"]]) for text in pair)
        inputs = {"input_ids": ids, "labels": labels}
        for name in states:
            states[name].append(oracle.taps(model, blocks.format(name), inputs)[0][:, 0])
        output = model(**inputs)
        losses.append(F.cross_entropy(output.logits[0], labels[0], reduction="none"))
        right.append((output.logits.argmax(-1) == labels)[0].double())
    for name, parts in states.items():
        h = np.concatenate(parts, axis=1)  # [L+1, N, D]
        assert_allclose(results.values("displacement", "mean", name), steps(h).mean(1), rtol=1e-6)
        similar = cosines(h[0], h[-1]).mean()
        assert results.values("cosine", "mean_raw", name, other=len(h) - 1).iloc[0] == pytest.approx(similar, rel=1e-6)
    for name, values, rel in (("lens_loss", losses, 1e-5), ("lens_accuracy", right, 1e-9)):
        found = results.values(name, "mean")  # of the decoder alone
        assert found.iloc[-1] == pytest.approx(float(torch.cat(values).mean()), rel=rel)
    assert {"encoder:zeta_L", "decoder:zeta_L"} <= set(results.headline)
    assert {"displacement:Encoder", "displacement:Decoder"} <= set(results.figures())
    assert results.meta["lens_grid"]["samples"]


def test_one_stack_alone_and_refusals(folder, rows, text_file):
    for data in (rows, text_file):
        one = fulldepth.measure(folder, data, tower="encoder", progress=False, measures=["displacement"])
        assert "residual" in set(one.table.site) <= {"residual", "final_normed"}
    with refused("input and a target"):
        fulldepth.measure(str(folder), str(text_file), progress=False)


@pytest.mark.parametrize(
    ("measure", "reason"),
    [("layer_effect", "an encoder beside its decoder"), ("linear_lens_loss", "Name other pairs to fit on")],
)
def test_causes_are_refused_for_what_the_model_is(measure, reason, folder, rows):
    with refused(reason):
        fulldepth.measure(str(folder), str(rows), measures=[measure], progress=False)
