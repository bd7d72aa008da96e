"""A step of micro-batches and processes has the gradient of one large batch, for every task; what a batch counts; terms
that are functions of a batch see whole batches only, the others every example.
"""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import GradientState

from fulldepth.losses import Objective, Task
from losses.trained_step import (
    WEIGHTS,
    arguments,
    build,
    close,
    collate,
    examples,
    gradient,
    plain_gradient,
    plain_loss,
    trainer,
)
from refusals import refused


@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
def test_uneven_micro_batches_are_one_large_batch(kind, tmp_path):
    """Five rows in micro-batches of 2, 2 and 1. BERT's classifier takes the means of its micro-batches for the
    cross-entropy, so it gets four rows; their masks differ."""
    rows = examples(kind, 4 if kind == "bert" else 5)
    found, _ = gradient(
        build(kind),
        rows,
        WEIGHTS,
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=(len(rows) + 1) // 2,
    )
    _, expected = plain_gradient(kind, rows)
    close(found, expected, 1e-6)  # the cross-entropy of some models is float32


WAYS = ["objective", "model", "both", "neither"]


class PlainTrainer(tf.Trainer):
    """A stock Trainer whose `compute_loss` calls an attached objective, as docs/trainer.md shows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        given = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs, **(given if self.way in ("model", "both") else {}))
        loss, _ = self.depth(outputs, inputs, **(given if self.way in ("objective", "both") else {}))
        return (loss, outputs) if return_outputs else loss


def plain_trainer(kind, way, rows, folder, accumulation):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    made = PlainTrainer(
        model,
        arguments(str(folder), train_sampling_strategy="sequential", **options),
        train_dataset=rows,
        data_collator=collate,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    made.way, made.depth = way, Objective(**WEIGHTS).attach(model)
    return made


@pytest.mark.parametrize(("kind", "way"), [(k, w) for k in ("llama", "vit", "bert") for w in WAYS[:3]])
def test_an_attached_objective_in_a_plain_trainer_is_one_large_batch(kind, way, tmp_path):
    """Four micro-batches; the number of items may go to the objective, to the model or to both. Oracle: transformers'
    own loss and states of one batch, also for classes that ignore the number (BERT's classifier).
    """
    rows = [{**row, **({"attention_mask": torch.ones(10).long()} if kind != "vit" else {})} for row in examples(kind)]
    if kind == "llama":
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
    made = plain_trainer(kind, way, rows, tmp_path, 4)
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    made.train()
    assert made.depth.step == 2, "steps of the optimiser, not of micro-batches"
    expected = plain_loss(build(kind), kind, rows, WEIGHTS).item()
    assert made.state.log_history[-1]["train_loss"] == pytest.approx(expected, rel=1e-6)
    _, slopes = plain_gradient(kind, rows)
    close({name: before[name] - weight.detach() for name, weight in made.model.named_parameters()}, slopes, 1e-6)


def test_a_plain_trainer_that_accumulates_without_the_number_of_items_is_refused(tmp_path):
    rows = examples("llama")
    with refused("The Trainer accumulates gradients .* Pass num_items_in_batch"):
        plain_trainer("llama", "neither", rows, tmp_path / "a", 2).train()
    assert not GradientState().sync_gradients, "as the refused run left it"
    plain_trainer("llama", "neither", rows, tmp_path / "b", 1).train()


def test_portions_of_uneven_micro_batches_are_one_large_batch():
    """A loop that accumulates four micro-batches with other numbers of rows, tokens and targets each."""
    rows, model = examples("llama"), build("llama")
    batches = [collate(part) for part in (rows[:1], rows[1:4], rows[4:6], rows[6:])]
    with Objective(**WEIGHTS).attach(model) as objective:
        for batch, portion in zip(batches, objective.portions(batches), strict=True):
            objective(model(**batch), batch, portion)[0].backward()
        with refused("`labels` and `input_ids` in every batch"):
            objective.portions([*batches, {"input_ids": torch.ones(1, 3)}])
    close({name: weight.grad for name, weight in model.named_parameters()}, plain_gradient("llama", rows)[1], 1e-6)


def test_logged_parts_are_those_of_the_whole_step(tmp_path):
    """Micro-batches of 2, 2 and 1 rows with other numbers of targets and tokens."""
    rows = examples("llama", 5)
    _, parts = gradient(
        build("llama"), rows, WEIGHTS, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    with torch.no_grad():
        nothing = plain_loss(build("llama"), "llama", rows, {"jump": 0.0, "similarity": 0.0})
        one = {
            name: plain_loss(build("llama"), "llama", rows, {**dict.fromkeys(WEIGHTS, 0.0), name: 1.0})
            for name in WEIGHTS
        }
    assert parts["ce"] == pytest.approx(nothing.item(), rel=1e-6)
    for name, loss in one.items():
        assert parts[name] == pytest.approx((loss - nothing).item(), rel=1e-5)


def test_what_a_batch_counts():
    ids, mask = torch.ones(3, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0]] * 3)
    labels = torch.tensor([[5, -100, 7, 8]] * 3)
    image = {"labels": torch.tensor([1, 2]), "pixel_values": torch.zeros(2, 3, 8, 8)}
    text, classes = Task("causal-lm"), Task("text-classification")
    assert text.tokens({"labels": labels, "input_ids": ids, "attention_mask": mask}) == 9
    assert text.tokens({"labels": labels, "input_ids": ids, "attention_mask": torch.ones(3, 1, 4, 4)}) == 12
    assert text.tokens({"inputs_embeds": torch.zeros(3, 4, 8)}) == 12
    assert classes.tokens(image) is None
    assert classes.sequences(image) == 2
    assert text.sequences({"labels": labels}) is None
    assert text.targets({"labels": labels}) == 6
    assert Task("masked-lm").targets({"labels": labels}) == 9
    assert text.targets({"labels": labels, "shift_labels": labels}) == 9
    assert classes.targets(image) == 2
    assert classes.targets({"labels": [{"boxes": []}]}) is None
    assert text.labels({"labels": labels}).tolist() == [[-100, 7, 8, -100]] * 3


CR = {"coherence": {"layers": [1]}, "orthogonality": {"layers": [1]}}


def run(folder, terms, rows, **options):
    """A trainer with batches of 2, and the sizes of the batches that it trained on."""
    data = [{name: value for name, value in row.items() if name != "attention_mask"} for row in examples("llama", rows)]
    model, sizes = build("llama"), []

    def look(_, args, kwargs):
        sizes.append(len(kwargs["input_ids"]))

    fixed = {"max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    made = trainer(model, data, terms, folder, **{**fixed, **options})
    model.register_forward_pre_hook(look, with_kwargs=True)
    return made, sizes


def test_an_epoch_s_short_batch_is_left_out(tmp_path):
    trainer, sizes = run(tmp_path, CR, 5)
    trainer.train()
    assert sizes == [2] * 4
    sizes.clear()
    trainer.evaluate()
    assert sizes == [2, 2, 1]
    trainer, sizes = run(tmp_path, {"jump": 1.0}, 5, max_steps=3)
    trainer.train()
    assert sizes == [2, 2, 1]
    trainer, _ = run(tmp_path, {"orthogonality": CR["orthogonality"]}, 1)
    with refused(r"orthogonality.* at least 2 examples"):
        trainer.train()


def test_processes_repeat_no_example(tmp_path):
    trainer, _ = run(tmp_path, CR, 7)
    sampler = trainer.get_train_dataloader().batch_sampler
    shares = [list(BatchSamplerShard(sampler, 2, process)) for process in range(2)]
    assert shares == [[[0, 1]], [[2, 3]]]  # the third whole batch has no partner
