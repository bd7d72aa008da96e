"""The shuffled order: a bijection for every size, other orders for other seeds and epochs, and random to look at."""

from __future__ import annotations

import hashlib
from math import ceil, isqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from fulldepth.data import ShuffledSampler

LARGE = 102_000_000
FIXED = [8, 7, 2, 5, 0, 3, 4, 6, 1, 9, 9, 6, 7, 5, 0, 2, 1, 3, 4, 8]
FIXED_LARGE = [62537347, 24134831, 33077758]


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_every_item_once(size, seed, epoch):
    order = ShuffledSampler(size, seed=seed).indices(epoch * size, (epoch + 1) * size)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_every_pass_is_the_next_part_of_one_sequence():
    """Also in a loop that never calls `set_epoch`."""
    stream = ShuffledSampler(60, seed=2).indices(0, 300).tolist()
    for length in (60, 100):
        loader = DataLoader(
            TensorDataset(torch.arange(60)), batch_size=8, sampler=ShuffledSampler(60, seed=2, length=length)
        )
        passes = [int(item) for _ in range(3) for (batch,) in loader for item in batch]
        assert passes == stream[: 3 * length]
        later = ShuffledSampler(60, seed=2, length=length)
        later.set_epoch(2)
        assert list(later) == stream[2 * length : 3 * length]
        assert len(later) == length
    assert ShuffledSampler(60, seed=2).indices(97, 205).tolist() == stream[97:205]


def test_the_order_is_fixed_for_all_time():
    """A resumed run relies on it: a change needs another name (`ORDER`)."""
    assert ShuffledSampler(10, seed=0).indices(0, 20).tolist() == FIXED
    assert ShuffledSampler(LARGE, seed=7).indices(3, 6).tolist() == FIXED_LARGE


def mixed(value, key):
    """Multiplications and shifts of a 64-bit number."""
    value ^= key
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        value = value * multiplier % 2**64
        value ^= value >> 32
    return value * 0xBF58476D1CE4E5B9 % 2**64


def described(size, seed):
    """The first epoch in whole numbers: sorted by a hash up to 256 items, else eight rounds on pairs of remainders."""
    digests = [hashlib.sha256(f"feistel-1 {seed} 0 {number}".encode()).digest() for number in range(8)]
    keys = [int.from_bytes(digest[:8], "little") for digest in digests]
    if size <= 256:
        return sorted(range(size), key=lambda item: mixed(item, keys[0]))
    rows = isqrt(size - 1) + 1
    columns = ceil(size / rows)
    order = []
    for item in range(size):
        while True:
            sides = [*divmod(item, columns)]
            for number, key in enumerate(keys):
                changed, modulus = number % 2, (rows, columns)[number % 2]
                drawn = (mixed(sides[1 - changed], key) >> 32) * modulus >> 32
                sides[changed] = (sides[changed] + drawn) % modulus
            item = sides[0] * columns + sides[1]
            if item < size:
                break
        order.append(item)
    return order


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
def test_the_order_is_the_one_that_is_described(size):
    assert ShuffledSampler(size, seed=3).indices(0, size).tolist() == described(size, 3)


def test_a_large_order_looks_random():
    order = ShuffledSampler(LARGE, seed=3).indices(LARGE // 3, LARGE // 3 + 200_000)
    counts = np.bincount(order * 500 // LARGE, minlength=500)
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4
    assert stats.kstest(order / LARGE, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(len(order))
    steps = np.diff(order) % LARGE  # neighbours in the order: any distance is equally likely
    assert stats.chisquare(np.bincount(steps * 500 // LARGE, minlength=500)).pvalue > 1e-4
    low = np.bincount(order % 64, minlength=64)  # also in the lowest bits
    assert stats.chisquare(low).pvalue > 1e-4
