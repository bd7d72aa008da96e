"""A step of micro-batches and processes has the gradient of one large batch, for every task; what a batch counts; terms
that are functions of a batch see whole batches only, the others every example.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard

from fulldepth.errors import FulldepthError
from fulldepth.losses import Objective, Task
from losses.trained_step import (
    WEIGHTS,
    OneStep,
    arguments,
    build,
    close,
    collate,
    examples,
    gradient,
    plain_gradient,
    plain_loss,
)


@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
def test_uneven_micro_batches_are_one_large_batch(kind: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["vit", "llama"])
def test_logged_parts_are_means_of_the_micro_batches(kind: str, tmp_path: Path) -> None:
    rows = examples(kind, 4)
    _, parts = gradient(
        build(kind), rows, WEIGHTS, str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    nothing, jump = {"jump": 0.0, "similarity": 0.0}, {"jump": 1.0, "similarity": 0.0}
    halves = [rows[:2], rows[2:]]
    ce = [float(plain_loss(build(kind), kind, half, nothing).detach()) for half in halves]
    both = [float(plain_loss(build(kind), kind, half, jump).detach()) for half in halves]
    assert parts["ce"] == pytest.approx(sum(ce) / 2, rel=1e-6)
    assert parts["jump"] == pytest.approx((sum(both) - sum(ce)) / 2, rel=1e-6)


@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
def test_every_term_adds_up(kind: str, tmp_path: Path) -> None:
    """Terms with oracles of their own elsewhere: one batch of five rows against micro-batches of 2, 2 and 1."""
    rows = examples(kind, 5)
    terms: dict[str, Any] = {"jump": 1.5, "aligned": {"schedule": "always"}}
    if kind == "bert":  # orthogonality leaves out shorter batches
        terms, rows = {"jump": 1.5, "orthogonality": {"layers": [1]}}, rows[:4]
    settings = [(len(rows), 1), (2, (len(rows) + 1) // 2)]
    whole, parts = (
        gradient(
            build(kind),
            rows,
            terms,
            str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
        )[0]
        for size, steps in settings
    )
    close(parts, whole, 1e-6)


def test_what_a_batch_counts() -> None:
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
    assert text.labels({"labels": labels}).tolist() == [[-100, 7, 8, -100]] * 3  # type: ignore[union-attr]


CR: dict[str, Any] = {"coherence": {"layers": [1]}, "orthogonality": {"layers": [1]}}


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Rows one after another."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def run(folder: Path, terms: dict[str, Any], rows: int, stream: bool = False, **options: Any) -> tuple[Any, list[int]]:
    """A trainer with batches of 2, and the sizes of the batches that it trained on."""
    data: Any = [
        {name: value for name, value in row.items() if name != "attention_mask"} for row in examples("llama", rows)
    ]
    model, sizes = build("llama"), []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        sizes.append(len(kwargs["input_ids"]))

    fixed = {"max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    trainer = OneStep(
        model,
        arguments(str(folder), **{**fixed, **options}),
        train_dataset=Stream(data) if stream else data,
        eval_dataset=data,
        data_collator=collate,
        objective=Objective(**terms),
    )
    model.register_forward_pre_hook(look, with_kwargs=True)
    return trainer, sizes


@pytest.mark.parametrize("stream", [False, True])
def test_an_epoch_s_short_batch_is_left_out(stream: bool, tmp_path: Path) -> None:
    trainer, sizes = run(tmp_path, CR, 5, stream, max_steps=2 if stream else 4)
    trainer.train()
    assert sizes == [2] * trainer.state.global_step
    assert trainer.state.global_step == (2 if stream else 4)
    sizes.clear()
    trainer.evaluate()
    assert sizes == [2, 2, 1]
    trainer, sizes = run(tmp_path, {"jump": 1.0}, 5, stream, max_steps=3)
    trainer.train()
    assert sizes == [2, 2, 1]


def test_a_stream_s_short_step_is_left_out(tmp_path: Path) -> None:
    """13 rows are two steps of three batches; the Trainer would add the rest to the next epoch's first step."""
    trainer, sizes = run(tmp_path, CR, 13, True, max_steps=3, gradient_accumulation_steps=3)
    trainer.train()
    assert sizes == [2] * 9
    assert trainer._step_counts["sequences"] == 6
    trainer, _ = run(tmp_path, CR, 5, True, max_steps=1, gradient_accumulation_steps=3)
    with pytest.raises(FulldepthError, match=r"hold 5 examples; .* at least 6 examples"):
        trainer.train()


def test_processes_repeat_no_example(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, CR, 7)
    sampler = trainer.get_train_dataloader().batch_sampler
    shares = [list(BatchSamplerShard(sampler, 2, process)) for process in range(2)]
    assert shares == [[[0, 1]], [[2, 3]]]  # the third whole batch has no partner
    trainer, _ = run(tmp_path, {"jump": 1.0}, 7)
    sampler = trainer.get_train_dataloader().batch_sampler
    shares = [list(BatchSamplerShard(sampler, 2, process)) for process in range(2)]
    assert shares == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]  # as accelerate does it: example 0 twice


@pytest.mark.parametrize(("stream", "term"), [(False, "coherence"), (True, "orthogonality")])
def test_less_than_a_batch_is_refused(stream: bool, term: str, tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, {term: CR[term]}, 1, stream)
    with pytest.raises(FulldepthError, match=rf"{term}.* at least 2 examples"):
        trainer.train()
