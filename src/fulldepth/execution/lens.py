"""The logit lens over all layers, in chunks that limit the logits in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.hf import Classifier
from fulldepth.metrics.base import Readout
from fulldepth.targets import IGNORE

CPU_CHUNK = 128
"""Tokens whose logits exist at once on a CPU, few enough to stay in its cache."""
DEVICE_CHUNK_ELEMENTS = 1 << 27
"""Number of logits that exist at once on an accelerator."""
SAFE_EXPONENT = 60.0
"""Exponentials of logits up to this size, summed over any vocabulary, neither overflow nor vanish in float32."""


def read_layers(classifier: Classifier, states: Tensor, targets: Tensor, attention_mask: Tensor) -> Readout:
    """Apply the last layer's classifier to every layer, at the positions that have a target.

    Args:
        classifier: final norm and head.
        states: `[L+1, B, T, D]` residual stream.
        targets: `[B, T]` for token heads, `[B]` for sequence heads; -100 = no target.
        attention_mask: `[B, T]`, used by heads that pool.
    """
    origin, device = states.device, classifier.device or states.device
    states, targets, attention_mask = (tensor.to(device) for tensor in (states, targets, attention_mask))
    if classifier.per_token:
        where = (targets != IGNORE).flatten()
        read = _reduce(classifier, states.flatten(1, 2)[:, where], targets.flatten()[where])
    else:
        read = _reduce_sequences(classifier, states, targets, attention_mask)
    row = (targets != IGNORE).nonzero()[:, 0]  # [M]
    return Readout(*(column.to(origin) for column in (*read, row)))


Columns = tuple[Tensor, Tensor, Tensor]
"""agrees, correct, loss, as in `Readout`."""


def _reduce_sequences(classifier: Classifier, states: Tensor, targets: Tensor, attention_mask: Tensor) -> Columns:
    """For sequence heads, which have few classes: all layers at once."""
    where = targets != IGNORE
    logits = torch.stack([classifier.sequences(layer[where], attention_mask[where]) for layer in states])
    index = torch.stack([targets[where], logits[-1].argmax(-1)], dim=1)
    hits, loss = zip(*(_read(layer.clone(), index) for layer in logits), strict=True)
    correct, agrees = torch.stack(hits).unbind(-1)
    return agrees, correct, torch.stack(loss)


def _reduce(classifier: Classifier, states: Tensor, targets: Tensor) -> Columns:
    """For token heads: in chunks of tokens, the last layer first, because the others are compared with it."""
    layers, tokens, _ = states.shape
    hits = torch.empty(layers, tokens, 2, dtype=torch.bool, device=states.device)
    loss = torch.empty(layers, tokens, dtype=torch.float32, device=states.device)
    index = torch.stack([targets, torch.zeros_like(targets)], dim=1)
    chunk = max(1, min(tokens, _chunk_size(classifier, states)))
    room = classifier.buffer(chunk)
    for layer in reversed(range(layers)):
        prepared = classifier.prepare(states[layer])
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            logits = classifier.logits(prepared[part], room)
            if layer == layers - 1:
                index[part, 1] = logits.argmax(-1)
            hits[layer, part], loss[layer, part] = _read(logits, index[part])
    return hits[..., 1], hits[..., 0], loss


def _read(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """For `logits [N, V]`: `[N, 2]` whether the top class is each of `index [N, 2]` (the target; the last layer's top
    class), and `[N]` the cross-entropy of the target. Overwrites `logits`.

    In full precision a class counts as the top one if its logit equals the maximum, which avoids an argmax. Ties only
    matter if all logits are zero (a head or a state of zeros); then the first class wins, as in the model. In half
    precision ties are frequent, so the argmax is used.
    """
    top = logits.amax(-1)
    picked = logits.gather(1, index)
    if logits.dtype in (torch.float32, torch.float64):
        hits = picked == top[:, None]
    else:
        hits = logits.argmax(-1, keepdim=True) == index
        logits, picked, top = logits.float(), picked.float(), top.float()
    smallest, largest = (float(bound) for bound in torch.aminmax(top.abs())) if len(top) else (1.0, 1.0)
    shift = top if not largest <= SAFE_EXPONENT else torch.zeros_like(top)
    total = (logits.sub_(top[:, None]) if shift is top else logits).exp_().sum(-1)
    if smallest == 0:
        zeros = (total == logits.shape[-1]) & (top == 0)
        hits = torch.where(zeros[:, None], index == 0, hits)
    return hits, total.log() + shift - picked[:, 0]


def _chunk_size(classifier: Classifier, states: Tensor) -> int:
    """Number of tokens per chunk."""
    if states.device.type == "cpu":
        return CPU_CHUNK
    classes = classifier.tokens(states[-1, :1]).shape[-1]
    return max(CPU_CHUNK, DEVICE_CHUNK_ELEMENTS // classes)


class TopTokens(NamedTuple):
    """Top class and its probability for one sequence, `[L+1, P]` each."""

    token: Tensor
    probability: Tensor


def top_tokens(classifier: Classifier, states: Tensor) -> TopTokens:
    """Top class and its probability at every layer and position of `states: [L+1, P, D]`."""
    tokens, probabilities = [], []
    for layer in states.to(classifier.device or states.device):
        best = classifier.tokens(layer).float().softmax(-1).max(-1)
        tokens.append(best.indices)
        probabilities.append(best.values)
    return TopTokens(torch.stack(tokens), torch.stack(probabilities))
