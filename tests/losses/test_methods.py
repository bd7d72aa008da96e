"""The four methods on classifiers against plain formulas on stock transformers' hidden states; parameter counts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.testing import assert_close

import tiny_models
from fulldepth.hf import exit_heads_of, open_model
from fulldepth.losses import METHODS, DepthTrainer, Objective, add_exit_heads
from losses.trained_step import slopes, states_of, step
from refusals import refused

METHODS_OF_LAYERS = ("aligned", "cos-regularised", "multi-exit")
BETA = 0.7


def feature(name, state, batch):
    if name != "gpt2-classifier":
        return state[:, 0]
    return torch.stack([row[(ids != 0).nonzero()[-1, 0]] for row, ids in zip(state, batch["input_ids"], strict=True)])


def weighted(model, name, state, batch, matrix=None):
    """Logits of a state `[B, T, D]` by the definition of the class; `matrix` replaces the last one and its bias."""
    state = feature(name, state, batch)
    if name in ("vit", "deit"):
        norm, last = getattr(model, name).layernorm, model.classifier
    elif name == "bert-classifier":
        dense, last = model.bert.pooler.dense, model.classifier
        state = torch.tanh(state @ dense.weight.T + dense.bias)
    else:
        norm, last = model.transformer.ln_f, model.score
    if name != "bert-classifier":
        state = F.layer_norm(state, state.shape[-1:], norm.weight, norm.bias, norm.eps)
    if matrix is not None:
        return state @ matrix.T
    return state @ last.weight.T + (0 if last.bias is None else last.bias)


def oracle(model, name, method, batch):
    """The loss of a method in float64."""
    model.config.tie_last_hidden_states = False
    output = model(**batch, output_hidden_states=True)
    states, labels = output.hidden_states[1:], batch["labels"]
    depth, loss = len(states), output.loss
    shares = [2 * layer / (depth * (depth + 1)) for layer in range(1, depth + 1)]
    if method == "cos-regularised":
        vectors = [feature(name, state, batch) for state in states]
        for share, vector in zip(shares, vectors, strict=True):
            product = (vector * vectors[-1]).sum(-1) / vector.norm(dim=-1) / vectors[-1].norm(dim=-1)
            loss = loss + BETA * share * (1 - product).mean()
    if method in ("aligned", "multi-exit"):
        loss = torch.zeros((), dtype=torch.float64)
        matrices = exit_heads_of(model) if method == "multi-exit" else {}
        for layer, (share, state) in enumerate(zip(shares, states, strict=True), start=1):
            matrix = matrices[layer].weight if layer in matrices else None
            logits = weighted(model, name, state, batch, matrix)
            chosen = logits[range(len(labels)), labels]
            loss = loss + share * (logits.exp().sum(-1).log() - chosen).mean()
    return loss


def subject(name):
    model = tiny_models.build(name, dtype=torch.float64)
    batch = tiny_models.inputs(model, batch=3)
    if name == "gpt2-classifier":
        batch["input_ids"][0, -1] = 0  # the padding id counts as padding for the model, whatever the mask says
    return model, {**batch, "labels": torch.tensor([0, 2, 1])}


def terms(method):
    changes = {"similarity": {"weight": BETA}, "aligned": {"schedule": "always"}, "multi_exit": {"schedule": "always"}}
    return {term: {**options, **changes[term]} for term, options in METHODS[method].items()}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for name in ("vit", "bert-classifier", "gpt2-classifier") for method in METHODS_OF_LAYERS),
        ("vit", "baseline"),
        ("deit", "multi-exit"),
    ],
)
def test_loss_and_gradient_are_those_of_the_formula(name, method):
    model, batch = subject(name)
    if method == "multi-exit":
        add_exit_heads(model)
        for head in exit_heads_of(model).values():
            nn.init.normal_(head.weight, std=0.5)
    expected = oracle(model, name, method, batch)
    loss, parts = step(model, Objective(**terms(method)), batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    assert next(iter(parts)) == "ce"
    got, wanted = (
        {weight: slope for weight, slope in slopes(model, each).items() if slope.any()} for each in (loss, expected)
    )
    assert_close(got, wanted, rtol=1e-7, atol=1e-10)


def language_loss(model, name, batch, shares):
    """Weighted cross-entropy of the next tokens of all layers, one text at a time without its padding."""
    matrices = exit_heads_of(model)
    body = model.base_model
    blocks, norm = (body.h, body.ln_f) if name == "gpt2" else (body.layers, body.norm)
    losses = [[] for _ in shares]
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        length = int(mask.sum())
        _, (_, *states) = states_of(blocks, partial(model, ids[None, :length], use_cache=False))
        for layer, state in enumerate(states, start=1):
            weight = matrices[layer].weight if layer in matrices else model.lm_head.weight
            logits = norm(state.reshape(length, -1)) @ weight.T
            if name == "gemma2":
                logits = 3.0 * torch.tanh(logits / 3.0)
            if name == "granite":
                logits = logits / 4.0
            for place in range(1, length):
                if labels[place] != -100:
                    row = logits[place - 1]
                    losses[layer - 1].append(row.exp().sum().log() - row[labels[place]])
    return torch.stack([s * torch.stack(each).mean() for s, each in zip(shares, losses, strict=True)]).sum()


@pytest.mark.parametrize(("name", "weights"), [("gpt2", "linear"), ("gemma2", "uniform"), ("granite", "linear")])
def test_language_models_train_each_layer_by_its_own_matrix(name, weights):
    """Odd steps take the model's own loss and leave the heads alone; padded batch, ignored labels."""
    model = tiny_models.build(name, dtype=torch.float64)
    add_exit_heads(model)
    for head in exit_heads_of(model).values():
        nn.init.normal_(head.weight, std=0.5)
    batch = tiny_models.inputs(model, batch=3)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["labels"][0, :4] = -100
    heads = {id(head.weight) for head in exit_heads_of(model).values()}
    shares = [1 / 3] * 3 if weights == "uniform" else [1 / 6, 2 / 6, 3 / 6]
    for number, weighed in ((1, [0.0, 0.0, 1.0]), (2, [BETA * share for share in shares])):
        expected = language_loss(model, name, batch, weighed)
        objective = Objective(multi_exit={"weights": weights, "weight": BETA})
        objective.step = number
        loss, _ = step(model, objective, batch)
        single = name != "gpt2" or number == 1  # RMS norms, and transformers' own loss, are computed in float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6 if single else 1e-10)
        got, wanted = slopes(model, loss), slopes(model, expected)
        assert got.keys() == {
            path for path, p in model.named_parameters() if p.requires_grad and (number == 2 or id(p) not in heads)
        }
        wanted = {path: wanted[path] for path in got}
        assert_close(got, wanted, rtol=1e-4 if single else 1e-7, atol=1e-6 if single else 1e-10)


