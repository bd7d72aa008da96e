"""The shuffled order: a bijection for every size, other orders for other seeds and epochs, and random to look at."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from fulldepth.data import ShuffledSampler
from fulldepth.errors import FulldepthError

LARGE = 102_000_000
FIXED = [8, 7, 2, 5, 0, 3, 4, 6, 1, 9, 9, 6, 7, 5, 0, 2, 1, 3, 4, 8]
FIXED_LARGE = [62537347, 24134831, 33077758]


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_every_item_once(size: int, seed: int, epoch: int) -> None:
    order = ShuffledSampler(size, seed=seed).indices(epoch * size, (epoch + 1) * size)
    assert np.array_equal(np.sort(order), np.arange(size))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_position_is_reached_without_those_before(data: st.DataObject) -> None:
    size, length = data.draw(st.integers(1, 400)), data.draw(st.integers(0, 1500))
    start, number = data.draw(st.integers(0, length)), data.draw(st.integers(0, 3))
    whole, rest = (
        ShuffledSampler(size, seed=1, length=length),
        ShuffledSampler(size, seed=1, length=length, start=start),
    )
    for sampler in (whole, rest):
        sampler.set_epoch(number)
    assert list(rest) == list(whole)[start:]
    assert (len(whole), len(rest)) == (length, length - start)
    stream = ShuffledSampler(size, seed=1).indices(number * length, (number + 1) * length)
    whole.set_epoch(number)
    assert list(whole) == stream.tolist()


def test_a_loop_without_set_epoch_gets_another_order_in_every_pass() -> None:
    data = TensorDataset(torch.arange(60))
    loader = DataLoader(data, batch_size=8, sampler=ShuffledSampler(60, seed=2))
    epochs = [[int(item) for (batch,) in loader for item in batch] for _ in range(3)]
    assert np.concatenate(epochs).tolist() == ShuffledSampler(60, seed=2).indices(0, 180).tolist()
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_is_fixed_for_all_time() -> None:
    """A resumed run relies on it: a change needs another name (`ORDER`)."""
    assert ShuffledSampler(10, seed=0).indices(0, 20).tolist() == FIXED
    assert ShuffledSampler(LARGE, seed=7).indices(3, 6).tolist() == FIXED_LARGE


def test_a_large_order_looks_random() -> None:
    order = ShuffledSampler(LARGE, seed=3).indices(LARGE // 3, LARGE // 3 + 200_000)
    counts = np.bincount(order * 500 // LARGE, minlength=500)
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4
    assert stats.kstest(order / LARGE, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(len(order))
    steps = np.diff(order) % LARGE  # neighbours in the order: any distance is equally likely
    assert stats.chisquare(np.bincount(steps * 500 // LARGE, minlength=500)).pvalue > 1e-4
    low = np.bincount(order % 64, minlength=64)  # also in the lowest bits
    assert stats.chisquare(low).pvalue > 1e-4


def test_every_order_of_a_few_items_is_equally_frequent() -> None:
    orders = [tuple(ShuffledSampler(4, seed=seed).indices(0, 4).tolist()) for seed in range(1200)]
    counts = [orders.count(order) for order in itertools.permutations(range(4))]
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 2**62}, {"size": 3, "length": 2, "start": 3}])
def test_nonsense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(FulldepthError):
        ShuffledSampler(**options)
