"""The logit lens over all layers, and the most probable tokens of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.core.targets import IGNORE
from fulldepth.data import Sequences
from fulldepth.execution.predictions import read_predictions, tiles, widened
from fulldepth.hf import Classifier
from fulldepth.metrics.base import POSITION_BITS, Readout
from fulldepth.metrics.reservoir import priority

SAFE_EXPONENT = 60.0
"""Exponentials of logits up to this size, summed over any vocabulary, neither overflow nor vanish in float32."""
FULL_PRECISION = (torch.float32, torch.float64)


class TopTokens(NamedTuple):
    """Top class and its probability at every layer and `P` positions, `[L+1, P]` each."""

    token: Tensor
    probability: Tensor


class PositionSample:
    """A seeded sample of the positions that have a target, by their places in the whole data.

    Args:
        sequences: the data.
        limit: size of the sample; None = all positions.
        seed: of the sample.
    """

    def __init__(self, sequences: Sequences, limit: int | None, seed: int) -> None:
        self.seed = seed
        self._largest: int | None = None
        """The largest rank in the sample; None = all positions are in it."""
        if limit is None or sequences.num_targets <= limit:
            return
        smallest = torch.empty(0, dtype=torch.int64)
        for batch in sequences.batches(64):
            if batch.targets is not None:
                ranks = self._ranks(batch.targets, batch.sequence)[batch.targets != IGNORE]
                smallest = torch.cat([smallest, ranks]).sort().values[:limit]
        self._largest = int(smallest[-1]) if len(smallest) else None

    def targets(self, targets: Tensor, sequence: Tensor) -> Tensor:
        """The targets `[B, T]` of a batch, -100 at the positions that are not in the sample.

        Args:
            targets: `[B, T]`.
            sequence: `[B]` index of each sequence in the data.
        """
        if self._largest is None:
            return targets
        return targets.where(self._ranks(targets, sequence) <= self._largest, IGNORE)

    def _ranks(self, targets: Tensor, sequence: Tensor) -> Tensor:
        """[B, T] int64 priority of every position."""
        places = torch.arange(targets.shape[1], device=targets.device)
        return priority((sequence.to(targets.device)[:, None] << POSITION_BITS) | places, self.seed)


def read_layers(
    classifier: Classifier,
    states: Tensor,
    targets: Tensor,
    attention_mask: Tensor,
    advance: Callable[[], None] = lambda: None,
) -> Readout:
    """Apply the last layer's classifier to every layer, at the positions that have a target.

    In a multi-exit model each of layers 1..L-1 is read by its own head.

    Args:
        classifier: final norm and head.
        states: `[L+1, B, T, D]` residual stream.
        targets: `[B, T]` for token heads, `[B]` for sequence heads; -100 = no target.
        attention_mask: `[B, T]`, used by heads that pool.
        advance: called after each layer, for a progress bar.

    Returns:
        What every layer predicts at the positions that have a target.
    """
    device = classifier.device or states.device
    targets = targets.to(device)
    where = targets != IGNORE
    mask = None if classifier.per_token else attention_mask.to(device)[where]
    labels = targets[where]
    hits = torch.empty(len(states), len(labels), 2, dtype=torch.bool, device=device)
    classes = None if classifier.per_token else torch.empty(hits.shape[:2], dtype=torch.int64, device=device)
    precision = torch.float32 if classifier.per_token else torch.promote_types(states.dtype, torch.float32)
    loss = torch.empty(len(states), len(labels), dtype=precision, device=device)
    index = torch.stack([labels, torch.zeros_like(labels)], dim=1)
    for layer in reversed(range(len(states) if len(labels) else 0)):  # the last one first: others are compared with it
        last = layer == len(states) - 1
        softmax = None
        selected = states[layer].to(device)[where]
        for rows, start, logits in tiles(classifier.at(layer), selected, mask, by_class=True):
            if softmax is None:
                ties = logits.dtype not in FULL_PRECISION or classifier.softcap is not None
                softmax = _Softmax(index, logits.dtype, find=last or classes is not None, ties=ties)
            softmax.add(rows, start, logits)
        assert softmax is not None
        hits[layer] = softmax.hits
        loss[layer] = softmax.loss
        if classes is not None:
            classes[layer] = softmax.best
        if last:
            index[:, 1] = softmax.best
            hits[layer, :, 1] = True
        advance()
    columns = (hits[..., 1], hits[..., 0], loss, where.nonzero()[:, 0])
    predictions = () if classes is None else (classes, labels)
    return Readout(*(column.to(states.device) for column in (*columns, *predictions)))


@torch.no_grad()
def top_tokens(classifier: Classifier, states: Tensor, shown: Tensor, k: int) -> TopTokens:
    """The `k` most probable tokens by descending probability, `[L+1, P, k]` each; the first of several equal ones.

    Args:
        classifier: final norm and head.
        states: `[L+1, B, T, D]` residual stream.
        shown: `[B, T]` bool, the `P` positions.
        k: limited to the number of classes.
    """

    def most_probable(logits: Tensor, _: None) -> tuple[Tensor, Tensor]:
        logits = widened(logits)
        top = logits.topk(min(k, logits.shape[-1])) if k > 1 else logits.max(-1, keepdim=True)
        return top.indices, (top.values - logits.logsumexp(-1, keepdim=True)).exp()

    layers = [
        read_predictions(classifier.at(layer), state[shown], None, most_probable) for layer, state in enumerate(states)
    ]
    return TopTokens(*(torch.stack(column).to(states.device) for column in zip(*layers, strict=True)))


class _Softmax:
    """Largest logit, log-sum-exp and chosen logits of `N` positions, accumulated over tiles of classes.

    Args:
        index: `[N, 2]` classes whose logits are kept: the target, and the last layer's top class.
        dtype: precision of the logits.
        find: whether the top class itself is found, which is slower.
        ties: whether several classes may have the largest logit: in half precision, and at a soft cap, which large
            logits reach exactly. The top class is found then.
    """

    def __init__(self, index: Tensor, dtype: torch.dtype, *, find: bool, ties: bool) -> None:
        self.index = index
        self.ties = ties
        self.find = find or ties
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        self.best = torch.zeros_like(index[:, 0])
        self.picked = torch.zeros(index.shape, dtype=precision, device=index.device)
        self.total = torch.zeros_like(self.picked[:, 0])
        self.shift = torch.zeros_like(self.picked[:, 0])
        self.top = torch.full_like(self.total, -torch.inf)
        self.classes = 0

    def add(self, rows: slice, start: int, logits: Tensor) -> None:
        """Add the logits `[rows, C]` of the classes from `start`, which are overwritten."""
        logits = widened(logits)
        self.classes = max(self.classes, start + logits.shape[1])
        index = self.index[rows] - start
        inside = (index >= 0) & (index < logits.shape[1])
        picked = logits.gather(1, index.clamp(0, logits.shape[1] - 1))
        self.picked[rows] = torch.where(inside, picked, self.picked[rows])
        before = self.top[rows]
        if self.find:
            top, best = logits.max(-1)
            self.best[rows] = torch.where(top > before, best + start, self.best[rows])
        else:
            top = logits.amax(-1)
        self.top[rows] = top = torch.maximum(top, before)
        # Exponentials are shifted by the largest logit so far only where it is large, also without any row.
        if bool((top.abs() <= SAFE_EXPONENT).all()) and not bool(self.shift[rows].any()):
            self.total[rows] += _exponential(logits).sum(-1)
            return
        shift = top.clamp(min=torch.finfo(top.dtype).min)
        part = _exponential(logits.sub_(shift[:, None])).sum(-1)
        self.total[rows] = part if start == 0 else self.total[rows] * (self.shift[rows] - shift).exp() + part
        self.shift[rows] = shift

    @property
    def hits(self) -> Tensor:
        """[N, 2] bool: whether the top class is each of `index`.

        Without ties a class counts as the top one if its logit equals the maximum, which avoids an argmax. They only
        matter there if all logits are zero (a head or a state of zeros); then the first class wins, as in the model.
        """
        if self.ties:
            return self.best[:, None] == self.index
        zeros = (self.total == self.classes) & (self.top == 0) & (self.shift == 0)
        return torch.where(zeros[:, None], self.index == 0, self.picked == self.top[:, None])

    @property
    def loss(self) -> Tensor:
        """[N] cross-entropy of the target."""
        return self.total.log() + self.shift - self.picked[:, 0]


def _exponential(logits: Tensor) -> Tensor:
    """`exp`, in place, as a power of two: several times faster than `exp_` on a CPU, and as precise."""
    return logits.mul_(math.log2(math.e)).exp2_()
