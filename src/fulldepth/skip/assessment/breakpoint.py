"""`find_breakpoint`: the number of removed blocks at which the loss stops growing linearly, with its confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from fulldepth.errors import FulldepthError

ROUNDING = 1e-12
"""Departures from the line below this share of the losses count as rounding."""
FEWEST = 5
"""Fewest documents from which a spread is estimated."""
LEVEL = 0.05
"""Probability that a straight line is found to end anywhere."""
KINK_LEVEL = 0.01
"""Probability that a turn of exactly `SHARPNESS` times those before counts as a kink; small, because the point was
selected for being above the line."""
SHARPNESS = 4.0
"""Smallest ratio of the turn at a kink to the mean of the turns before it. Parabolas reach 1, cubics 2, n^4 and
exponentials that double with every block less than 4."""
TURNS = 3
"""Most turns before a kink that it is compared with."""


@dataclass(frozen=True)
class Breakpoint:
    """The straight first part of a curve, and whether it ends in a kink."""

    blocks: int | None
    """The last number of removed blocks before the kink; None where there is none."""
    straight_until: int
    """The last number of removed blocks on the line; all of them for fewer than `FEWEST` documents."""
    excess: float
    """Nats by which the next point lies above the line; 0 for a line to the end."""
    excess_error: float | None
    """Standard error of `excess` over documents; None for fewer than `FEWEST`."""
    confidence: float | None
    """Share of resamples with the same `blocks`; None for fewer than `FEWEST` documents."""
    low: int | None
    high: int | None
    """Upper end of the 95 % interval of the break points of resamples that have one; `low` is the lower end."""
    documents: int


def find_breakpoint(
    losses: Any, weights: Any, documents: Any = None, *, resamples: int = 1000, seed: int = 0
) -> Breakpoint:
    r"""The break point of a curve, from the losses of single sequences.

    For k = 2, 3, ... a line is fitted to the mean losses of 0..k removed blocks by least squares, and continued to
    k + 1. The first point outside the band ends the straight part:

    .. math:: e_k = f(k + 1) - \hat f_{0..k}(k + 1), \qquad |e_k| > t_{\nu}(\alpha_k / 2) \, SE(e_k), \qquad
        \alpha_k = \frac{6 \cdot 0.05}{\pi^2 (k - 1)^2}

    Sequences of one document are correlated, so they are summed: the standard error is that of the weighted mean of
    :math:`e_k` over D documents, with :math:`\nu = (\sum_d w_d)^2 / \sum_d w_d^2 - 1` degrees of freedom, which is
    D - 1 for documents of equal weight. The levels add up to 0.05. The end k is a break point if the point lies above
    the line and the curve has a kink: the turn :math:`D_k = f(k+1) - 2 f(k) + f(k-1)` exceeds 4 times the mean of the
    (at most 3) turns before it, with 99 % confidence. A parabola or an exponential also leaves its first line, but
    without a kink. Points beyond k + 1 have no influence. Two points are always on a line, so that k is at least 2.

    The confidence is estimated by bootstrap over documents. Fewer than 5 documents give no band and no break point.

    Args:
        losses: [N, K + 1] mean loss of each held-out sequence with 0..K removed blocks.
        weights: [N] tokens that count in each.
        documents: [N] label of the document of each; None = each its own.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        FulldepthError: for shapes that do not match, losses that are not finite, or weights that are not positive.

    Source: Hopscotch (arXiv 2506.03303), break point; Efron 1979 (bootstrap). The test is our own: the paper reads the
    break point off the curve.
    """
    curves, tokens = np.asarray(losses, np.float64), np.asarray(weights, np.float64)
    if curves.ndim != 2 or tokens.shape != curves.shape[:1] or curves.shape[1] < 2 or not len(curves):
        raise FulldepthError(f"Losses of shape {curves.shape} and weights of shape {tokens.shape}; expected N x K, N.")
    if not np.isfinite(curves).all() or not (tokens > 0).all():
        raise FulldepthError("Losses must be finite, and every sequence must have tokens that count.")
    at = np.unique(np.arange(len(curves)) if documents is None else np.asarray(documents), return_inverse=True)[1]
    total = np.bincount(at.reshape(-1), tokens)  # [D]
    sums = [np.bincount(at.reshape(-1), tokens * column) for column in curves.T]
    means, count = np.stack(sums, axis=1) / total[:, None], len(total)  # [D, K + 1]
    if count < FEWEST:
        return Breakpoint(None, curves.shape[1] - 1, 0.0, None, None, None, None, count)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    last, kink = _ends(means, total, np.concatenate([np.ones((1, count)), draws]))
    answers = np.where(kink, last, 0)  # [1 + resamples], 0 = none
    breaks = answers[1:][answers[1:] > 0]
    low, high = np.quantile(breaks, (0.025, 0.975), method="nearest").tolist() if len(breaks) else (None, None)
    end = int(last[0])
    off_line = _excess(means, end) if end < means.shape[1] - 1 else np.zeros(count)
    excess, error = _weighted(off_line, total[None])
    confidence = float((answers[1:] == answers[0]).mean())
    return Breakpoint(int(answers[0]) or None, end, float(excess[0]), float(error[0]), confidence, low, high, count)


def _ends(curves: np.ndarray, tokens: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each of M weightings of the documents `[M, D]`: the last point on the line (K for a line to the end), and
    whether the line ends in a kink upwards.
    """
    weights, last_point = times * tokens, curves.shape[1] - 1
    ends, kinks = np.full(len(weights), last_point), np.zeros(len(weights), bool)
    rounding = float(np.abs(curves).max()) * ROUNDING
    degrees = float(tokens.sum() ** 2 / (tokens**2).sum()) - 1
    for last in range(2, last_point):
        mean, error = _weighted(_excess(curves, last), weights)
        level = LEVEL * 6 / (math.pi * (last - 1)) ** 2
        outside = np.abs(mean) > np.maximum(stats.t.isf(level / 2, degrees) * error, rounding)
        turns = np.diff(curves[:, : last + 2], n=2, axis=1)  # [D, last], at points 1..last
        turn, turn_error = _weighted(turns[:, -1] - SHARPNESS * turns[:, -1 - TURNS : -1].mean(1), weights)
        sharp = turn > np.maximum(stats.t.isf(KINK_LEVEL, degrees) * turn_error, rounding)
        ended = outside & (ends == last_point)
        ends[ended] = last
        kinks[ended] = (sharp & (mean > 0))[ended]
    return ends, kinks


def _excess(curves: np.ndarray, last: int) -> np.ndarray:
    """[D] for each curve, point last + 1 minus the least-squares line through points 0..last."""
    numbers = np.arange(last + 1) - last / 2
    slopes = curves[:, : last + 1] @ numbers / (numbers @ numbers)
    excess: np.ndarray = curves[:, last + 1] - curves[:, : last + 1].mean(1) - slopes * (last / 2 + 1)
    return excess


def _weighted(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[M] weighted means of `[D]` values, and their standard errors, taking values as independent."""
    total = weights.sum(1)
    means = weights @ values / total
    squares = (weights**2 * (values - means[:, None]) ** 2).sum(1)
    return means, np.sqrt(squares * len(values) / max(len(values) - 1, 1)) / total
