"""`find_breakpoint`: the number of removed blocks at which the loss stops growing linearly, with its confidence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

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

Shape = Literal["line", "kink", "gradual", "concave", "tolerance", "unknown"]


@dataclass(frozen=True)
class Breakpoint:
    """The straight first part of a curve, and how it ends."""

    blocks: int | None
    """The last number of removed blocks before the kink; None where there is none."""
    shape: Shape
    """line: straight to the end; kink; gradual: leaves the line upwards without a kink (or too noisily for one);
    concave: leaves it downwards; tolerance: leaves it by more than the tolerance; unknown: fewer than `FEWEST`
    documents, and no tolerance."""
    straight_until: int
    """The last number of removed blocks on the line; of `unknown`, all."""
    excess: float
    """Nats by which the next point lies above the line; 0 for a line to the end."""
    excess_error: float | None
    """Standard error of `excess` over documents; None for fewer than `FEWEST`."""
    confidence: float | None
    """Share of resamples with the same `blocks`; None for fewer than `FEWEST` documents."""
    low: int | None
    high: int | None
    """Upper end of the 95 % interval of the break points of resamples that have one; `low` is the lower end."""
    slope_before: float
    slope_after: float
    """Nats per block after the break point; `slope_before` is that up to it. Equal if there is none."""
    shares: dict[str, float]
    """Result (`none` or a number of blocks) -> share of resamples."""
    sequences: int
    documents: int
    resamples: int
    tolerance: float | None

    def document(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class _Ends(NamedTuple):
    """End of the first line, for each of M weightings of the documents."""

    last: np.ndarray
    """[M] the last point on the line, K for a line to the end."""
    sign: np.ndarray
    """[M] 1: the next point lies above; -1: below; 0: there is none."""
    kink: np.ndarray
    """[M] bool."""


def find_breakpoint(
    losses: Any,
    weights: Any,
    documents: Any = None,
    *,
    tolerance: float | None = None,
    resamples: int = 1000,
    seed: int = 0,
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

    With a tolerance, the break point is the first k >= 1 at which :math:`e_k` exceeds it, with or without a kink.

    The confidence is estimated by bootstrap over documents. Fewer than 5 documents give no band and no confidence.

    Args:
        losses: [N, K + 1] mean loss of each held-out sequence with 0..K removed blocks.
        weights: [N] tokens that count in each.
        documents: [N] label of the document of each; None = each its own.
        tolerance: accepted nats above the line, in place of the band.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        FulldepthError: for shapes that do not match, losses that are not finite, weights that are not positive, or a
            tolerance below 0.

    Source: Hopscotch (arXiv 2506.03303), break point; Efron 1979 (bootstrap). The test is our own: the paper reads the
    break point off the curve.
    """
    curves, tokens = np.asarray(losses, np.float64), np.asarray(weights, np.float64)
    _check(curves, tokens, tolerance)
    documents = np.arange(len(curves)) if documents is None else np.asarray(documents)
    means, totals = _by_document(curves, tokens, documents)
    ends = _all_ends(means, totals, tolerance, resamples, seed)
    return _described(means, totals, ends, sequences=len(curves), resamples=resamples, tolerance=tolerance)


def _described(curves: np.ndarray, tokens: np.ndarray, ends: _Ends, **counts: Any) -> Breakpoint:
    """The end for the documents as they are, and how often resamples have the same."""
    enough = len(curves) >= FEWEST
    answers = np.where(ends.kink, ends.last, 0)
    point, last, numbers = int(answers[0]), int(ends.last[0]), answers[1:][answers[1:] > 0]
    before, after = _slopes(np.average(curves, axis=0, weights=tokens), point)
    off_line = _excess(curves, last) if last < curves.shape[1] - 1 else np.zeros(len(curves))
    excess, error = _weighted(off_line, tokens[None])
    shares = {str(b or "none"): float((answers[1:] == b).mean()) for b in sorted(set(answers[1:].tolist()))}
    return Breakpoint(
        blocks=point or None,
        shape="unknown" if counts["tolerance"] is None and not enough else _shape(ends, counts["tolerance"]),
        straight_until=last,
        excess=float(excess[0]),
        excess_error=float(error[0]) if enough else None,
        confidence=shares.get(str(point or "none"), 0.0) if enough else None,
        low=_quantile(numbers, 0.025) if enough else None,
        high=_quantile(numbers, 0.975) if enough else None,
        slope_before=before,
        slope_after=after,
        shares=shares if enough else {},
        documents=len(curves),
        **counts,
    )


