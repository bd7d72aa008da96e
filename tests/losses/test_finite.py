"""A step that is not finite never reaches the weights or a checkpoint."""

from __future__ import annotations

import pytest
import torch

from losses.trained_step import build, examples
from losses.trained_step import trainer as trainer_of
from refusals import refused
from tiny_models import same_weights

MARK = 95
"""A sequence that begins with this token breaks the model."""


def fragile(where):
    """A model whose layer 2 gives NaN, or a NaN gradient, for marked sequences."""
    model, marked = build("llama"), []

    def look(_, args, kwargs):
        marked[:] = [bool(kwargs["input_ids"][0, 0] == MARK)]

    def spoil(_, args, output):
        state = output[0] if isinstance(output, tuple) else output
        if marked[0] and where == "loss":
            return state * torch.nan
        if marked[0] and state.requires_grad:
            state.register_hook(lambda gradient: gradient * torch.nan)
        return None

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.model.layers[1].register_forward_hook(spoil)
    return model


def trainer(folder, model, steps, broken, **options):
    rows = examples("llama", 8)
    for row, example in enumerate(rows):
        example["input_ids"][0] = MARK if row + 1 == broken else 7
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fixed = {"max_steps": steps, "per_device_train_batch_size": 1, "max_grad_norm": 1.0}
    return trainer_of(model, rows, {"jump": 1.0}, folder, adam, **fixed, **options)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("loss", r"Step 3: the loss is not finite\. Terms: ce, jump\. The first state .* layer 2\. .* not taken"),
        ("gradient", r"Step 3: the loss is finite, but its gradient is not\. .* The step was not taken"),
    ],
)
def test_the_weights_stay_those_before_the_broken_step(where, words, tmp_path):
    good = trainer(tmp_path / "good", fragile(where), 2, None)
    good.train()
    model = fragile(where)
    broken = trainer(tmp_path / "bad", model, 6, 3, save_strategy="steps", save_steps=1)
    with refused(words):
        broken.train()
    assert same_weights(model, good.model)
    assert sorted(path.name for path in (tmp_path / "bad").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
