"""The logit lens over all layers: one pass over tiles of the vocabulary, which limits the logits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.data import Sequences
from fulldepth.hf import Classifier
from fulldepth.metrics.base import Readout
from fulldepth.metrics.reservoir import priority
from fulldepth.targets import IGNORE

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
) -> Readout:
    """Apply the last layer's classifier to every layer, at the positions that have a target.

    In a multi-exit model each of layers 1..L-1 is read by its own head.

    Args:
        classifier: final norm and head.
        states: `[L+1, B, T, D]` residual stream.
        targets: `[B, T]` for token heads, `[B]` for sequence heads; -100 = no target.
        attention_mask: `[B, T]`, used by heads that pool.
    """
    if classifier.per_token:
        shown = torch.zeros_like(targets, dtype=torch.bool)
        return read_and_show(classifier, states, targets, shown)[0]
    device = classifier.device or states.device
    targets, attention_mask = targets.to(device), attention_mask.to(device)
    where = targets != IGNORE

    def tiles(layer: int) -> Iterator[tuple[slice, int, Tensor]]:
        logits = classifier.at(layer).sequences(states[layer].to(device)[where], attention_mask[where])
        yield slice(0, len(logits)), 0, logits.clone()

    precision = torch.promote_types(states.dtype, torch.float32)
    columns = _reduce(tiles, len(states), targets[where], 0, precision)
    return _readout(columns, slice(None), where.nonzero()[:, 0], states)[0]


def _readout(columns: Sequence[Tensor], kept: Tensor | slice, row: Tensor, states: Tensor) -> tuple[Readout, TopTokens]:
    """What `_reduce` read at some positions, and the top classes."""
    agrees, correct, loss, token, probability = (column.to(states.device) for column in columns)
    kept = kept if isinstance(kept, slice) else kept.to(states.device)
    readout = Readout(agrees[:, kept], correct[:, kept], loss[:, kept], row.to(states.device))
    return readout, TopTokens(token, probability)


def read_and_show(
    classifier: Classifier,
    states: Tensor,
    targets: Tensor,
    shown: Tensor,
) -> tuple[Readout, TopTokens]:
    """`read_layers` of a token head, and the top tokens of some positions, in one pass over the classes.

    Args:
        classifier: final norm and head.
        states: `[L+1, B, T, D]` residual stream.
        targets: `[B, T]`; -100 = no target.
        shown: `[B, T]` bool, positions whose top tokens are returned, with or without a target.
    """
    device = classifier.device or states.device
    targets, shown = targets.to(device), shown.to(device).flatten()
    has_target = (targets != IGNORE).flatten()
    where = torch.cat([shown.nonzero()[:, 0], (has_target & ~shown).nonzero()[:, 0]])  # shown positions first
    count = int(shown.sum())

    def tiles(layer: int) -> Iterator[tuple[slice, int, Tensor]]:
        head, chosen = classifier.at(layer), states[layer].to(device).flatten(0, 1)[where]  # [N, D]
        return _tiles(head, head.prepare(chosen), count)

    columns = _reduce(tiles, len(states), targets.flatten()[where], count)
    back = where.argsort()  # into the order of the batch
    kept = back[has_target[where[back]]]
    return _readout(columns, kept, (targets != IGNORE).nonzero()[:, 0], states)


@torch.no_grad()
def top_tokens(classifier: Classifier, states: Tensor, shown: Tensor, k: int) -> TopTokens:
    """The `k` most probable tokens by descending probability, `[L+1, P, k]` each.

    Args:
        classifier: final norm and head.
        states: `[L+1, B, T, D]` residual stream.
        shown: `[B, T]` bool, the `P` positions.
        k: limited to the number of classes.
    """
    device = classifier.device or states.device
    tops = []
    for layer, state in enumerate(states):
        head = classifier.at(layer)
        logits = head.logits(head.prepare(state[shown].to(device)))  # [P, V]
        tops.append(logits.float().softmax(-1).topk(min(k, logits.shape[-1])))
    token, probability = ([getattr(top, name).to(states.device) for top in tops] for name in ("indices", "values"))
    return TopTokens(torch.stack(token), torch.stack(probability))


def _reduce(
    tiles: Callable[[int], Iterator[tuple[slice, int, Tensor]]],
    layers: int,
    targets: Tensor,
    shown: int,
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Agreement, correctness and loss `[layers, N]`, and top class and its probability `[layers, shown]`.

    The last layer is read first, because the others are compared with it.

    Args:
        tiles: of the logits of a layer, as from `_tiles`.
        layers: their number.
        targets: `[N]`; positions without a target only give top classes.
        shown: number of positions, from the first, whose top classes are wanted.
        precision: of the loss.
    """
    tokens, device = len(targets), targets.device
    hits = torch.empty(layers, tokens, 2, dtype=torch.bool, device=device)
    loss = torch.empty(layers, tokens, dtype=precision, device=device)
    token = torch.empty(layers, shown, dtype=torch.int64, device=device)
    probability = torch.empty(layers, shown, dtype=torch.float32, device=device)
    index = torch.stack([targets.clamp(min=0), torch.zeros_like(targets)], dim=1)
    for layer in reversed(range(layers if tokens else 0)):
        last, softmax = layer == layers - 1, None
        for rows, start, logits in tiles(layer):
            softmax = softmax or _Softmax(index, tokens if last else shown, logits.dtype)
            softmax.add(rows, start, logits)
        assert softmax is not None
        hits[layer], loss[layer] = softmax.hits, softmax.loss
        token[layer], probability[layer] = softmax.best[:shown], softmax.probability[:shown]
        if last:
            index[:, 1], hits[layer, :, 1] = softmax.best, True
    return hits[..., 1], hits[..., 0], loss, token, probability


