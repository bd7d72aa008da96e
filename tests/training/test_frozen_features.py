"""New heads on frozen features: those of plain loops over stock models, near scikit-learn's; nothing else changes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
)

from fulldepth.data import ShuffledSampler, open_source, train_wordpiece
from fulldepth.hf import EXIT_HEADS
from fulldepth.reporting.training import objective_line
from fulldepth.training import dry_run_lines, train
from refusals import refused
from tiny_models import same_weights
from training.conftest import ENCODER, GPT2, interrupted, sentences
from training.test_labelled import VIT, asked, text_recipe

LAYERS, BATCH, RATE, DECAY = 3, 8, 0.02, 0.1
PROBE = {
    "method": "frozen-features",
    "steps": 6,
    "eval_every": 3,
    "save_every": 3,
    "global_batch_size": BATCH,
    "learning_rate": RATE,
    "schedule": "constant",
    "weight_decay": DECAY,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "clip": 1e-3,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A recipe that goes on from a ViT with dropout that was trained a little, and its checkpoint."""
    run = tmp_path_factory.mktemp("images")
    often = {"steps": 150, "eval_every": 150, "save_every": 150, "global_batch_size": 32, "micro_batch_size": 32}
    train(asked(VIT, method="aligned", **often), run / "first")
    recipe = {key: VIT[key] for key in ("task", "data")} | {"model": {"checkpoint": str(run / "first")}}
    return recipe, run / "first" / "checkpoint-150"


def image_features(folder, part):
    """`[L, N, D]` features of the digits, and their labels, by transformers alone."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor, rows = AutoImageProcessor.from_pretrained(folder), open_source(f"digits:builtin/{part}").records
    with torch.no_grad():
        pixels = processor(images=[row.image() for row in rows], return_tensors="pt")
        states = model.vit(**pixels, output_hidden_states=True).hidden_states[1:]
        features = torch.stack([model.vit.layernorm(state)[:, 0] for state in states])
    return features, torch.tensor([row.label for row in rows])


def head_of(features, labels, classes, steps):
    """A linear head that a plain loop trains on the features of one layer `[N, D]`."""
    head = nn.Linear(features.shape[1], classes, bias=False)
    nn.init.zeros_(head.weight)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    order = list(ShuffledSampler(len(labels), seed=0, length=steps * BATCH))
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        F.cross_entropy(head(features[chosen]), labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.weight.detach()


def heads_in(checkpoint, last):
    """The trained heads of layers 1..L in a checkpoint; `last` is the name of the model's own."""
    own, stored = load_file(checkpoint / "model.safetensors"), load_file(checkpoint / EXIT_HEADS)
    return [stored[f"exit_heads.{layer}.weight"] for layer in range(1, LAYERS)] + [own[last]]


def check_backbone(start, checkpoint, head):
    """All weights outside the last linear layer are bit for bit those of the start; that layer's bias is zero."""
    before, after = (load_file(folder / "model.safetensors") for folder in (start, checkpoint))
    assert before.keys() - {f"{head}.weight"} <= after.keys()
    for name, weight in after.items():
        if name == f"{head}.bias":
            assert not weight.any()
        elif name != f"{head}.weight":
            assert torch.equal(weight, before[name]), name


def by_layer(results, measure):
    rows = results.table[(results.table.measure == measure) & (results.table.step == results.table.step.max())]
    return rows[rows.layer > 0].sort_values("layer").value.tolist()