def _by_document(curves: np.ndarray, tokens: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[D, K + 1] mean losses and [D] tokens of the documents."""
    at = np.unique(documents, return_inverse=True)[1].reshape(-1)
    total = np.bincount(at, tokens)
    return np.stack([np.bincount(at, tokens * column) for column in curves.T], axis=1) / total[:, None], total


def _check(curves: np.ndarray, tokens: np.ndarray, tolerance: float | None) -> None:
    if curves.ndim != 2 or tokens.shape != curves.shape[:1] or curves.shape[1] < 2 or not len(curves):
        raise FulldepthError(f"Losses of shape {curves.shape} and weights of shape {tokens.shape}; expected N x K, N.")
    if not np.isfinite(curves).all() or not (tokens > 0).all():
        raise FulldepthError("Losses must be finite, and every sequence must have tokens that count.")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise FulldepthError(f"The tolerance is {tolerance}; expected a finite number of nats, at least 0.")


def _all_ends(curves: np.ndarray, tokens: np.ndarray, tolerance: float | None, resamples: int, seed: int) -> _Ends:
    """Ends for the documents as they are (first), and for every resample."""
    count, last_point = len(curves), curves.shape[1] - 1
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    weights = np.concatenate([np.ones((1, count)), draws]) * tokens  # [M, D]
    ends = _Ends(np.full(len(weights), last_point), np.zeros(len(weights), int), np.zeros(len(weights), bool))
    if tolerance is None and count < FEWEST:
        return ends
    rounding = float(np.abs(curves).max()) * ROUNDING
    degrees = float(tokens.sum() ** 2 / (tokens**2).sum()) - 1
    for last in range(2 if tolerance is None else 1, last_point):
        mean, error = _weighted(_excess(curves, last), weights)
        if tolerance is not None:
            outside, sharp = mean > tolerance + rounding, True
        else:
            level = LEVEL * 6 / (math.pi * (last - 1)) ** 2
            outside = np.abs(mean) > np.maximum(stats.t.isf(level / 2, degrees) * error, rounding)
            turn, turn_error = _weighted(_sharpness(curves, last), weights)
            sharp = turn > np.maximum(stats.t.isf(KINK_LEVEL, degrees) * turn_error, rounding)
        ended = outside & (ends.sign == 0)
        ends.last[ended], ends.sign[ended] = last, np.sign(mean[ended])
        ends.kink[ended] = (sharp & (mean > 0))[ended]
    return ends


def _excess(curves: np.ndarray, last: int) -> np.ndarray:
    """[D] for each curve, point last + 1 minus the least-squares line through points 0..last."""
    numbers = np.arange(last + 1) - last / 2
    slopes = curves[:, : last + 1] @ numbers / (numbers @ numbers)
    excess: np.ndarray = curves[:, last + 1] - curves[:, : last + 1].mean(1) - slopes * (last / 2 + 1)
    return excess


def _sharpness(curves: np.ndarray, last: int) -> np.ndarray:
    """[D] for each curve, its turn at point `last` minus `SHARPNESS` times the mean of the turns before it."""
    turns = np.diff(curves[:, : last + 2], n=2, axis=1)  # [N, last], at points 1..last
    sharpness: np.ndarray = turns[:, -1] - SHARPNESS * turns[:, -1 - TURNS : -1].mean(1)
    return sharpness


def _weighted(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[M] weighted means of `[D]` values, and their standard errors, taking values as independent."""
    total = weights.sum(1)
    means = weights @ values / total
    squares = (weights**2 * (values - means[:, None]) ** 2).sum(1)
    return means, np.sqrt(squares * len(values) / max(len(values) - 1, 1)) / total


def _shape(ends: _Ends, tolerance: float | None) -> Shape:
    if not ends.sign[0]:
        return "line"
    if tolerance is not None:
        return "tolerance"
    if ends.kink[0]:
        return "kink"
    return "gradual" if ends.sign[0] > 0 else "concave"


def _quantile(numbers: np.ndarray, share: float) -> int | None:
    """One of the numbers; None if there are none."""
    return int(np.quantile(numbers, share, method="nearest")) if len(numbers) else None


def _slopes(curve: np.ndarray, point: int) -> tuple[float, float]:
    """Least-squares slopes of a mean curve `[K + 1]` before and after a break point; 0 = none, equal slopes."""
    n = np.arange(len(curve), dtype=np.float64)
    if not point:
        slope = float(np.polyfit(n, curve, 1)[0])
        return slope, slope
    parts = (slice(point + 1), slice(point, None))
    before, after = (float(np.polyfit(n[part], curve[part], 1)[0]) for part in parts)
    return before, after
