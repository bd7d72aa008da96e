"""Early exit, layer-wise accuracy and scores of a GPT-2 classifier of texts, against stock transformers in float64.

The oracle reads the checkpoint's files alone: of one text at a time, without padding, the state of layer l at the last
position whose token is not the padding token, `ln_f`, and the matrix of that layer.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import fulldepth
import tiny_models
from exit.plain import leave, softmax
from fulldepth.exit import sweep
from skip.word_tokenizer import tokenizer, words

LABELS = ("LABEL_0", "LABEL_1", "LABEL_2")
RULES = ["confidence", "margin", "entropy", "patience"]
THRESHOLDS = [0.35, 0.6, 0.9, 1.0]
HEADS = "exit_heads.safetensors"


@pytest.fixture(scope="module")
def rows():
    """Texts of 1 to 40 words in three classes; three hold the padding token as a word."""
    generator = np.random.default_rng(3)
    texts = [words(*generator.integers(0, 80, int(length))) for length in generator.integers(2, 41, 45)]
    texts += ["w7", "w5 [PAD] w9 w11", "w3 w4 w6 [PAD] [PAD]", "[PAD] [PAD]"]
    return [{"text": text, "label": LABELS[int(generator.integers(3))]} for text in texts]


def checkpoint(folder, side, own_heads):
    """Files of a classifier, written by transformers and safetensors; its layers disagree."""
    model = tiny_models.build("gpt2-classifier")
    model.config.pad_token_id = tokenizer().pad_token_id
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_proj.weight.mul_(8.0)
        model.score.weight.mul_(8.0)
        model.transformer.ln_f.weight.add_(0.3 * torch.randn(tiny_models.WIDTH, generator=generator))
        model.transformer.ln_f.bias.add_(0.1 * torch.randn(tiny_models.WIDTH, generator=generator))
    model.save_pretrained(folder)
    tokens = tokenizer()
    tokens.padding_side = side
    tokens.save_pretrained(folder)
    if own_heads:
        heads = {
            f"exit_heads.{n}.weight": 0.2 * torch.randn(model.score.weight.shape, generator=generator) for n in (1, 2)
        }
        save_file(heads, folder / HEADS)
    return folder


def layer_logits(folder, rows):
    """[N, L, C] logits of every text at every layer."""
    model = tf.GPT2ForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    tokens = tf.AutoTokenizer.from_pretrained(folder)
    path = folder / HEADS
    stored = load_file(path) if path.exists() else {}
    heads = [stored.get(f"exit_heads.{n}.weight", model.score.weight).detach().double() for n in (1, 2)]
    heads.append(model.score.weight.detach())
    before_norm = []
    model.transformer.ln_f.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    logits = []
    for row in rows:
        ids = tokens(row["text"]).input_ids
        at = max(n for n, token in enumerate(ids) if token != model.config.pad_token_id or n == 0)
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_hidden_states=True)
        states = [*output.hidden_states[1:-1], before_norm.pop()]  # transformers gives the last one after the norm
        own = []
        for state, weight in zip(states, heads, strict=True):
            h = state[0, at].numpy()
            h = (h - h.mean()) / np.sqrt(h.var() + model.config.layer_norm_epsilon)
            h = h * model.transformer.ln_f.weight.detach().numpy() + model.transformer.ln_f.bias.detach().numpy()
            own.append(weight.numpy() @ h)
        np.testing.assert_allclose(own[-1], output.logits[0], rtol=1e-9)
        logits.append(own)
    return np.array(logits)


@pytest.fixture(scope="module", params=[("right", True), ("left", False)], ids=str)
def subject(request, rows, tmp_path_factory):
    """Checkpoint, data file, logits [N, L, C] of the oracle, and targets [N]."""
    folder = tmp_path_factory.mktemp("gpt2")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = checkpoint(folder / "model", *request.param)
    return path, data, layer_logits(path, rows), np.array([LABELS.index(row["label"]) for row in rows])


def expected(logits, targets, rule, threshold):
    """Exits of each layer, accuracy, loss and mean exit layer."""
    left = np.array([leave([list(layer) for layer in sample], rule, threshold, 1) for sample in logits])
    out = logits[np.arange(len(left)), left - 1]
    loss = -np.mean([np.log(softmax(list(row))[target]) for row, target in zip(out, targets, strict=True)])
    exits = [int((left == layer).sum()) for layer in (1, 2, 3)]
    return exits, float((out.argmax(-1) == targets).mean()), float(loss), float(left.mean())


def check_exits(table, logits, targets, rule):
    seen = 0
    for row in table:
        exits, accuracy, loss, mean = expected(logits, targets, rule, row["threshold"])
        assert row["exits"] == exits
        assert row["accuracy"] == pytest.approx(accuracy)
        assert row["loss"] == pytest.approx(loss, rel=1e-9)
        assert sum((n + 1) * count for n, count in enumerate(row["exits"])) / sum(row["exits"]) == pytest.approx(mean)
        assert row["theoretical_speedup"] == pytest.approx(3 / mean)
        seen += exits[1]  # layers between the first and the last decide as well
    assert seen > 0
    assert len(table) == len(THRESHOLDS)


@pytest.mark.parametrize("batch_size", [7, 64])
def test_exit(subject, batch_size):
    path, data, logits, targets = subject
    options = {"dtype": "float64", "batch_size": batch_size, "rounds": 1, "rule": RULES, "thresholds": THRESHOLDS}
    results = sweep(str(path), str(data), **options)
    for rule in RULES:
        table = [row for row in results.meta["exits"] if row["rule"] == rule]
        check_exits(table, logits, targets, rule)
    for layer in (1, 2, 3):
        share = (logits[:, layer - 1].argmax(-1) == targets).mean()
        assert results.values("lens_accuracy", "mean")[layer] == pytest.approx(share)
    assert results.meta["full"]["accuracy"] == pytest.approx((logits[:, -1].argmax(-1) == targets).mean())


def test_measure(subject):
    path, data, logits, targets = subject
    results = fulldepth.measure(str(path), str(data), dtype="float64", batch_size=7)
    predicted = logits.argmax(-1)  # [N, L]
    for layer in (1, 2, 3):
        share = (predicted[:, layer - 1] == targets).mean()
        loss = -np.mean([np.log(softmax(list(s[layer - 1]))[t]) for s, t in zip(logits, targets, strict=True)])
        assert results.values("lens_accuracy", "mean")[layer] == pytest.approx(share)
        assert results.values("lens_loss", "mean")[layer] == pytest.approx(loss, rel=1e-6)
