"""`core.uncertainty`: samples, groups, errors, intervals and verdicts, against scipy, loops and simulations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fulldepth.core.uncertainty import (
    GROUPS,
    RISK,
    advisable,
    bootstrap,
    crossing,
    deal,
    effective,
    error_of,
    holm,
    identity,
    jackknife_influence,
    mean_difference,
    measurable,
    median_ratio,
    paired_test,
    quantile,
    ratio_error,
    ratio_influence,
    reach,
    sample,
    share_interval,
    stated_groups,
)
from metrics.oracle import of_ratio


def test_identity_keeps_the_boundaries_of_its_parts():
    assert identity("ab", "c") != identity("a", "bc")
    assert identity("text", 3) == identity("text", "3") == identity(b"text", 3)
    assert 0 <= identity("x") < 2**63


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 70), st.randoms())
def test_a_sample_depends_on_the_items_not_on_their_order(values, limit, random):
    items = [identity(value) for value in values]
    chosen = sample(items, limit, seed=7)
    assert len(chosen) == min(limit, len(items)) == len(set(chosen))
    shuffled = random.sample(items, len(items))
    assert sorted(items[i] for i in chosen) == sorted(shuffled[i] for i in sample(shuffled, limit, seed=7))


def test_equal_items_are_drawn_one_by_one():
    """Of 400 items of which 200 are equal, 100 are drawn: the equal ones among them are hypergeometric."""
    items = [identity("the same")] * 200 + [identity(number) for number in range(200)]
    held = [sum(index < 200 for index in sample(items, 100, seed)) for seed in range(200)]
    law = scipy.stats.hypergeom(400, 200, 100)
    assert np.mean(held) == pytest.approx(law.mean(), abs=4 * law.std() / 200**0.5)
    assert np.std(held) == pytest.approx(law.std(), rel=0.2)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=200), st.randoms())
def test_clusters_are_dealt_whole_evenly_and_by_identity(clusters, random):
    groups = deal(clusters)
    by_cluster = dict(zip(clusters, groups.tolist(), strict=True))
    assert [by_cluster[cluster] for cluster in clusters] == groups.tolist()
    sizes = np.bincount(list(by_cluster.values()))
    assert len(sizes) == min(len(by_cluster), 32)
    assert sizes.max() - sizes.min() <= 1
    shuffled = random.sample(clusters, len(clusters))
    assert [by_cluster[cluster] for cluster in shuffled] == deal(shuffled).tolist()


@settings(max_examples=30)
@given(st.integers(3, 20), st.integers(0, 1000))
def test_the_error_of_a_ratio_is_the_formula_in_loops(groups, seed):
    rng = np.random.default_rng(seed)
    sums, weights = rng.normal(size=(groups, 2)), rng.integers(1, 9, size=(groups, 1)).astype(float)
    for column in range(2):
        expected = of_ratio(range(groups), sums[:, column], weights[:, 0])
        assert ratio_error(sums, weights)[column] == pytest.approx(expected)


def test_the_error_of_a_mean_is_that_of_scipy_and_empty_groups_do_not_count():
    values = np.random.default_rng(0).normal(size=25)
    assert ratio_error(values, np.ones(25)) == pytest.approx(scipy.stats.sem(values))
    padded, weights = np.r_[values, np.zeros(7)], np.r_[np.ones(25), np.zeros(7)]
    assert ratio_error(padded, weights) == pytest.approx(scipy.stats.sem(values))
    assert math.isnan(ratio_error(values[:2], np.ones(2)))


def test_jackknife_and_ratio_influences_agree_and_subtract():
    rng = np.random.default_rng(1)
    weights = rng.integers(50, 60, size=30).astype(float)
    sums, other = rng.normal(size=30), rng.normal(size=30)
    without = (sums.sum() - sums) / (weights.sum() - weights)
    assert np.allclose(jackknife_influence(without), ratio_influence(sums, weights), rtol=0.05, atol=2e-5)
    difference = ratio_influence(sums, weights) - ratio_influence(other, weights)
    assert error_of(difference) == pytest.approx(float(ratio_error(sums - other, weights)))


def test_the_interval_of_few_groups_is_students():
    assert quantile(5) == pytest.approx(scipy.stats.t(4).ppf(0.975))


@pytest.mark.parametrize("heavy", [False, True], ids=["alike", "one heavy group"])
def test_the_interval_of_a_crossing_in_loops(heavy):
    """Of groups of unlike weight as many count as Kish's effective number says."""
    rng = np.random.default_rng(4)
    weights = np.r_[9.0, np.ones(11)] if heavy else rng.integers(1, 9, size=12).astype(float)
    sums = weights[:, None] * np.linspace(0.3, -0.3, 20) + rng.normal(size=(12, 20)) * (0.3 if heavy else 1)
    mean, error = sums.sum(0) / weights.sum(), ratio_error(sums, weights[:, None])

    def ends(groups):
        far = scipy.stats.t(groups - 1).ppf(0.975) * error
        return tuple(next(i for i in range(20) if mean[i] + sign * far[i] <= 0) for sign in (-1, 1))

    maybe, sure = ends(20**2 / (81 + 11) if heavy else 12)
    assert crossing(sums, weights) == (maybe, sure)
    assert maybe < sure
    assert ((maybe, sure) == ends(12)) is not heavy
    assert crossing(sums + 99 * weights[:, None], weights) == (19, 19)
    assert crossing(sums[:2], weights[:2]) is None


