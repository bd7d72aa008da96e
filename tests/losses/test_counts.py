"""A step of micro-batches and processes has the gradient of one large batch, for every task; what a batch counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from test_processes import launch
from trained_step import WEIGHTS, build, examples, gradient, plain_loss

from fulldepth.losses import Task


def plain_gradient(kind: str, rows: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    model = build(kind)
    loss = plain_loss(model, kind, rows, WEIGHTS)
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= tolerance * scale, (worst, scale)


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


@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "llama"])
def test_two_processes_are_one_large_batch(kind: str, tmp_path: Path) -> None:
    launch(kind, str(tmp_path / "step.pt"), script="trained_step.py")
    _, expected = plain_gradient(kind, examples(kind))
    close(torch.load(tmp_path / "step.pt", weights_only=True), expected, 1e-6)


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
