"""Standard errors of paired differences against closed forms, with correlation within documents."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from fulldepth.core.uncertainty import Difference, mean_difference
from fulldepth.skip.elimination import is_worse, num_tests, reserve


@pytest.mark.parametrize("size", [1, 6])
def test_errors_and_bounds_are_right_where_windows_of_a_document_agree(size):
    """d = D_g + W_gi with G documents of `size` windows: Var(mean) = s_D^2 / G + s_W^2 / (G size)."""
    generator, groups, between, within, tokens, draws = np.random.default_rng(0), 20, 0.8, 1.1, 7, 4000
    documents = np.repeat(np.arange(groups), size)
    squares, false = [], 0
    for _ in range(draws):
        shared = np.repeat(generator.normal(0, between, groups), size)
        gap = tokens * (shared + generator.normal(0, within, groups * size))
        found = mean_difference(gap, np.full(len(gap), float(tokens)), documents, 10**9)
        squares.append(found.standard_error**2)
        false += is_worse(found, 0.05, 0.0, any_data=True)
    variance = between**2 / groups + within**2 / (groups * size)
    assert np.mean(squares) == pytest.approx(variance, rel=0.03)  # the mean of 4000 has an error of 0.5 %
    assert stats.binom.cdf(false, draws, 0.05) == pytest.approx(0.5, abs=0.4995)  # five in a hundred are wrong


@pytest.mark.parametrize("alike", [0.0, 0.9], ids=["independent", "alike within documents"])
def test_estimates_from_a_part_of_the_data_are_unbiased_and_their_intervals_cover_the_whole(alike):
    """m of N sequences are drawn: E r = R, and with independent ones Var r = S^2 / m (1 - m / N) / n^2."""
    generator, population, drawn, tokens, draws = np.random.default_rng(2), 240, 80, 5, 4000
    documents = np.repeat(np.arange(60), 4) if alike else np.arange(population)
    shared = generator.normal(0, alike, 60)[documents] if alike else 0.0
    gaps = tokens * (3 + shared + generator.normal(0, 1, population))
    truth = gaps.sum() / (tokens * population)
    estimates, squares, above = [], [], 0
    for _ in range(draws):
        part = generator.permutation(population)[:drawn]
        found = mean_difference(gaps[part], np.full(drawn, float(tokens)), documents[part], population)
        estimates.append(found.mean)
        squares.append(found.error**2)
        above += is_worse(found._replace(mean=found.mean - truth), 0.05, 0.0)
    exact = gaps.var(ddof=1) / drawn * (1 - drawn / population) / tokens**2
    assert np.mean(estimates) == pytest.approx(truth, abs=4 * (exact / draws) ** 0.5)
    assert np.var(estimates) == pytest.approx(exact, rel=0.1)  # single sequences are drawn, whatever they share
    assert np.mean(squares) == pytest.approx(exact, rel=0.02) if not alike else np.mean(squares) > exact
    assert stats.binom.sf(above, draws, 0.05) > 0.001  # never more than five in a hundred beyond the bound
    assert alike or stats.binom.cdf(above, draws, 0.05) > 0.001  # and no fewer, if sequences are independent


@pytest.mark.parametrize(
    ("documents", "tests"),
    [([[i] for i in range(32)], 24), ([[0, 1]] * 9, 0), ([[0, 1, 2, 3], [3, 4, 5], [6, 7], [8], [9]], 2), ([[0]], 0)],
)
def test_risk_is_shared_among_the_tests_that_can_happen(documents, tests):
    assert num_tests(documents) == tests


def test_the_reserve_is_its_formula():
    """max(1.2 log 20 N, largest D) / tokens (1 / D + q u), for 200 sequences of 5 tokens, two to a document."""
    cache = SimpleNamespace(chunks=range(4), sequences=200)
    cache.owners, cache.counts = lambda chunks: np.arange(200) // 2, lambda chunks: np.full(200, 5.0)
    h, gap = 1.2 * np.log(20), Difference(0.1, 0.1, 0.1, 50, 40, 0.3)
    assert reserve(cache, [gap], 0.95) == pytest.approx(h / 5 * (1 / 100 + 0.02 * 0.75))
    assert reserve(cache, [gap, gap._replace(largest=11.0)], 0.95) == pytest.approx(5.5 / 5 * (1 / 100 + 0.02 * 0.75))
    assert reserve(cache, [gap], 0.95, any_data=True) == pytest.approx(h / 5 * 0.02)
    enough = gap._replace(documents=149)  # 0.98^148 > 0.05 > 0.98^149
    assert reserve(cache, [enough], 0.95) == pytest.approx(h / 5 / 100)
    assert reserve(cache, [enough._replace(documents=148)], 0.95) > h / 5 / 100
    assert reserve(cache, [enough], 0.95, any_data=True) == 0
