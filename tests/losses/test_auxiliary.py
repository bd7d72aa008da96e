"""Cross-entropy as a quantity of its own: balancing losses of experts stay, one count of targets for all classes."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import tiny_models
from fulldepth.losses import DepthTrainer, Objective, aligned_loss
from fulldepth.training.evaluation import evaluate_held_out
from losses.trained_step import collate, gradient, slopes, states_of, step
from refusals import refused
from tiny_models import build

VOCABULARY = 60


def experts(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.7}
    config = tf.Qwen3MoeConfig(vocab_size=VOCABULARY, **sizes, **heads, **routing)
    return tf.Qwen3MoeForCausalLM(config).train()


def batch(rows=2, seed=1):
    ids = tiny_models.token_ids(rows, 9, seed, VOCABULARY)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def plain(output, rows, **options):
    """The cross-entropy of the next tokens."""
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten(), **options)


def rows_of(many):
    return [dict(zip(many, row, strict=True)) for row in zip(*many.values(), strict=True)]


def test_aligned_training_of_experts_keeps_their_balance():
    """Gradient of the routers, against the aligned loss and the balancing loss added by hand."""
    model, rows = experts(), batch()
    output, states = states_of(model.model.layers, lambda: model(**rows))
    targets = torch.cat([rows["labels"][:, 1:], torch.full((2, 1), -100)], dim=1)
    head = nn.Sequential(model.model.norm, model.lm_head)
    expected = slopes(model, aligned_loss(states[1:], head, targets) + 0.7 * output.aux_loss)
    loss, parts = step(model, Objective(aligned={"schedule": "always"}), rows)
    assert_close(slopes(model, loss), expected, rtol=1e-4, atol=1e-7)
    assert float(parts["ce"]) == pytest.approx(plain(output, rows).item(), rel=1e-5)
    assert float(parts["auxiliary"]) == pytest.approx(0.7 * output.aux_loss.item(), rel=1e-5)


def test_a_loss_without_its_parts_is_refused_where_the_cross_entropy_is_replaced():
    model, rows = experts(), batch()
    objective = Objective(aligned={"schedule": "always"}).attach(model)
    with refused("output instead of its loss"):
        objective(model(**rows).loss, rows)
    objective.detach()


def test_micro_batches_add_up_to_one_large_batch(tmp_path):
    """Gradient of one step of three uneven micro-batches against the mean over all labels, written out."""
    rows = rows_of(batch(5))
    for index, row in enumerate(rows):
        row["labels"][: 2 * index] = -100
    before = experts()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    found, _ = gradient(experts(), rows, {"jump": 0.0}, str(tmp_path), **options)
    total, count, balance = 0.0, 0, 0.0
    for part in (collate(rows[:2]), collate(rows[2:4]), collate(rows[4:])):
        output = before(**part)
        total = total + plain(output, part, reduction="sum")
        count += int((part["labels"][:, 1:] != -100).sum())
        balance = balance + 0.7 * output.aux_loss * len(part["labels"]) / 5
    expected = slopes(before, total / count + balance)
    assert_close({name: found[name] for name in expected}, expected, rtol=2e-3, atol=2e-6)


def _trainer(tmp_path, objective, model=None, label_smoothing_factor=0.0, **options):
    fixed = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "label_smoothing_factor": label_smoothing_factor}
    return DepthTrainer(
        model=model or experts(),
        args=tf.TrainingArguments(tmp_path, **fixed),
        train_dataset=rows_of(batch(1)),
        eval_dataset=rows_of(batch(1, 5)),
        data_collator=collate,
        objective=objective,
        **options,
    )


def test_evaluation_reports_the_cross_entropy(tmp_path):
    trainer = _trainer(tmp_path, Objective())
    rows = batch(1, 5)
    expected = plain(trainer.model(**rows), rows).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_run_records_the_cross_entropy_and_the_balance_beside_it():
    model = experts()
    rows = rows_of(batch(5, 5))
    found, _ = evaluate_held_out(model, rows, collate, 2)
    with torch.no_grad():
        output = model.eval()(**collate(rows))
        parts = [(model(**collate(rows[i : i + 2])).aux_loss, len(rows[i : i + 2])) for i in (0, 2, 4)]
    assert found[0].value == pytest.approx(float(plain(output, collate(rows))), rel=1e-5)
    (balance,) = (row.value for row in found if row.measure == "validation_auxiliary_loss")
    assert balance == pytest.approx(0.7 * sum(float(value) * n for value, n in parts) / 5, rel=1e-5)


def test_other_losses_than_the_models_own_are_refused(tmp_path):
    for options in ({"label_smoothing_factor": 0.1}, {"compute_loss_func": lambda *_, **__: torch.zeros(())}):
        with refused("label_smoothing_factor, compute_loss_func"):
            _trainer(tmp_path, Objective(jump=1.0), **options)
    model = experts()
    model.loss_function = lambda *_, **__: torch.zeros(())
    _trainer(tmp_path, Objective(jump=1.0), model=model)
    with refused("aligned replaces the cross-entropy"):
        _trainer(tmp_path, Objective(aligned={"schedule": "always"}), model=model)


def test_states_of_several_passes_are_refused_and_a_pass_without_gradients_is_plain():
    model, rows, other = build("llama").train(), batch(), batch(2, 9)
    objective = Objective(jump=1.0).attach(model)
    expected = float(objective(model(**rows), rows)[0])
    first = model(**rows)
    model(**other)
    with refused("ran several times"):
        objective(first, rows)
    with torch.no_grad():
        output = model(**rows)
        assert objective(output, rows)[0] == output.loss
    output = model(**rows)
    with torch.no_grad():
        model(**other)
    assert float(objective(output, rows)[0]) == pytest.approx(expected)
    objective.detach()
