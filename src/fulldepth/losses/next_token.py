"""The loss of the next token, for decoders whose class in transformers has another loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from fulldepth.core.errors import FulldepthError
from fulldepth.core.targets import IGNORE
from fulldepth.execution.stream import run
from fulldepth.hf import evaluating, unwrapped
from fulldepth.losses.task import Task

NEAR = 0.25
"""Largest distance of a model's loss from that of the next token, in distances of the two readings of a label."""

ROUNDING = 1e-5
"""Largest difference of two losses in nats that is rounding; decides where a head of zeros reads a label alike."""
CAUSAL = {torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest change of a logit by later tokens that is rounding, as a share of the largest logit; 1e-4 of others."""


def _row(model: Any, length: int) -> dict[str, Any]:
    """The first `length` tokens of the vocabulary as a batch of one row; a cache, which only takes memory, is off."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", length)
    inputs: dict[str, Any] = {"input_ids": torch.arange(length, device=model.device).remainder(vocabulary)[None]}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return inputs


@torch.no_grad()
def sees_later_tokens(model: PreTrainedModel, length: int = 16) -> bool:
    """Return True if the logits of the first half of a row depend on the tokens after it.

    Such a model (an encoder, XLNet) reads the next token that it is trained to predict.

    Args:
        model: with its weights; it is left in its mode.
        length: tokens of the row, at least 2.

    Returns:
        True or False; also False for a model that does not read such a row.
    """
    plain: Any = unwrapped(model)
    inputs = _row(plain, length)
    half = length // 2
    other = inputs["input_ids"].clone()
    other[:, half:] = other[:, :1]
    with evaluating(plain):
        try:
            before = run(plain, inputs).logits[:, :half]
            after = run(plain, {**inputs, "input_ids": other}).logits[:, :half]
        except FulldepthError:  # its training fails with the reason
            return False
    return bool((after - before).abs().max() > CAUSAL.get(before.dtype, 1e-4) * before.abs().max())


@torch.no_grad()
def has_next_token_loss(model: PreTrainedModel, length: int = 16) -> bool:
    """Return True if the class's own loss, of `labels` that are the token ids, is that of the next token.

    The decoders of BART and its relatives compare the logits of a position with its own token, which teaches to copy
    it; GIT's loss fails on text without an image. The model reads one row with one label, at the position where the two
    readings of a label differ most.

    Args:
        model: a decoder with its weights; it is left in its mode.
        length: tokens of the row, at least 2.

    Returns:
        True or False; also True for a model that does not read such a row.
    """
    plain: Any = unwrapped(model)
    inputs = _row(plain, length)
    ids = inputs["input_ids"]
    with evaluating(plain):
        try:
            log_probabilities = run(plain, inputs).logits[0].double().log_softmax(-1)
        except FulldepthError:  # its training fails with the reason
            return True
        tokens = ids[0, 1:, None]
        next_token = log_probabilities[:-1].gather(1, tokens)[:, 0]
        same_token = log_probabilities[1:].gather(1, tokens)[:, 0]
        distances = (next_token - same_token).abs()
        labelled = int(distances.argmax())
        labels = torch.full_like(ids, IGNORE)
        labels[0, labelled + 1] = ids[0, labelled + 1]
        try:
            output = run(plain, {**inputs, "labels": labels})
        except FulldepthError:
            return False
    task = Task.of(plain)
    auxiliary = task.auxiliary(output)
    loss = task.loss(output) - (0.0 if auxiliary is None else auxiliary)
    return abs(float(loss) + float(next_token[labelled])) <= max(NEAR * float(distances[labelled]), ROUNDING)


def use_next_token_loss(model: PreTrainedModel) -> None:
    """Give a decoder transformers' `ForCausalLMLoss` of its logits in place of its class's own loss.

    Args:
        model: a decoder with logits, possibly inside a wrapper; it is changed in place.
    """
    given: list[Tensor | None] = [None]

    def take_labels(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given[0] = kwargs.get("labels")
        return args, {name: value for name, value in kwargs.items() if name != "labels"}

    def add_loss(module: Any, args: Any, output: Any) -> Any:
        labels = given[0]
        if labels is not None:
            output["loss"] = ForCausalLMLoss(output.logits.contiguous(), labels, output.logits.shape[-1])
        return output

    plain: Any = unwrapped(model)
    plain.register_forward_pre_hook(take_labels, with_kwargs=True)
    plain.register_forward_hook(add_loss)