def test_a_bootstrap_draws_one_group_fewer_than_there_are():
    """Against all draws of four of five groups, each as likely as the others."""
    sums, weights = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([1.0, 1.0, 2.0, 1.0, 3.0])
    every = [sums[[*drawn]].sum() / weights[[*drawn]].sum() for drawn in itertools.product(range(5), repeat=4)]
    expected = np.quantile(every, [0.025, 0.975], method="inverted_cdf")
    assert bootstrap(lambda s, w: s / w, sums, weights, draws=50_000) == pytest.approx(expected, rel=1e-12)


def test_a_crossing_is_covered_where_many_layers_are_near_the_threshold():
    """Shortfalls of 0.004 at layers 0 to 9 and -0.002 later, with errors of about 0.005: a bootstrap covers 0.89."""
    truth = np.r_[np.full(10, 0.004), np.full(10, -0.002)]
    held = {"crossing": 0, "bootstrap": 0}
    for draw in range(300):
        rng = np.random.default_rng(draw)
        sums = truth + 0.03 * rng.normal(size=(30, 20)) / 1.1
        low, high = crossing(sums, np.ones(30))
        held["crossing"] += low <= 10 <= high
        first = bootstrap(lambda drawn: np.where((drawn <= 0).any(-1), (drawn <= 0).argmax(-1), 19), sums, draws=200)
        held["bootstrap"] += first[0] <= 10 <= first[1]
    assert held["crossing"] / 300 >= 0.92
    assert held["bootstrap"] / 300 < 0.92


def test_holm_by_hand():
    # two-sided risks 0.0001, 0.03, 0.04: the first passes 0.0455 / 3, the second fails 0.0455 / 2
    z = scipy.stats.norm.isf(np.array([0.03, 0.0001, 0.04]) / 2)
    assert measurable(z, np.ones(3)).tolist() == [False, True, False]
    assert measurable(z[2:], np.ones(1)).tolist() == [True]
    assert measurable([5.0, 0.0], [math.nan, 0.0]).tolist() == [False, False]


@pytest.mark.parametrize(("groups", "by_normal"), [(3, 0.94), (7, 0.45), (8, 0.38), (12, 0.24), (22, 0.13), (32, 0.1)])
def test_a_difference_that_is_none_is_seldom_measured(groups, by_normal):
    """Thirty layers without any difference: a sentence that finds one is wrong. It may be so in 4.55 % of samples."""
    samples = np.random.default_rng(groups).normal(size=(2000, 30, groups))
    means = samples.mean(-1)
    errors = samples.std(-1, ddof=1) / groups**0.5
    wrong = np.mean([measurable(*one, groups).any() for one in zip(means, errors, strict=True)])
    assert 0.03 < wrong < 0.06
    assert np.mean([measurable(*one).any() for one in zip(means, errors, strict=True)]) == pytest.approx(
        by_normal, abs=0.02
    )
    assert (np.abs(means) > reach(groups) * errors).mean() == pytest.approx(RISK, abs=0.004)