def test_every_head_of_images_is_that_of_a_plain_loop(images, tmp_path):
    recipe, start = images
    results = train(asked(recipe, **PROBE), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-6"
    check_backbone(start, checkpoint, "classifier")
    features, labels = image_features(start, "train")
    held_out, expected = image_features(start, "test")
    for layer, head in enumerate(heads_in(checkpoint, "classifier.weight")):
        own = head_of(features[layer], labels, 10, PROBE["steps"])
        torch.testing.assert_close(head, own, rtol=0, atol=1e-6)
        logits = held_out[layer] @ own.T
        loss, right = F.cross_entropy(logits, expected).item(), (logits.argmax(-1) == expected).double().mean().item()
        assert by_layer(results, "lens_loss")[layer] == pytest.approx(loss, abs=1e-5)
        assert by_layer(results, "lens_accuracy")[layer] == pytest.approx(right, abs=1e-12)
    train(asked(recipe, **PROBE), interrupted(tmp_path / "run", 6, tmp_path / "cut"), resume=True)
    assert same_weights(load_file(checkpoint / EXIT_HEADS), load_file(tmp_path / "cut" / "checkpoint-6" / EXIT_HEADS))

    assert {"lens_accuracy", "lens_loss", "steps_lens_accuracy"} <= {*results.figures()}
    assert objective_line(results.meta["settings"]["objective"]).startswith("loss of each layer’s own head (")
    other = train(asked(recipe, **PROBE, seed=1), tmp_path / "other")
    assert other.meta["settings"]["clip"] == 0


def test_every_head_of_sentences_is_that_of_a_plain_loop(tmp_path):
    path = sentences(tmp_path / "texts.jsonl", 40)
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    train(asked(text_recipe(path, {**GPT2, **dropout}, "bpe:300", steps=2, learning_rate=1e-3)), tmp_path / "first")
    start = tmp_path / "first" / "checkpoint-2"
    recipe = text_recipe(path, {"checkpoint": str(start)}, None)
    recipe["data"]["validation"] = str(path)
    train(asked(recipe, **PROBE), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-6"
    check_backbone(start, checkpoint, "score")
    model, reader = (
        AutoModelForSequenceClassification.from_pretrained(start).eval(),
        AutoTokenizer.from_pretrained(start),
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    features = []
    with torch.no_grad():
        for row in rows:
            out = model.transformer(**reader(row["sentence"], return_tensors="pt"), output_hidden_states=True)
            # the last state has the final norm already
            states = [model.transformer.ln_f(state) for state in out.hidden_states[1:-1]] + [out.hidden_states[-1]]
            features.append(torch.stack([state[0, -1] for state in states]))
    stacked = torch.stack(features, 1)  # [L, N, D]
    for layer, head in enumerate(heads_in(checkpoint, "score.weight")):
        own = head_of(stacked[layer], labels, 2, PROBE["steps"])
        torch.testing.assert_close(head, own, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_with_enough_steps_every_head_is_as_good_as_logistic_regression(images, tmp_path):
    """That of scikit-learn, whose penalty (C = 1) stops it where so many steps of AdamW come to."""
    recipe, start = images
    changes = {"steps": 150, "eval_every": 150, "save_every": 150, "global_batch_size": 256, "weight_decay": 0.0}
    results = train(asked(recipe, **PROBE | changes | {"schedule": "cosine", "learning_rate": 0.3}), tmp_path / "run")
    features, labels = image_features(start, "train")
    held_out, expected = image_features(start, "test")
    for layer, head in enumerate(heads_in(tmp_path / "run" / "checkpoint-150", "classifier.weight")):
        fitted = LogisticRegression(C=1.0, fit_intercept=False, max_iter=5000).fit(features[layer], labels)
        losses = [
            F.cross_entropy(features[layer] @ weight.T, labels).item()
            for weight in (head, torch.tensor(fitted.coef_).float())
        ]
        assert losses[0] == pytest.approx(losses[1], abs=0.03)
        right = fitted.score(held_out[layer], expected)
        assert right > 0.7
        assert by_layer(results, "lens_accuracy")[layer] == pytest.approx(right, abs=0.03)


def test_a_dry_run_counts_the_heads_alone(images):
    recipe, _ = images
    lines = {name: (value, sentence) for name, value, sentence in dry_run_lines(asked(recipe, **PROBE))}
    assert lines["model"][1] == f"{LAYERS * 10 * ENCODER['hidden_size']:,} parameters are trained."
    assert lines["training"][0] == lines["forward"][0]


def test_refusals(images, tmp_path):
    recipe, _ = images
    for changes in ({"model": {"type": "vit"}}, {"task": "causal-lm"}, {"task": "detection"}):
        with refused("frozen-features trains new heads on the features of a checkpoint"):
            asked(recipe | changes, **PROBE)
    for objective in ({"jump": 1.0}, {"multi_exit": {"weights": "linear"}}, {"multi_exit": None}):
        with refused("Leave out objective"):
            train(asked(recipe, **PROBE, objective=objective), tmp_path / "run")
    tokenizer = train_wordpiece(["a fine film", "a dull film"] * 3, 300)
    body = BertModel(BertConfig(vocab_size=len(tokenizer), **ENCODER), add_pooling_layer=False)
    body.save_pretrained(tmp_path / "body")
    tokenizer.save_pretrained(tmp_path / "body")
    texts = text_recipe(sentences(tmp_path / "texts.jsonl", 40), {"checkpoint": str(tmp_path / "body")}, None)
    with refused(r"pooler\.dense\.\w+\); they would be random"):
        train(asked(texts, **PROBE), tmp_path / "run")