def _deit(width, heads):
    return tf.DeiTConfig(
        hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, num_labels=1000, num_hidden_layers=12
    )


SHAPES = {
    # single classifier and multiple classifiers of Table 1 in millions; BERT-base on SST-2 is not in the table
    "DeiT-S": (tf.DeiTForImageClassification, lambda: _deit(384, 6), 22.05, 26.27),
    "DeiT-B": (tf.DeiTForImageClassification, lambda: _deit(768, 12), 86.57, 95.02),
    "BERT-base": (tf.BertForSequenceClassification, lambda: tf.BertConfig(num_labels=2), 109.48, 109.50),
    "GPT-2 with 2 classes": (tf.GPT2ForSequenceClassification, lambda: tf.GPT2Config(num_labels=2), 124.44, 124.46),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_table_1(shape):
    kind, config, single, multiple = SHAPES[shape]
    with torch.device("meta"):
        model = kind(config())

    def count():
        return sum(p.numel() for p in model.parameters())

    alone, width = count(), model.config.hidden_size
    distillation = 2 * width if shape.startswith("DeiT") else 0  # the paper's has no distillation token
    Objective(aligned=1.0).attach(model).detach()
    assert count() == alone
    assert (alone - distillation) / 1e6 == pytest.approx(single, abs=0.005)
    add_exit_heads(model)
    assert count() - alone == 11 * model.config.num_labels * width
    assert (count() - distillation) / 1e6 == pytest.approx(multiple, abs=0.005)


def test_heads_of_a_language_model_cost_what_table_1_says():
    """GPT-2: 541.57 M with a head per layer, of which 78.39 % are saved."""
    with torch.device("meta"):
        model = tf.GPT2LMHeadModel(tf.GPT2Config())
    alone = model.num_parameters()
    add_exit_heads(model)
    assert (model.num_parameters() - alone) / 541.57e6 == pytest.approx(0.7839, abs=1e-4)


def test_what_cannot_have_own_heads_is_refused():
    with refused("has no known prediction head"):
        add_exit_heads(tiny_models.build("bert-bare"))
    model = tiny_models.build("vit")
    add_exit_heads(model)
    with refused("exit heads"):
        add_exit_heads(model)
    model.config.problem_type = "multi_label_classification"
    batch = {**tiny_models.inputs(model), "labels": torch.rand(2, 3)}
    with refused("one class out of several"):
        step(model, Objective(multi_exit={"schedule": "always"}), batch)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_the_best_checkpoint_is_loaded_wholly(name, tmp_path):
    """transformers saves the blocks of a ViT under other names than the model has, and no exit heads.

    Oracle: the checkpoint that a fresh process would load.
    """
    model = tiny_models.build(name)
    key = "pixel_values" if name == "vit" else "input_ids"
    rows = [{key: row, "labels": 1 if name == "vit" else row} for row in tiny_models.inputs(model)[key]]
    options = {"max_steps": 6, "learning_rate": 0.05, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_strategy": "no"}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    arguments = tf.TrainingArguments(str(tmp_path), **options)
    objective = Objective(multi_exit={"schedule": "always"})
    trainer = DepthTrainer(model, arguments, objective=objective, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.state.best_global_step < 6, "the loss falls, so the greatest is not the last"
    best = open_model(trainer.state.best_model_checkpoint, exit_heads=True, device="cpu").model
    assert_close(model.state_dict(), best.state_dict(), rtol=0, atol=0)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[trainer.state.best_global_step], rel=1e-6)