def _tiles(classifier: Classifier, prepared: Tensor, shown: int) -> Iterator[tuple[slice, int, Tensor]]:
    """Tiles of the logits of prepared states `[N, D']`: rows, first class, logits `[rows, C]` in a shared buffer.

    Rows before `shown` and rows after it are in different tiles.
    """
    tokens, classes, on_cpu = len(prepared), classifier.classes, prepared.device.type == "cpu"
    if classes is None:
        chunk = (
            CPU_CHUNK if on_cpu else max(CPU_CHUNK, DEVICE_CHUNK_ELEMENTS // classifier.logits(prepared[:1]).numel())
        )
        for rows in _rows(tokens, shown, chunk):
            yield rows, 0, classifier.logits(prepared[rows])
        return
    chunk = min(tokens, TILE_ROWS if on_cpu else max(CPU_CHUNK, DEVICE_CHUNK_ELEMENTS // classes))
    width = min(classes, max(1, (TILE_ELEMENTS if on_cpu else DEVICE_CHUNK_ELEMENTS) // chunk))
    room = prepared.new_empty(chunk * width)
    for start in range(0, classes, width):
        tile = classifier.tile(slice(start, start + width))
        for rows in _rows(tokens, shown, chunk):
            yield rows, start, tile(prepared[rows], room)


def _rows(tokens: int, shown: int, chunk: int) -> Iterator[slice]:
    """Chunks of rows, the first `shown` ones in chunks of their own."""
    for first, end in ((0, shown), (shown, tokens)):
        yield from (slice(start, min(start + chunk, end)) for start in range(first, end, chunk))


class _Softmax:
    """Largest logit, log-sum-exp and chosen logits of `N` positions, accumulated over tiles of classes.

    Args:
        index: `[N, 2]` classes whose logits are kept: the target, and the last layer's top class.
        find: number of rows, from the first, whose top class is found; in half precision it is found for all rows.
        dtype: precision of the logits.
    """

    def __init__(self, index: Tensor, find: int, dtype: torch.dtype) -> None:
        self.index, self.exact = index, dtype in FULL_PRECISION
        self.find = find if self.exact else len(index)
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
        if rows.start < self.find:
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

    @property
    def probability(self) -> Tensor:
        """[N] probability of the top class."""
        return (self.top - self.total.log() - self.shift).exp().float()


def _exponential(logits: Tensor) -> Tensor:
    """`exp`, in place, as a power of two: several times faster than `exp_` on a CPU, and as precise."""
    return logits.mul_(math.log2(math.e)).exp2_()
