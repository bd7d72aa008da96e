r"""Standard errors, intervals and verdicts: how samples are drawn, grouped and compared.

The unit of independence is a **cluster**: a document with all its windows, a row, an image, a prompt. Clusters are
dealt to at most `GROUPS` groups by a hash of their identity, never by position, and a measure keeps its sums per group.
All errors are functions of **influences**, the share that each group has in the deviation of an estimate:

.. math:: e_g = \frac{s_g - \hat\theta w_g}{\sum_g w_g} \quad\text{(ratio of sums)}, \qquad
    e_g = \frac{G - 1}{G} (\bar\theta_{-} - \hat\theta_{-g}) \quad\text{(jackknife)}, \qquad
    \mathrm{SE}^2 = \frac{G}{G - 1} \sum_g e_g^2

Influences of two estimates on the same clusters subtract, which gives the error of a paired difference.

Where few clusters hold most of the weight, the error of a ratio is too small: the interval takes Student's t for the
`effective` number of clusters. Two standard errors hold the truth in 3 % of simulations with one cluster of 2,000
tokens and nine of 10, and in 82 % with eight of log-normal lengths; these intervals in 92 % or more.

Source: Cochran, "Sampling Techniques" (1977), 6.3 (ratio estimator); Kish, "Survey Sampling" (1965), 8.2 and 11.7
(effective number); Miller, "Adding Error Bars to Evals" (2024).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.special
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

GROUPS = 32
"""Maximum number of groups. With 32, a standard error is itself uncertain by about 13 per cent."""
FEWEST_CLUSTERS = 3
"""Fewest clusters from which a standard error is stated."""
FEW_CLUSTERS = 8
"""Number of clusters below which a warning states how wide an interval is."""
FEWEST_DOCUMENTS = 8
"""Fewest documents on which a search drops a candidate or is sure of its pick."""
ALIKE = 2 / 3
"""Share of clusters that the effective number must reach for all of them to count: Student's t of their number then
holds the truth in 92 % of simulations or more."""
FEWEST_EFFECTIVE = 2
"""Fewest effective clusters (`effective`) from which a standard error is stated."""
DRAWS = 1000
"""Draws of a bootstrap."""
SIGNIFICANT = 2.0
"""Standard errors that a difference of very many clusters must exceed to be called measurable."""
RISK = 2 * float(scipy.special.ndtr(-SIGNIFICANT))
"""Probability, 4.55 %, that a number whose true value is 0 is called measurable."""
MOST_ERRORS = 1e9
"""Largest quantile that is given: it is infinite for one effective cluster."""
ROUNDING = 1e-12
"""Ratio to their mean below which a standard deviation of differences is rounding alone."""
FEWEST_ROUNDS = 9
"""Fewest rounds of a timing whose ratio gets an interval."""


def plural(unit: str) -> str:
    """`document` -> `documents`, `block of 4,096 tokens` -> `blocks of 4,096 tokens`."""
    noun, _, rest = unit.partition(" ")
    return f"{noun}s {rest}".strip()


def counted(count: int, unit: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{count:,} {unit if count == 1 else plural(unit)}"


def identity(*parts: str | bytes | int) -> int:
    """A 63-bit hash of what makes an item itself (its content, or its place), for `sample` and `deal`."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little") >> 1


def ranks(identities: ArrayLike, seed: int) -> NDArray[np.uint64]:
    """A pseudo-random uint64 for every identity: a deterministic function of identity and seed (SplitMix64)."""
    x = np.asarray(identities, dtype=np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def distinct(identities: ArrayLike) -> NDArray[np.uint64]:
    """Identities `[n]` made unique: the second, third, ... of equal items get new ones, derived from their number."""
    items = np.asarray(identities, dtype=np.uint64)
    order = items.argsort(kind="stable")
    ordered = items[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]][: len(items)]
    number = np.empty(len(items), dtype=np.uint64)  # 0 for the first of equal items, 1 for the second
    number[order] = np.arange(len(items)) - np.maximum.accumulate(np.where(first, np.arange(len(items)), 0))
    return items ^ (ranks(number, 1) >> np.uint64(1)) * (number > 0)


