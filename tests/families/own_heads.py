"""Heads of their own for the layers of any model, against the shared head and the stock class."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import copy_to_exit_heads, exit_weights, open_model, save_exit_heads, truncated
from fulldepth.hf.exit_heads import output_layers
from fulldepth.losses import Objective, add_exit_heads

CLOSE = 1e-6
"""Largest relative difference of two losses."""


def loss_of(model: tf.PreTrainedModel, batch: dict[str, torch.Tensor], **weights: Any) -> torch.Tensor:
    """The loss of all layers with some weights, by the shared head (aligned) or by heads of their own (multi_exit)."""
    terms = {term: {"schedule": "always", "weights": each} for term, each in weights.items()}
    objective = Objective(**terms).attach(model)
    loss, _ = objective(model(**batch), batch)
    objective.detach()
    return loss


def check_own_heads(model: tf.PreTrainedModel, batch: dict[str, torch.Tensor], folder: Path) -> None:
    """Heads that are copies of the model's own, without its bias, give the loss of the shared head and are all trained.
    Random ones are saved, loaded beside the stock model, and become the head of its first layers.
    """
    anatomy = find_anatomy(model)
    for _, _, own in output_layers(anatomy).values():
        if own.bias is not None:
            torch.nn.init.zeros_(own.bias)
    shared = float(loss_of(model, batch, aligned="uniform").detach())
    add_exit_heads(model)
    copy_to_exit_heads(anatomy)
    loss = loss_of(model, batch, multi_exit="uniform")
    assert abs(float(loss.detach()) - shared) <= CLOSE * abs(shared)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(bool(weight.grad is not None and weight.grad.any()) for weight in exit_weights(model))
    with torch.no_grad():
        for weight in exit_weights(model):
            weight.normal_(std=0.5)
        expected = model(**batch).logits
        model.save_pretrained(folder)
        save_exit_heads(model, folder)
        again = open_model(folder, exit_heads=True).model
        for one, other in zip(exit_weights(model), exit_weights(again), strict=True):
            assert torch.equal(one, other)
        torch.testing.assert_close(again(**batch).logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    with suppress(FulldepthError):  # some types cannot be cut
        truncated(find_anatomy(again), 1)  # compares its logits with those of the first head
