"""zeta_l = 100 sum_{k=l..L} max(0, Psi_k - Psi_{k-1}) (JREG, Eq. 3), against plain loops."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics.pairwise import paired_cosine_distances

from fulldepth.metrics import JumpRate, Setup, jump_rate

profiles = hnp.arrays(np.float64, st.integers(2, 12), elements=st.floats(0, 1))


def zeta(psi, start):
    """`psi[0]` is layer 1; `start` is a 1-based layer."""
    total = 0.0
    for layer in range(start, len(psi) + 1):
        total += max(0.0, psi[layer - 1] - psi[layer - 2])
    return 100 * total


@given(profiles)
def test_every_start_against_loops(psi):
    layers = len(psi)
    for start in range(2, layers + 1):
        expected = pytest.approx(zeta(psi, start), abs=1e-9)
        assert jump_rate(torch.tensor(psi), start) == expected
        assert jump_rate(torch.tensor(psi), start - layers - 1) == expected, "counted from the end"
    assert jump_rate(torch.tensor(psi)) == pytest.approx(100 * max(0, psi[-1] - psi[-2]), abs=1e-9)


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_follow_the_mean_displacements(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    states = world.tokens()
    psi = [paired_cosine_distances(a, b).mean() / 2 for a, b in pairwise(states)]
    expected = {("residual", n, None, "value"): (zeta(psi, n), None) for n in range(2, len(states))}
    rows = any_split(JumpRate, world, atol=1e-5)
    expect(rows, expected, atol=1e-4)
    assert all(row.unit == "%" for row in rows.values())


@pytest.mark.parametrize(("shift", "error"), [(0.5, True), (-0.5, True), (-9, False)])
def test_a_difference_that_is_clamped_by_chance_keeps_its_error(shift, error):
    """Twenty rows of one token whose mean increase is `shift` standard errors; a jackknife says almost 0 for -0.5."""
    metric = JumpRate(Setup(num_layers=2, width=1, num_sequences=20))
    increase = np.random.default_rng(0).normal(size=20)
    sem = scipy.stats.sem(increase)
    increase += shift * sem - increase.mean()
    metric.counts += 1
    metric.sums += torch.tensor(np.stack([np.full(20, 0.3), 0.3 + 0.01 * increase], axis=1))[metric.setup.group_of]
    rows = {row.statistic: row.value for row in metric.rows()}
    assert rows["value"] == pytest.approx(max(0.0, shift * sem))
    assert rows["standard_error"] == (pytest.approx(sem) if error else 0)