def sample(identities: Sequence[int] | NDArray[np.uint64], limit: int | None, seed: int) -> list[int]:
    """Indices, ascending, of a uniform sample of items without replacement: those with the smallest seeded hashes.

    The sample depends on the items and the seed only, not on their order. Equal items are told apart by their number.

    Args:
        identities: identity of each item, see `identity`.
        limit: most items; None = all.
        seed: seed of the sample.
    """
    if limit is None or len(identities) <= limit:
        return list(range(len(identities)))
    return sorted(ranks(distinct(identities), seed).argsort(kind="stable")[:limit].tolist())


def deal(clusters: ArrayLike, groups: int = GROUPS) -> NDArray[np.int64]:
    """The group of each item, `[n]` in 0..G-1 with G = min(clusters, `groups`); a cluster's items share a group.

    Clusters take turns in the order of their seeded hash, so groups differ by at most one cluster.
    """
    present, index = np.unique(np.asarray(clusters, dtype=np.uint64), return_inverse=True)
    if not len(present):
        return np.zeros(0, dtype=np.int64)
    turn = np.empty(len(present), dtype=np.int64)
    turn[ranks(present, 0).argsort(kind="stable")] = np.arange(len(present))
    return (turn % min(len(present), groups))[index.reshape(-1)]


def ratio_influence(sums: ArrayLike, weights: ArrayLike) -> Array:
    """`[G, ...]` influences on `sums.sum(0) / weights.sum(0)`, of sums and weights per group, which broadcast.

    NaN for a group without weight, which does not count as one.
    """
    s = np.asarray(sums, dtype=np.float64)
    w = np.asarray(weights, dtype=np.float64)
    total = w.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.broadcast_to(w, s.shape) > 0, (s - s.sum(0) / total * w) / total, np.nan)


def jackknife_influence(without: ArrayLike) -> Array:
    """`[G, ...]` influences on a function of several sums, from its values without each group, `[G, ...]`."""
    values = np.asarray(without, dtype=np.float64)
    return (len(values) - 1) / len(values) * (values.mean(0) - values)


def error_of(influence: ArrayLike) -> Array:
    """Standard error `[...]` from influences `[G, ...]`; NaN for fewer than `FEWEST_CLUSTERS` groups with data."""
    values = np.asarray(influence, dtype=np.float64)
    groups = np.isfinite(values).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(groups / (groups - 1) * np.nansum(np.square(values), axis=0))
    return np.where(groups >= FEWEST_CLUSTERS, error, np.nan)


def ratio_error(sums: ArrayLike, weights: ArrayLike) -> Array:
    """Standard error of `sums.sum(0) / weights.sum(0)`, from sums and weights per group, `[G, ...]` each."""
    return error_of(ratio_influence(sums, weights))


def effective(weights: ArrayLike) -> float:
    r"""The effective number of clusters: of equal ones whose mean has the variance of this weighted mean.

    .. math:: G_\text{eff} = \frac{(\sum_g w_g)^2}{\sum_g w_g^2}

    between 1 and the number of clusters with weight; 0 without weight.

    Args:
        weights: of clusters or of their groups, `[G]`.
    """
    w = np.asarray(weights, dtype=np.float64)
    squares = float(w @ w)
    return float(w.sum()) ** 2 / squares if squares else 0.0


def independent(weights: ArrayLike) -> float:
    """The number of clusters for `quantile`: those with weight, or the `effective` number if it is less than
    `ALIKE` of them.

    Args:
        weights: of clusters or of their groups, `[G]`.
    """
    number = int(np.count_nonzero(np.asarray(weights)))
    alike = effective(weights)
    return alike if alike < ALIKE * number else number


def quantile(groups: float, share: float = 0.975) -> float:
    """Standard errors from the estimate to the end of its 95 % interval: Student's t with `groups - 1` degrees.

    Args:
        groups: G, see `independent`.
        share: probability below the end.
    """
    if groups <= 1:
        return float("nan")
    return min(float(scipy.special.stdtrit(groups - 1, share)), MOST_ERRORS)


