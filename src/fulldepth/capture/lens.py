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
SAFE_EXPONENT = 60.0
"""Exponentials of logits up to this size, summed over any vocabulary, neither overflow nor vanish in float32."""


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
    logits are zero (a head or a state of zeros) does the argmax decide, as it does in the model: one class, not all.
    Half precision has so many ties that it decides everywhere.
    """
    top = logits.amax(-1, keepdim=True)
    at_target, at_last = logits.gather(1, torch.stack([targets, last], dim=1)).unbind(1)
    if logits.dtype in (torch.float32, torch.float64):
        correct, agrees = at_target == top[:, 0], at_last == top[:, 0]
    else:
        predicted = logits.argmax(-1)
        correct, agrees = predicted == targets, predicted == last
        logits, at_target, top = logits.float(), at_target.float(), top.float()
    shift = top if float(top.abs().max()) > SAFE_EXPONENT else torch.zeros_like(top)
    total = (logits.sub_(shift) if shift is top else logits).exp_().sum(-1)
    zeros = ((total == logits.shape[-1]) & (top[:, 0] == 0)).nonzero()[:, 0]
    if len(zeros):
        predicted = logits[zeros].argmax(-1)
        correct[zeros], agrees[zeros] = predicted == targets[zeros], predicted == last[zeros]
    loss = total.log() + shift[:, 0] - at_target
    return agrees, correct, loss


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
