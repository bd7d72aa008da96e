"""A capped sample that no batching, order or number of processes can change, and that is uniform."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from scipy.stats import kstest

from fulldepth.metrics.reservoir import Reservoir, priority


def offer(keys, capacity, *, seed=0, split=None, reservoir=None):
    """A reservoir that has seen `keys`, each with features and a label that betray it."""
    reservoir = reservoir or Reservoir(capacity, (2, 3), seed=seed)
    for part in keys.split(split or max(len(keys), 1)):
        reservoir.update(part.float()[:, None, None].expand(-1, 2, 3), part, part % 7)
    return reservoir


def intact(sample):
    """Every kept token still has its own features and label, and the sample is in the order of the data."""
    assert (sample.features == sample.keys.float()[:, None, None]).all()
    assert (sample.labels == sample.keys % 7).all()
    assert (sample.keys.diff() > 0).all()
    return sample.keys.tolist()


@given(st.integers(1, 80), st.integers(1, 61), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_batches_and_order_do_not_change_the_sample(capacity, split, seed, random):
    keys = list(range(60))
    expected = intact(offer(torch.tensor(keys), capacity, seed=seed).compute())
    random.shuffle(keys)
    sample = offer(torch.tensor(keys), capacity, seed=seed, split=split).compute()
    assert intact(sample) == expected
    assert (len(expected), sample.seen) == (min(capacity, 60), 60)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_priorities_are_uniform_for_every_seed(seed):
    sequences, positions = torch.arange(300)[:, None], torch.arange(100)
    ranks = priority(((sequences << 24) | positions).flatten(), seed)
    assert ranks.unique().numel() == 30_000
    assert kstest(ranks.double().numpy() / 2.0**62, "uniform").pvalue > 1e-3
    along_a_sequence = ranks.double().reshape(300, 100)
    neighbours = np.corrcoef(along_a_sequence[:, :-1].flatten(), along_a_sequence[:, 1:].flatten())[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(29_700)


def test_measures_that_share_a_reservoir_fill_it_once(world):
    reservoir = world.setup().reservoir("residual")
    for observation in world.observations((5, 7)):
        reservoir.observe(observation, "residual")
        reservoir.observe(observation, "residual")
    sample = reservoir.compute()
    total = int(world.mask.sum())
    assert sample.seen == total
    assert [(k >> 24, k & (2**24 - 1)) for k in sample.keys.tolist()] == list(world.positions())
    assert_array_equal(sample.features.transpose(0, 1), world.tokens().astype(np.float32))
    assert_array_equal(sample.labels, [world.labels[n] for n, _ in world.positions()])
