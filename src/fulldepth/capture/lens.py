"""The logit lens over all layers, in chunks: never more than a few megabytes of logits at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.hf import Classifier
from fulldepth.metrics.base import Readout

CPU_CHUNK = 128
"""Tokens whose logits exist at once on a CPU: they stay in cache while they are reduced."""
DEVICE_CHUNK_ELEMENTS = 1 << 27
"""Logits that exist at once on an accelerator."""


def read_layers(classifier: Classifier, states: Tensor, targets: Tensor, attention_mask: Tensor) -> Readout:
    """Read every layer with the last layer's classifier, at the positions that have a target.

    Args:
        classifier: final norm and head.
        states: `[L+1, B, T, D]` residual stream.
        targets: `[B, T]` for token heads, `[B]` for sequence heads; -100 = no target.
        attention_mask: `[B, T]`, for heads that pool.
    """
    if classifier.per_token:
        where = (targets != -100).flatten()
        chosen = states.flatten(1, 2)[:, where]
        return _reduce(classifier, chosen, targets.flatten()[where])
    where = targets != -100
    logits = torch.stack([classifier.sequences(layer[where], attention_mask[where]) for layer in states])
    last = logits[-1].argmax(-1)
    parts = [_statistics(layer.clone(), targets[where], last) for layer in logits]
    return Readout(*(torch.stack(column) for column in zip(*parts, strict=True)))


def _reduce(classifier: Classifier, states: Tensor, targets: Tensor) -> Readout:
    """Token heads: chunks of tokens, the last layer first, because all others are compared with it."""
    layers, tokens, _ = states.shape
    agrees = torch.empty(layers, tokens, dtype=torch.bool, device=states.device)
    correct = torch.empty_like(agrees)
    loss = torch.empty(layers, tokens, dtype=torch.float32, device=states.device)
    chunk = _chunk_size(classifier, states)
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        logits = classifier.tokens(states[-1, part])
        last = logits.argmax(-1)
        for layer in reversed(range(layers)):
            if layer < layers - 1:
                logits = classifier.tokens(states[layer, part])
            row = _statistics(logits, targets[part], last)
            agrees[layer, part], correct[layer, part], loss[layer, part] = row
    return Readout(agrees, correct, loss)


def _statistics(logits: Tensor, targets: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each row's top class is the last layer's and the target, and its cross-entropy. Overwrites `logits`.

    In full precision a class is the top one if its logit equals the maximum, which spares an argmax; only where all
    logits are equal (a head or a state of zeros) does the argmax decide, as it does in the model: one class, not all.
    Half precision has so many ties that it decides everywhere.
    """
    at_target = logits.gather(1, targets[:, None])
    top = logits.amax(-1, keepdim=True)
    if logits.dtype in (torch.float32, torch.float64):
        agrees, correct = logits.gather(1, last[:, None]) == top, at_target == top
    else:
        predicted = logits.argmax(-1, keepdim=True)
        agrees, correct = predicted == last[:, None], predicted == targets[:, None]
        logits, at_target, top = logits.float(), at_target.float(), top.float()
    total = logits.sub_(top).exp_().sum(-1, keepdim=True)
    flat = (total == logits.shape[-1])[:, 0].nonzero()[:, 0]
    if len(flat):
        predicted = logits[flat].argmax(-1, keepdim=True)
        agrees[flat], correct[flat] = predicted == last[flat, None], predicted == targets[flat, None]
    loss = total.log() + top - at_target
    return agrees[:, 0], correct[:, 0], loss[:, 0]


def _chunk_size(classifier: Classifier, states: Tensor) -> int:
    """Tokens per chunk."""
    if states.device.type == "cpu":
        return CPU_CHUNK
    classes = classifier.tokens(states[-1, :1]).shape[-1]
    return max(CPU_CHUNK, DEVICE_CHUNK_ELEMENTS // classes)


class TopTokens(NamedTuple):
    """The lens of one sequence: `[L+1, P]` each."""

    token: Tensor
    probability: Tensor


def top_tokens(classifier: Classifier, states: Tensor) -> TopTokens:
    """Top class and its probability at every layer and position, `states: [L+1, P, D]`."""
    tokens, probabilities = [], []
    for layer in states:
        best = classifier.tokens(layer).float().softmax(-1).max(-1)
        tokens.append(best.indices)
        probabilities.append(best.values)
    return TopTokens(torch.stack(tokens), torch.stack(probabilities))