def bootstrap(statistic: Callable[..., Any], *sums: Array, draws: int = DRAWS) -> tuple[Array, Array] | None:
    """95 % interval of a step or an extreme (first layer above a limit, arg max), for which a jackknife is not valid.

    Groups are drawn with replacement, one fewer than there are (Rao and Wu 1988, without bias for few groups).

    Args:
        statistic: function of the sums over groups, one array `[draws, ...]` for each of `sums`, to `[draws, ...]`.
        sums: per group, `[G, ...]`.
        draws: number of draws.

    Returns:
        Lower and upper ends `[...]`, values that occur among the draws; None for fewer than `FEWEST_CLUSTERS` groups.
    """
    groups = len(sums[0])
    if groups < FEWEST_CLUSTERS:
        return None
    times = np.random.default_rng(0).multinomial(groups - 1, np.full(groups, 1 / groups), size=draws)
    drawn = [np.tensordot(times, array, axes=1) * (groups / (groups - 1)) for array in sums]
    values = np.asarray(statistic(*drawn), dtype=np.float64)
    low = np.nanquantile(values, 0.025, axis=0, method="lower")
    return np.asarray(low), np.asarray(np.nanquantile(values, 0.975, axis=0, method="higher"))


def crossing(sums: ArrayLike, weights: ArrayLike) -> tuple[int, int] | None:
    """95 % interval of the first index at which a mean is at most 0, such as the first layer that is good enough.

    The interval starts at the first index whose mean is not measurably above 0, and ends at the first index whose mean
    is measurably below 0. It holds the true index in 95 % of samples, also if the means stay near 0 over many indices.
    A bootstrap holds it in 88 % of simulations then: the first index that crosses by noise wins in every draw.

    Args:
        sums: per group, `[G, L]`.
        weights: per group, `[G]`.

    Returns:
        Two indices in 0..L-1, the last one where no other index meets the condition; None for fewer than
        `FEWEST_CLUSTERS` groups with data.

    Source: Woodruff, "Confidence intervals for medians and other position measures" (1952).
    """
    s = np.asarray(sums, np.float64)
    w = np.asarray(weights, np.float64)
    error = error_of(ratio_influence(s, w[:, None]))
    if not np.isfinite(error).all():
        return None
    mean = s.sum(0) / w.sum()
    far = quantile(independent(w)) * error
    low, high = (np.append(np.flatnonzero(bound <= 0), s.shape[1] - 1)[0] for bound in (mean - far, mean + far))
    return int(low), int(high)


def stated_groups(data: Mapping[str, Any]) -> float:
    """The number of groups for Student's t that the entry `data` of `results.json` states; `GROUPS` if none.

    Documents that an earlier version wrote state the number of clusters.
    """
    return min(float(data.get("independent") or data.get("clusters") or math.inf), GROUPS)


def reach(groups: float = math.inf) -> float:
    """Standard errors that a single difference must exceed to be measurable, at the risk `RISK`, by Student's t.

    2 for very many groups, 2.1 for 32, 2.4 for 8, 4.5 for 3.

    Args:
        groups: G, groups of clusters, see `independent`.
    """
    return quantile(groups, 1 - RISK / 2)


def measurable(differences: ArrayLike, errors: ArrayLike, groups: float = math.inf) -> NDArray[np.bool_]:
    """Which of several differences are measurable, at the risk `RISK` of calling one so whose true value is 0.

    The probability of so many standard errors by Student's t is less than `RISK` after Holm's correction. Of a single
    difference, these are the ones beyond `reach`. By the normal distribution, 13 % of the sentences on 30 layers
    without a difference would find one from 22 clusters, and 38 % from eight.

    Args:
        differences: the differences that one sentence is about, `[n]`.
        errors: their standard errors, `[n]`; NaN = not measurable.
        groups: G, groups of clusters that the errors rest on, see `independent`.

    Source: Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    d = np.atleast_1d(np.asarray(differences, np.float64))
    e = np.atleast_1d(np.asarray(errors, np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(np.isfinite(e) & np.isfinite(d), np.where(d == 0, 0.0, np.abs(d) / e), 0.0)
    return holm(2 * scipy.special.stdtr(max(groups - 1, 0.0), -z)) < RISK


def holm(p: ArrayLike) -> Array:
    """Holm-adjusted p values `[n]`: the smallest p times n, the next times n - 1, and so on, made non-decreasing.

    NaN counts as 1; adjusted values are at most 1.

    Source: Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    values = np.nan_to_num(np.atleast_1d(np.asarray(p, np.float64)), nan=1.0)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)), 1.0)
    return adjusted


