"""The logit lens over all layers: one pass over tiles of the vocabulary, which limits the logits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.core.targets import IGNORE
from fulldepth.data import Sequences
from fulldepth.hf import Classifier
from fulldepth.metrics.base import Readout
from fulldepth.metrics.reservoir import priority

CPU_CHUNK = 128
"""Tokens whose logits exist at once on a CPU for heads that give all classes at once."""
TILE_ROWS = 512
"""Maximum number of tokens in a tile of logits on a CPU."""
TILE_ELEMENTS = 1 << 19
"""Logits in a tile on a CPU, few enough to stay in its cache."""
DEVICE_CHUNK_ELEMENTS = 1 << 27
"""Number of logits that exist at once on an accelerator."""
SAFE_EXPONENT = 60.0
"""Exponentials of logits up to this size, summed over any vocabulary, neither overflow nor vanish in float32."""
FULL_PRECISION = (torch.float32, torch.float64)


class TopTokens(NamedTuple):
    """Top class and its probability at every layer and `P` positions, `[L+1, P]` each."""

    token: Tensor
    probability: Tensor


def position_ranks(targets: Tensor, sequence: Tensor, seed: int) -> Tensor:
    """[B, T] int64 priority of every position in a sample of positions, from its place in the whole data.

    Args:
        targets: `[B, T]`.
        sequence: `[B]` index of each sequence in the data.
        seed: of the sample.
    """
    places = torch.arange(targets.shape[1], device=targets.device)
    return priority((sequence.to(targets.device)[:, None] << 24) | places, seed)


def largest_rank(sequences: Sequences, limit: int | None, seed: int) -> int | None:
    """The largest of `position_ranks` in a sample of `limit` positions with a target; None = all are read."""
    if limit is None or sequences.num_targets <= limit:
        return None
    smallest = torch.empty(0, dtype=torch.int64)
    for batch in sequences.batches(64):
        if batch.targets is not None:
            ranks = position_ranks(batch.targets, batch.sequence, seed)[batch.targets != IGNORE]
            smallest = torch.cat([smallest, ranks]).sort().values[:limit]
    return int(smallest[-1]) if len(smallest) else None


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
    """
    device = classifier.device or states.device
    targets, attention_mask = targets.to(device), attention_mask.to(device)
    where = targets != IGNORE

    def tiles(layer: int) -> Iterator[tuple[slice, int, Tensor]]:
        head, chosen = classifier.at(layer), states[layer].to(device)[where]
        if classifier.per_token:
            yield from _tiles(head, head.prepare(chosen))
        else:
            logits = head.sequences(chosen, attention_mask[where])
            yield slice(0, len(logits)), 0, logits.clone()
        advance()

    precision = torch.float32 if classifier.per_token else torch.promote_types(states.dtype, torch.float32)
    columns = _reduce(tiles, len(states), targets[where], precision)
    return Readout(*(column.to(states.device) for column in (*columns, where.nonzero()[:, 0])))


@torch.no_grad()
def top_tokens(classifier: Classifier, states: Tensor, shown: Tensor, k: int) -> TopTokens:
    """The `k` most probable tokens by descending probability, `[L+1, P, k]` each; the first of several equal ones.

    Args:
        classifier: final norm and head.
        states: `[L+1, B, T, D]` residual stream.
        shown: `[B, T]` bool, the `P` positions.
        k: limited to the number of classes.
    """
    device = classifier.device or states.device
    tokens, probabilities = [], []
    for layer, state in enumerate(states):
        logits = classifier.at(layer).tokens(state[shown].to(device))  # [P, V]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        top = logits.topk(min(k, logits.shape[-1])) if k > 1 else logits.max(-1, keepdim=True)
        tokens.append(top.indices.to(states.device))
        probabilities.append((top.values - logits.logsumexp(-1, keepdim=True)).exp().to(states.device))
    return TopTokens(torch.stack(tokens), torch.stack(probabilities))


def _reduce(
    tiles: Callable[[int], Iterator[tuple[slice, int, Tensor]]], layers: int, targets: Tensor, precision: torch.dtype
) -> tuple[Tensor, ...]:
    """Agreement, correctness and loss, `[layers, N]`.

    The last layer is read first, because the others are compared with it.

    Args:
        tiles: of the logits of a layer, as from `_tiles`.
        layers: their number.
        targets: `[N]`.
        precision: of the loss.
    """
    tokens, device = len(targets), targets.device
    hits = torch.empty(layers, tokens, 2, dtype=torch.bool, device=device)
    loss = torch.empty(layers, tokens, dtype=precision, device=device)
    index = torch.stack([targets, torch.zeros_like(targets)], dim=1)
    for layer in reversed(range(layers if tokens else 0)):
        last, softmax = layer == layers - 1, None
        for rows, start, logits in tiles(layer):
            softmax = softmax or _Softmax(index, logits.dtype, find=last)
            softmax.add(rows, start, logits)
        assert softmax is not None
        hits[layer], loss[layer] = softmax.hits, softmax.loss
        if last:
            index[:, 1], hits[layer, :, 1] = softmax.best, True
    return hits[..., 1], hits[..., 0], loss


def _tiles(classifier: Classifier, prepared: Tensor) -> Iterator[tuple[slice, int, Tensor]]:
    """Tiles of the logits of prepared states `[N, D']`: rows, first class, logits `[rows, C]` in a shared buffer."""
    tokens, classes, on_cpu = len(prepared), classifier.classes, prepared.device.type == "cpu"
    if on_cpu:
        chunk = CPU_CHUNK if classes is None else TILE_ROWS
    else:
        chunk = max(CPU_CHUNK, DEVICE_CHUNK_ELEMENTS // (classes or classifier.logits(prepared[:1]).numel()))
    chunk = min(tokens, chunk)
    parts = [slice(start, start + chunk) for start in range(0, tokens, chunk)]
    if classes is None:
        yield from ((rows, 0, classifier.logits(prepared[rows])) for rows in parts)
        return
    width = min(classes, max(1, (TILE_ELEMENTS if on_cpu else DEVICE_CHUNK_ELEMENTS) // chunk))
    room = prepared.new_empty(chunk * width)
    for start in range(0, classes, width):
        tile = classifier.tile(slice(start, start + width))
        yield from ((rows, start, tile(prepared[rows], room)) for rows in parts)


class _Softmax:
    """Largest logit, log-sum-exp and chosen logits of `N` positions, accumulated over tiles of classes.

    Args:
        index: `[N, 2]` classes whose logits are kept: the target, and the last layer's top class.
        dtype: precision of the logits.
        find: whether the top class itself is found, which is slower; always in half precision.
    """

    def __init__(self, index: Tensor, dtype: torch.dtype, *, find: bool) -> None:
        self.index, self.exact = index, dtype in FULL_PRECISION
        self.find = find or not self.exact
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        self.best = torch.zeros_like(index[:, 0])
        self.picked = torch.zeros(index.shape, dtype=precision, device=index.device)
        self.total, self.shift = torch.zeros_like(self.picked[:, 0]), torch.zeros_like(self.picked[:, 0])
        self.top = torch.full_like(self.total, -torch.inf)
        self.classes = 0

    def add(self, rows: slice, start: int, logits: Tensor) -> None:
        """Add the logits `[rows, C]` of the classes from `start`, which are overwritten."""
        logits = logits if self.exact else logits.float()
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

        In full precision a class counts as the top one if its logit equals the maximum, which avoids an argmax. Ties
        only matter if all logits are zero (a head or a state of zeros); then the first class wins, as in the model. In
        half precision ties are frequent, so the top class itself is compared.
        """
        if not self.exact:
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