@given(st.floats(1.5, 500), st.floats(0.01, 50))
def test_one_difference_is_measurable_beyond_its_reach(groups, beyond):
    risk = 2 * scipy.stats.norm.sf(2)
    assert reach(groups) == pytest.approx(scipy.stats.t.isf(risk / 2, groups - 1))
    assert measurable([beyond], [1.0], groups)[0] == (beyond > reach(groups))
    assert measurable([beyond] * 3, np.ones(3), groups)[0] == (beyond > scipy.stats.t.isf(risk / 6, groups - 1))


def test_the_groups_of_a_document_are_its_own_or_as_many_as_an_earlier_version_had():
    assert stated_groups({"independent": 3.6, "clusters": 10}) == 3.6
    assert (stated_groups({"clusters": 10}), stated_groups({"clusters": 2000})) == (10, GROUPS)
    assert stated_groups({}) == stated_groups({"independent": None}) == GROUPS
    assert reach() == pytest.approx(2.0)


def test_holm_by_its_definition():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, math.nan]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("pairs", [2, 3, 5, 10])
def test_a_paired_test_is_scipys(pairs):
    rng = np.random.default_rng(pairs)
    first, second = rng.normal(4, 0.1, (2, pairs, 6))
    test = paired_test(first - second)
    for claim, alternative in (("greater", "greater"), ("less", "less"), (None, "two-sided")):
        expected = scipy.stats.ttest_rel(first, second, alternative=alternative)
        assert test.p(claim) == pytest.approx(expected.pvalue, rel=1e-9)
    lower = scipy.stats.ttest_rel(first, second, alternative="greater").confidence_interval(0.95).low
    assert test.end(0.05) == pytest.approx(lower, rel=1e-9)
    high = scipy.stats.ttest_rel(first, second).confidence_interval(0.95).high
    assert test.end(0.975) == pytest.approx(high, rel=1e-9)
    closed = (first - second).mean(0) + scipy.stats.t.ppf(0.95, pairs - 1) * (first - second).std(
        0, ddof=1
    ) / pairs**0.5
    assert test.end(0.95) == pytest.approx(closed, rel=1e-9)


def test_the_papers_own_group():
    """JREG, Table 14: averages of five seeds; the text states 0.46, a lower bound of 0.42 and p = 9.89e-6."""
    jreg, baseline = [4.71, 4.67, 4.70, 4.71, 4.70], [4.24, 4.28, 4.20, 4.27, 4.21]
    test = paired_test(np.subtract(jreg, baseline))
    assert (float(test.mean), float(test.end(0.05))) == (pytest.approx(0.46, abs=0.01), pytest.approx(0.42, abs=0.005))
    assert test.p("greater") == pytest.approx(9.89e-6, rel=0.1)


def test_the_bound_of_five_pairs_covers():
    """2,000 groups of five pairs: 95 % of the lower bounds lie below the true difference, 0.1."""
    differences = np.random.default_rng(0).normal(0.1, 0.3, (5, 2000))
    test = paired_test(differences)
    assert 0.94 <= np.mean(test.end(0.05) <= 0.1) <= 0.96
    assert 0.94 <= np.mean((test.end(0.025) <= 0.1) & (test.end(0.975) >= 0.1)) <= 0.96


def test_equal_differences_have_no_p():
    test = paired_test([[0.1 + 0.2, 0.0, 1.0], [0.3, 0.0, math.nan], [0.3, 0.0, math.nan]])
    assert test.deviation.tolist()[:2] == [0.0, 0.0]
    assert np.isnan(test.p()).all()
    assert test.pairs.tolist() == [3, 3, 1]
    assert np.isnan(test.end(0.05)[2])


def test_the_interval_of_a_timing_covers_and_two_equal_programs_do_not_differ():
    rng = np.random.default_rng(3)
    ratios = [median_ratio(rng.lognormal(0, 0.1, 15), rng.lognormal(0, 0.1, 15)) for _ in range(2000)]
    differ = np.mean([ratio.differs for ratio in ratios])
    assert 0.005 < differ < 0.05
    nine = median_ratio([1.2] * 4 + [1.0] * 5, [1.0] * 9)
    assert nine == (1.0, 1.0, 1.2)  # ranks 2 and 8: 1 - 2 * 10 / 512 = 0.961
    assert math.isnan(median_ratio([1.0] * 8, [2.0] * 8).low)