class PairedTest(NamedTuple):
    """Student's t-test of paired differences; arrays of the shape of one pair."""

    pairs: NDArray[np.int64]
    mean: Array
    deviation: Array
    """Sample standard deviation, with n - 1; 0 where the differences are equal."""
    error: Array
    """Standard error of the mean; NaN for one pair."""

    def end(self, share: float) -> Array:
        """The value below which the true mean lies with probability `share`: the one-sided 95 % bounds are at 0.05 and
        0.95, the ends of the two-sided 95 % interval at 0.025 and 0.975.
        """
        return np.asarray(self.mean + scipy.special.stdtrit(self.pairs - 1.0, share) * self.error)

    def p(self, claim: str | None = None) -> Array:
        """The p value of the claim that the true mean is `greater` or `less` than 0; None = two-sided.

        NaN where all differences are equal.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(self.error > 0, self.mean / self.error, np.nan)
        below = {"greater": -t, "less": t, None: -np.abs(t)}[claim]
        return np.asarray((2 if claim is None else 1) * scipy.special.stdtr(self.pairs - 1.0, below))


def paired_test(differences: ArrayLike) -> PairedTest:
    r"""The mean of paired differences, such as of two methods trained with the same seeds, and how sure it is.

    With differences :math:`d_1 \ldots d_n`, their mean :math:`\bar d` and their sample standard deviation :math:`s`,
    Student's t distribution with n - 1 degrees of freedom gives

    .. math:: t = \frac{\bar d}{s / \sqrt n}, \qquad p_\text{greater} = P(T_{n-1} > t), \qquad
        \text{lower 95 \% bound} = \bar d - t_{n-1}(0.95)\, \frac{s}{\sqrt n}

    Args:
        differences: one for each pair, `[n, ...]`; NaN = this pair has no such number.

    Source: "JREG: final-layer jumps", App. G, Tables 13, 14 and 18.
    """
    values = np.asarray(differences, np.float64)
    pairs = np.isfinite(values).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nansum(values, 0) / pairs
        squares = np.nansum((values - mean) ** 2, 0)
        deviation = np.sqrt(squares / (pairs - 1))
        deviation = np.where(deviation <= ROUNDING * np.abs(mean), 0.0, deviation)
        return PairedTest(pairs, mean, deviation, deviation / np.sqrt(pairs))


def advisable(lead: float, error: float | None, groups: float) -> bool:
    """Return True if a model is measurably better than a constant prediction; only then is advice given.

    Args:
        lead: quality of the model minus that of the constant prediction, on the same samples.
        error: its standard error over clusters; None or NaN if unknown, and then nothing is advised.
        groups: G, groups of clusters that the error rests on, see `independent`.
    """
    return error is not None and lead > reach(groups) * error


def share_interval(difference: float, error: float, groups: float, samples: int) -> tuple[float, float]:
    r"""95 % interval of a difference of two shares of the same samples, such as a drop of accuracy.

    .. math:: d \pm t_{G - 1} \sqrt{\mathrm{SE}^2 + 1 / n^2}

    The second term is one more sample on which the two differ: without it, an error of 0 would claim that samples that
    were not seen cannot differ either.

    Args:
        difference: d.
        error: its standard error; NaN gives NaN.
        groups: G, groups of clusters.
        samples: n.
    """
    half_width = quantile(groups) * float(np.hypot(error, 1 / samples))
    return difference - half_width, difference + half_width


class Ratio(NamedTuple):
    """A ratio of two interleaved timings: the median over rounds, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """True if the interval does not contain 1; False if there is no interval."""
        return self.low > 1 or self.high < 1


