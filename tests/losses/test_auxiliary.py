"""Cross-entropy as a quantity of its own: balancing losses of experts stay, one count of targets for all classes."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from torch.nn.functional import cross_entropy

from fulldepth.errors import FulldepthError
from fulldepth.losses import DepthTrainer, Objective, aligned_loss
from fulldepth.training.evaluation import evaluate
from tiny_models import build

VOCABULARY = 60


def experts(seed: int = 0) -> tf.PreTrainedModel:
    torch.manual_seed(seed)
    config = tf.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.7,
    )
    return tf.Qwen3MoeForCausalLM(config).train()


def bert(seed: int = 0) -> tf.PreTrainedModel:
    torch.manual_seed(seed)
    config = tf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return tf.BertForMaskedLM(config).train()


def batch(rows: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def gradients(model: tf.PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_aligned_training_of_experts_keeps_their_balance():
    """Gradient of the routers, against the aligned loss and the balancing loss added by hand."""
    model, rows, last = experts(), batch(), []
    hook = model.model.layers[-1].register_forward_hook(lambda _, args, out: last.append(out))
    output = model(**rows, output_hidden_states=True)
    hook.remove()
    states = [*output.hidden_states[1:-1], last[0] if torch.is_tensor(last[0]) else last[0][0]]
    targets = torch.cat([rows["labels"][:, 1:], torch.full((2, 1), -100)], dim=1)
    head = torch.nn.Sequential(model.model.norm, model.lm_head)
    expected = gradients(model, aligned_loss(states, head, targets) + 0.7 * output.aux_loss)
    objective = Objective(aligned={"schedule": "always"}).attach(model)
    loss, parts = objective(model(**rows), rows)
    found = gradients(model, loss)
    objective.detach()
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7), name
    plain = cross_entropy(output.logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten())
    assert float(parts["ce"]) == pytest.approx(plain.item(), rel=1e-5)
    assert float(parts["auxiliary"]) == pytest.approx(0.7 * output.aux_loss.item(), rel=1e-5)


def test_a_loss_without_its_parts_is_refused_where_the_cross_entropy_is_replaced():
    model, rows = experts(), batch()
    objective = Objective(aligned={"schedule": "always"}).attach(model)
    with pytest.raises(FulldepthError, match="output instead of its loss"):
        objective(model(**rows).loss, rows)
    objective.detach()


@pytest.mark.parametrize(("make", "aligned"), [(experts, False), (experts, True), (bert, True)])
def test_micro_batches_add_up_to_one_large_batch(make, aligned, tmp_path):
    """One step of three uneven micro-batches against the mean over all labels, written out."""
    parts = [batch(2, 1), batch(2, 2), batch(1, 3)]
    parts[0]["labels"][0, 2:] = -100
    parts[1]["labels"][:, :5] = -100
    rows = [{name: value[i] for name, value in part.items()} for part in parts for i in range(len(part["labels"]))]
    model = make()
    before = copy.deepcopy(model)
    options = {"aligned": {"schedule": "always"}} if aligned else {"jump": 0.0}
    trainer = DepthTrainer(
        model=model,
        args=tf.TrainingArguments(
            tmp_path,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            max_steps=1,
            learning_rate=1.0,
            max_grad_norm=0.0,
            optim="sgd",
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
        data_collator=lambda items: {name: torch.stack([item[name] for item in items]) for name in items[0]},
        objective=Objective(**options),
    )
    order = []
    samples = trainer.get_batch_samples

    def watched(*args):
        order.extend((found := samples(*args))[0])
        return found

    trainer.get_batch_samples = watched
    trainer.train()
    total, count, balance = 0.0, 0, 0.0
    shifts = make is not bert
    for part in order:
        hidden = []
        hooks = [
            layer.register_forward_hook(
                lambda _, args, out, kept=hidden: kept.append(out if torch.is_tensor(out) else out[0])
            )
            for layer in (before.bert.encoder.layer if make is bert else before.model.layers)
        ]
        output = before(**part)
        for hook in hooks:
            hook.remove()
        labels = part["labels"]
        targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1) if shifts else labels
        heads = before.cls if make is bert else torch.nn.Sequential(before.model.norm, before.lm_head)
        shares = [2 * (i + 1) / (len(hidden) * (len(hidden) + 1)) for i in range(len(hidden))]
        logits = [heads(state) for state in hidden] if aligned else [output.logits]
        for share, scores in zip(shares if aligned else [1.0], logits, strict=True):
            total = total + share * cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
        count += int((targets != -100).sum())
        if make is experts:
            balance = balance + 0.7 * output.aux_loss * len(labels) / 5
    expected = gradients(before, total / count + balance)
    for name, parameter in model.named_parameters():
        start = dict(before.named_parameters())[name]
        assert torch.allclose(start - parameter, expected[name], rtol=2e-3, atol=2e-6), name


def _trainer(tmp_path, objective, **options):
    arguments = {name: options.pop(name) for name in list(options) if name == "label_smoothing_factor"}
    return DepthTrainer(
        model=options.pop("model", None) or experts(),
        args=tf.TrainingArguments(tmp_path, report_to=[], use_cpu=True, disable_tqdm=True, **arguments),
        train_dataset=[{name: value[0] for name, value in batch().items()}],
        eval_dataset=[{name: value[0] for name, value in batch(2, 5).items()}],
        data_collator=lambda items: {name: torch.stack([item[name] for item in items]) for name in items[0]},
        objective=objective,
        **options,
    )


def test_evaluation_reports_the_cross_entropy(tmp_path):
    trainer = _trainer(tmp_path, Objective())
    rows = {name: value[:1] for name, value in batch(2, 5).items()}
    logits = trainer.model(**rows).logits[:, :-1].flatten(0, 1)
    expected = cross_entropy(logits, rows["labels"][:, 1:].flatten()).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_run_records_the_cross_entropy_and_the_balance_beside_it():
    model = experts()
    rows = [{name: value[i] for name, value in batch(5, 5).items()} for i in range(5)]
    stack = lambda items: {name: torch.stack([item[name] for item in items]) for name in items[0]}  # noqa: E731
    found = evaluate(model, rows, stack, 2)
    with torch.no_grad():
        output = model.eval()(**stack(rows))
        parts = [(model(**stack(rows[i : i + 2])).aux_loss, len(rows[i : i + 2])) for i in (0, 2, 4)]
    plain = cross_entropy(output.logits[:, :-1].flatten(0, 1), stack(rows)["labels"][:, 1:].flatten())
    assert found.loss == pytest.approx(float(plain), rel=1e-5)
    assert found.value("validation_auxiliary_loss") == pytest.approx(
        0.7 * sum(float(value) * n for value, n in parts) / 5, rel=1e-5
    )


def test_what_changes_a_replaced_cross_entropy_is_refused(tmp_path):
    always = {"aligned": {"schedule": "always"}}
    with pytest.raises(FulldepthError, match="aligned replaces the cross-entropy"):
        _trainer(tmp_path, Objective(**always), label_smoothing_factor=0.1)
    with pytest.raises(FulldepthError, match="aligned replaces the cross-entropy"):
        _trainer(tmp_path, Objective(**always), compute_loss_func=lambda *_, **__: torch.zeros(()))
    model = experts()
    model.loss_function = lambda *_, **__: torch.zeros(())
    with pytest.raises(FulldepthError, match="aligned replaces the cross-entropy"):
        _trainer(tmp_path, Objective(**always), model=model)
    _trainer(tmp_path, Objective(jump=1.0), label_smoothing_factor=0.1)


def test_states_of_several_passes_are_refused_and_a_pass_without_gradients_is_plain():
    model, rows, other = build("llama").train(), batch(), batch(2, 9)
    objective = Objective(jump=1.0).attach(model)
    expected = float(objective(model(**rows), rows)[0])
    first = model(**rows)
    model(**other)
    with pytest.raises(FulldepthError, match="ran several times"):
        objective(first, rows)
    with torch.no_grad():
        output = model(**rows)
        assert objective(output, rows)[0] == output.loss
    output = model(**rows)
    with torch.no_grad():
        model(**other)
    assert float(objective(output, rows)[0]) == pytest.approx(expected)
    objective.detach()
