"""A step of micro-batches and processes has the gradient of one large batch, for every task; what a batch counts; terms
that are functions of a batch see whole batches only, the others every example.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard

from fulldepth.losses import Task
from losses.trained_step import (
    WEIGHTS,
    build,
    close,
    examples,
    gradient,
    plain_gradient,
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