def median_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Median over rounds of `first / second`, with a 95 % interval from the order statistics.

    The interval is from the k-th smallest to the k-th largest ratio, with the largest k for which it holds the
    population's median with probability 0.95 at least (sign test); NaN for fewer than `FEWEST_ROUNDS` rounds.

    Args:
        first: seconds in each round.
        second: seconds in the same rounds.
    """
    values = np.sort(np.asarray(first, np.float64) / np.asarray(second, np.float64))
    rounds = len(values)
    if rounds < FEWEST_ROUNDS:
        return Ratio(float(np.median(values)) if rounds else float("nan"), float("nan"), float("nan"))
    k = max(k for k in range(1, rounds // 2 + 1) if 1 - 2 * scipy.special.bdtr(k - 1, rounds, 0.5) >= 0.95)
    return Ratio(float(np.median(values)), float(values[k - 1]), float(values[rounds - k]))


def score_reach(error: float, examples: int) -> float:
    r"""The smallest measurable difference of scores of the same examples.

    .. math:: \sqrt{(t\, \mathrm{SE})^2 + (2 / n)^2}

    with t from `reach`. The second term stands for one more example on which the models differ: an error of 0 does not
    mean that they agree on examples that were not read.

    Args:
        error: standard error of the difference.
        examples: number of examples that were read.
    """
    return math.hypot(reach(examples) * error, SIGNIFICANT / examples)


class Difference(NamedTuple):
    """Difference of the mean losses of two models on the same sequences."""

    mean: float
    """In nats per token."""
    error: float
    """Standard error as an estimate for all held-out data; 0 once all were seen."""
    standard_error: float
    """Standard error as an estimate for any such data."""
    sequences: int
    documents: int
    """Number of documents of these sequences."""
    largest: float
    """Largest departure of a document's summed difference from `mean`, in nats."""
    independent: float | None = None
    """Number of documents for Student's t, by their tokens (`independent`); None = all of them."""

    @property
    def groups(self) -> float:
        """Number of documents for Student's t."""
        return self.documents if self.independent is None else self.independent

    def quantile(self, share: float = 0.975) -> float:
        """Standard errors from the mean to the end of an interval, by Student's t."""
        return quantile(self.groups, share)

    @property
    def reach(self) -> float:
        """The smallest difference that is measurable (`reach`); infinite if the error is not known."""
        if math.isinf(self.standard_error):
            return math.inf
        return self.standard_error * reach(self.groups)

    @property
    def in_errors(self) -> float:
        """The difference in standard errors."""
        return self.mean / self.standard_error if self.standard_error else math.copysign(math.inf, self.mean)

    @property
    def measurable(self) -> bool:
        """True if the difference is beyond its error."""
        return abs(self.mean) > self.reach


def mean_difference(gap: Array, tokens: Array, documents: ArrayLike, population: int) -> Difference:
    r"""The difference of two models' mean losses, paired by sequence, with the ratio estimator's standard error.

    .. math:: r = \sum_g s_g / \sum_g n_g, \qquad
        \mathrm{SE}^2 = \frac{G}{G - 1} \sum_g (s_g - r n_g)^2 / \big(\sum_g n_g\big)^2

    with the summed differences s and the tokens n of G documents.

    Args:
        gap: `[m]` differences of the summed losses of each sequence, in nats.
        tokens: `[m]` tokens that count.
        documents: `[m]` integer label of each sequence's document.
        population: N, the number of held-out sequences.
    """
    _, document = np.unique(documents, return_inverse=True)
    sums = np.bincount(document, gap)
    weights = np.bincount(document, tokens)
    total = float(tokens.sum())
    mean = float(gap.sum()) / total if total else 0.0
    standard_error = float(ratio_error(sums, weights)) if total else math.nan
    if math.isnan(standard_error):
        standard_error = math.inf
    unseen = 1 - len(gap) / population
    error = standard_error * math.sqrt(unseen) if unseen > 0 else 0.0
    largest = float(np.abs(sums - mean * weights).max(initial=0.0))
    number = int((weights > 0).sum())
    return Difference(mean, error, standard_error, len(gap), number, largest, independent(weights))