def test_the_estimator_is_its_formula_for_documents_of_any_size():
    generator = np.random.default_rng(1)
    documents = generator.integers(0, 9, 40)
    tokens, gap = generator.integers(1, 30, 40).astype(float), generator.normal(0.2, 1, 40)
    rate = sum(gap) / sum(tokens)
    squares = [sum(gap[i] - rate * tokens[i] for i in np.flatnonzero(documents == g)) ** 2 for g in set(documents)]
    error = (9 / 8 * sum(squares)) ** 0.5 / sum(tokens)
    found = mean_difference(gap, tokens, documents, 160)
    assert (found.mean, found.standard_error) == pytest.approx((rate, error), rel=1e-12)
    assert found.error == pytest.approx(error * (1 - 40 / 160) ** 0.5, rel=1e-12)
    assert (found.sequences, found.documents) == (40, 9)
    for few in (1, 2):  # two documents tell too little of others
        found = mean_difference(gap, tokens, np.arange(40) % few, 160)
        assert found.standard_error == found.reach == np.inf
        assert not found.measurable


@pytest.mark.parametrize(
    ("lengths", "by_errors", "by_interval"),
    [
        ([2000, *[10] * 9], 0.03, 1.0),
        (8, 0.82, 0.94),
        ([2000, *[100] * 19], 0.69, 0.96),
        ([800, 400, 200, 100, 50, 50, 20, 20], 0.7, 0.94),
    ],
)
def test_the_interval_of_a_mean_of_documents_of_unequal_length_covers_the_truth(lengths, by_errors, by_interval):
    """Documents differ, and tokens in them; a number draws so many log-normal lengths."""
    held = {"errors": 0, "interval": 0}
    for draw in range(1000):
        rng = np.random.default_rng(draw)
        tokens = np.ceil(rng.lognormal(3, 1, lengths)) if isinstance(lengths, int) else np.array(lengths, float)
        sums = tokens * rng.normal(size=len(tokens)) + np.sqrt(tokens) * rng.normal(size=len(tokens))
        difference = mean_difference(sums, tokens, np.arange(len(tokens)), len(tokens))
        held["errors"] += abs(difference.mean) <= 2 * difference.standard_error
        held["interval"] += abs(difference.mean) <= difference.reach
    assert held["errors"] / 1000 == pytest.approx(by_errors, abs=0.03)
    assert held["interval"] / 1000 == pytest.approx(by_interval, abs=0.02)
    assert held["interval"] / 1000 >= 0.92


@pytest.mark.parametrize("groups", [3, 9, 32])
def test_advice_and_shares_by_students_t(groups):
    """A lead beyond its reach is advised on; an interval of shares allows for one sample that was not seen."""
    far = scipy.stats.t.isf(scipy.stats.norm.sf(2), groups - 1)
    assert [advisable(far * 0.1 * part, 0.1, groups) for part in (0.99, 1.01, -2)] == [False, True, False]
    assert not advisable(0.5, None, groups)
    half = scipy.stats.t.ppf(0.975, groups - 1) * (0.03**2 + 1 / 40**2) ** 0.5
    assert share_interval(0.2, 0.03, groups, 40) == pytest.approx((0.2 - half, 0.2 + half))


def test_clusters_of_equal_weight_count_fully_and_one_heavy_cluster_alone():
    assert effective(np.full(7, 3.0)) == pytest.approx(7)
    assert effective([5.0, 0.0, 5.0]) == pytest.approx(2)
    assert effective([1e9, 1, 1]) == pytest.approx(1)
    assert effective(np.array([9, *[1] * 9])) == pytest.approx(18**2 / (81 + 9))
    # the variance of a weighted mean of independent values is that of so many equal ones
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    values = np.random.default_rng(0).normal(size=(200_000, 4))
    assert 1 / (values @ weights / weights.sum()).var() == pytest.approx(effective(weights), rel=0.02)
