"""`ShuffledSampler`: items in pseudo-random order, epoch after epoch, without a permutation in memory.

The order is a Feistel network (Luby and Rackoff 1988) on pairs of remainders, with cycle walking (Black and Rogaway
2002): a bijection of 0..n-1 that is computed on demand. torch's `RandomSampler` holds all n indices as Python
integers, about 36 bytes each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

import numpy as np
from torch.utils.data import Sampler

BLOCK = 1 << 16
"""Indices per computation."""
ROUNDS = 8
"""Rounds of the network; four make it pseudo-random for ideal round functions."""
ORDER = "feistel-1"
"""Name of this order, stored by runs so that they are not resumed in another one; change it with the algorithm."""

FEW = 256
"""Largest size at which items are sorted by a hash instead, as the network mixes too few pairs badly."""

HALF = np.uint64(32)
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of SplitMix64's finaliser (Steele, Lea and Flood 2014)."""


class ShuffledSampler(Sampler[int]):
    """Yields the indices 0..`size` - 1 in pseudo-random order, each once per epoch, in another order every epoch.

    Every iteration is the next pass of `length` positions, also in a loop that never calls `set_epoch`, which chooses
    the next pass.

    Position p of this endless sequence is item `permutation(p mod size)` of epoch `p // size`; it depends on `size`,
    `seed` and p alone, not on processes, library versions or the global random state. Any position is computed without
    those before it, and memory does not grow with `size`.

    For transformers' Trainer set `length = max_steps * sequences of a step`: it then makes one long pass, every step is
    a full batch, and resumed or parallel runs read the same items as one uninterrupted process.

    Args:
        size: items of the data set, n, 1 <= n < 2**62.
        seed: seed of the order.
        length: positions of one pass; None = `size`, one epoch. A multiple of a step's sequences keeps batches full.
    """

    def __init__(self, size: int, *, seed: int = 0, length: int | None = None) -> None:
        self.size = size
        self.seed = seed
        self.length = size if length is None else length
        self.passes = 0

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next pass, from 0: positions from `epoch * length` on."""
        self.passes = epoch

    def indices(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: the items at positions `start` up to `stop`, 0 <= start <= stop."""
        parts = [np.empty(0, np.int64)]
        while start < stop:
            epoch, first = divmod(start, self.size)
            count = min(stop - start, self.size - first)
            positions = np.arange(first, first + count, dtype=np.uint64)
            parts.append(_permuted(positions, self.size, _keys(self.seed, epoch)))
            start += count
        return np.concatenate(parts)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        first = self.passes * self.length
        self.passes += 1
        stop = first + self.length
        blocks = range(first, stop, BLOCK)
        return chain.from_iterable(self.indices(start, min(start + BLOCK, stop)).tolist() for start in blocks)


def _permuted(positions: np.ndarray, size: int, keys: tuple[np.uint64, ...]) -> np.ndarray:
    """[N] uint64 positions below `size` -> [N] int64 items below `size`, one to one."""
    if size <= FEW:
        order = np.argsort(_hash(np.arange(size, dtype=np.uint64), keys[0]), kind="stable")
        return order[positions.astype(np.int64)].astype(np.int64)
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)  # rows * columns is at least size, and by less than rows above it
    items = _network(positions, rows, columns, keys)
    outside = np.flatnonzero(items >= size)
    while len(outside):  # follow the cycle until it comes back inside
        items[outside] = _network(items[outside], rows, columns, keys)
        outside = outside[items[outside] >= size]
    return items.astype(np.int64)


def _network(numbers: np.ndarray, rows: int, columns: int, keys: tuple[np.uint64, ...]) -> np.ndarray:
    """A bijection of 0..rows * columns - 1: each round adds a function of one remainder to the other one."""
    sides = np.divmod(numbers, np.uint64(columns))
    moduli = (np.uint64(rows), np.uint64(columns))
    for number, key in enumerate(keys):
        changed = sides[number % 2]
        read = sides[1 - number % 2]
        modulus = moduli[number % 2]
        changed += ((_hash(read, key) >> HALF) * modulus) >> HALF  # below the modulus, which is at most 2**31
        changed -= modulus * (changed >= modulus)
    return sides[0] * np.uint64(columns) + sides[1]


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """[N] uint64 hashes, uniform in their upper halves."""
    mixed = values ^ key
    for multiplier in MIX:
        mixed *= multiplier
        mixed ^= mixed >> HALF
    mixed *= MIX[0]
    return mixed


@lru_cache(maxsize=4)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    """Keys of the rounds, independent for every seed, epoch and round."""
    digest = b"".join(hashlib.sha256(f"{ORDER} {seed} {epoch} {i}".encode()).digest()[:8] for i in range(ROUNDS))
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))
