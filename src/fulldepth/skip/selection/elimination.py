"""Successive elimination: candidates are scored on more and more of the data, and dropped once significantly worse.

Two candidates are compared by their differences on the same sequences. Sequences of one document are correlated, so
they are summed: with sums of losses `a_g, b_g` over the `n_g` tokens seen of document g, out of G documents seen,

    r = sum(a_g - b_g) / sum(n_g),    se = sqrt(G / (G - 1) sum((a_g - b_g - r n_g)^2)) / sum(n_g)

is the ratio estimator of the difference of their mean losses, with its error as an estimate for any such data, robust
to correlation within documents (Cochran 1977, sections 6.4 and 9A; Liang and Zeger 1986). As an estimate for all N
held-out sequences, of which m were seen, the error is multiplied by `sqrt(1 - m / N)`, which is 0 once all were seen:
chunks are random parts of the sequences. This error is conservative if sequences of one document are correlated,
because single sequences are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from fulldepth.execution.flops import Costs, Variant
from fulldepth.execution.scoring import BASE, DIVERGENCE, SCALED
from fulldepth.skip.selection.loss_cache import Chunk, LossCache, Refit

BUDGET = "budget"
LEAST = 8
"""Fewest documents before a candidate may be dropped; all documents if there are fewer."""


class Difference(NamedTuple):
    """Difference of the mean losses of two candidates."""

    mean: float
    """In nats per token."""
    error: float
    """Standard error as an estimate for all held-out data; 0 once all were seen."""
    free_error: float
    """Standard error as an estimate for any such data."""
    sequences: int
    documents: int
    """Number of documents of these sequences."""


@dataclass(frozen=True)
class Round:
    """How one block was chosen."""

    pick: int
    """1-based layer."""
    decided_by: str
    """`bounds`: all others were significantly worse; `data`: the best of those compared on all data; `budget`: the best
    when the budget of the round was spent."""
    sure: bool
    """Whether other data of the same kind would lead to the same pick, at the confidence of the search; False if the
    budget decided."""
    closest: int | None
    """The second-best candidate, in standard errors; None if there was no other."""
    margin: float | None
    """Loss of `closest` minus that of the pick, in nats per token, on the sequences on which both were scored."""
    standard_error: float | None
    """Of the margin, as an estimate for any such data."""
    sequences: int
    """Number of these sequences."""
    scored: int
    """Number of held-out sequences on which the pick was scored when the round ended."""
    heldout: int
    """Number of held-out sequences."""

    @property
    def stopped(self) -> str | None:
        """`stopped by budget after 48 of 160 sequences`, or None if the budget did not decide."""
        if self.decided_by != BUDGET:
            return None
        return f"stopped by budget after {self.scored} of {self.heldout} sequences"


def difference(loss_cache: LossCache, worse: Variant, better: Variant) -> Difference:
    """Loss of `worse` minus that of `better` on the chunks on which both are known."""
    shared = set(loss_cache.known_chunks(better))
    chunks = [chunk for chunk in loss_cache.known_chunks(worse) if chunk in shared]
    gap = loss_cache.rows(worse, chunks) - loss_cache.rows(better, chunks)
    return compare(gap, loss_cache.counts(chunks), loss_cache.owners(chunks), loss_cache.sequences)


def compare(gap: np.ndarray, tokens: np.ndarray, documents: np.ndarray, population: int) -> Difference:
    """The ratio estimator of this module's docstring.

    Args:
        gap: `[m]` differences of the summed losses of each sequence, in nats.
        tokens: `[m]` tokens that count.
        documents: `[m]` integer label of each sequence's document.
        population: N, the number of held-out sequences.
    """
    count, total = len(gap), float(tokens.sum())
    rate = float(gap.sum()) / total if total else 0.0
    _, at = np.unique(documents, return_inverse=True)
    residuals = np.bincount(at, weights=gap - rate * tokens)
    groups = len(residuals)
    if groups < 2 or not total:
        return Difference(rate, math.inf if count < population else 0.0, math.inf, count, groups)
    spread = float(np.sqrt(groups / (groups - 1) * (residuals**2).sum())) / total
    return Difference(rate, spread * math.sqrt(max(0.0, 1 - count / population)), spread, count, groups)


def is_worse(gap: Difference, risk: float, population: int, *, any_data: bool = False) -> bool:
    """Whether a candidate is worse with an error probability of at most `risk`, by Student's t of G - 1 degrees.

    Args:
        gap: the difference to the better candidate.
        risk: the error probability.
        population: number of held-out sequences.
        any_data: test for any data of this kind, not only for all held-out sequences.
    """
    if not any_data and gap.sequences == population:
        return gap.mean > 0
    if gap.documents < 2 or (gap.documents < LEAST and gap.sequences < population):
        return False
    error = gap.free_error if any_data else gap.error
    return gap.mean > error * float(stats.t.isf(risk, gap.documents - 1))


def best(loss_cache: LossCache, variants: Sequence[Variant], chunks: Sequence[int]) -> Variant:
    """The variant of the lowest loss on some chunks; ties go to the one whose layers come first."""
    return min(variants, key=lambda variant: (loss_cache.total(variant, chunks), sorted(variant)))


def judge(
    loss_cache: LossCache,
    picks: Sequence[int],
    winner: Variant,
    decided_by: str,
    confidence: float,
    chunks: int | None = None,
) -> Round:
    """The record of the round after some picks, decided after `chunks` chunks (None = all)."""
    (pick,) = winner.difference(picks)
    scored, population = sum(map(len, loss_cache.tokens[:chunks])), loss_cache.sequences
    losers = [variant for variant in loss_cache.candidates(picks) if variant != winner]
    gaps = {variant: difference(loss_cache, variant, winner) for variant in losers}
    if not gaps:
        return Round(pick, decided_by, True, None, None, None, population, scored, population)
    risk = (1 - confidence) / len(gaps)
    near = min(gaps, key=lambda v: (_errors(gaps[v]), sorted(v)))
    (closest,), gap = near - winner, gaps[near]
    sure = decided_by != BUDGET and all(is_worse(each, risk, population, any_data=True) for each in gaps.values())
    error = gap.free_error if math.isfinite(gap.free_error) else None
    return Round(pick, decided_by, sure, closest, gap.mean, error, gap.sequences, scored, population)


def _errors(gap: Difference) -> float:
    """A difference in standard errors."""
    return gap.mean / gap.free_error if gap.free_error else math.copysign(math.inf, gap.mean)


def eliminate(
    loss_cache: LossCache, blocks: int, *, confidence: float = 0.95, budget: float | None = None
) -> tuple[list[int], list[Round]]:
    """Remove blocks one by one, each time the one that costs least given those removed before.

    A round scores all candidates on the first chunk, the remaining ones on the next, and so on. A candidate is dropped
    when it is worse than the best so far at an error probability of `(1 - confidence) / (candidates x tests)`, where
    `tests` counts the chunks after which one can be dropped: at least `LEAST` documents were read, and not all data.

    Args:
        loss_cache: computes losses of its criterion.
        blocks: k.
        confidence: probability that a round keeps its best candidate.
        budget: FLOPs of the whole search, including the losses of the plan on all data; None = no bound. A round that
            has spent its share ends with the best candidate so far, and a message to the watcher.

    Returns:
        Layers in the order of removal, and how each was chosen.
    """
    picks: list[int] = []
    rounds: list[Round] = []
    for number in range(blocks):
        loss_cache.begin(f"Block {number + 1} of {blocks}", len(loss_cache.candidates(picks)) * loss_cache.num_batches)
        later = blocks - number - 1
        limit = math.inf if budget is None else _limit(loss_cache, picks, later, budget)
        winner, decided_by, chunks = _round(loss_cache, picks, confidence, later, limit)
        loss_cache.finish()
        rounds.append(judge(loss_cache, picks, winner, decided_by, confidence, chunks))
        if rounds[-1].stopped:
            loss_cache.watcher.say(f"Block {number + 1} of {blocks}: {rounds[-1].stopped}.")
        picks.append(rounds[-1].pick)
    return picks, rounds


def chain(picks: Sequence[int]) -> list[Variant]:
    """The unmodified model and the model after each removal: the variants whose losses a plan holds."""
    return [Variant(picks[:number]) for number in range(len(picks) + 1)]


def along(loss_cache: LossCache, picks: Sequence[int]) -> list[Variant]:
    """Variants run together with the round after some picks: the plan needs them, and they share most of the work."""
    return [] if loss_cache.criterion == SCALED else chain(picks)


def _round(
    loss_cache: LossCache, picks: Sequence[int], confidence: float, later: int, limit: float
) -> tuple[Variant, str, int]:
    """The winner of the round after some picks, `Round.decided_by`, and the number of chunks scored."""
    variants, removed = loss_cache.candidates(picks), along(loss_cache, picks)
    chunks = range(len(loss_cache.chunks))
    risk = (1 - confidence) / len(variants) / max(1, _tests(loss_cache.documents))
    alive, leader = variants, variants[0]
    for chunk in chunks:
        if chunk and limit < math.inf:
            price = loss_cache.price([*removed, *alive], chunk)
            if price + _committed(loss_cache, [*chain(picks), leader], chunk + 1, later) > limit:
                return leader, BUDGET, chunk
        loss_cache.need([*removed, *alive], chunk)
        leader = best(loss_cache, alive, range(chunk + 1))
        if chunk < len(chunks) - 1:
            gaps = {variant: difference(loss_cache, variant, leader) for variant in alive if variant != leader}
            alive = [v for v in alive if v == leader or not is_worse(gaps[v], risk, loss_cache.sequences)]
        if len(alive) == 1:
            break
    early = len(alive) == 1 and len(variants) > 1 and chunk < len(chunks) - 1
    return leader, "bounds" if early else "data", chunk + 1


def _tests(documents: Sequence[Sequence[int]]) -> int:
    """Number of chunks, the last one left out, after which at least `LEAST` documents were read."""
    seen: set[int] = set()
    counts = [len(seen := seen.union(chunk)) for chunk in documents[:-1]]
    return sum(count >= LEAST for count in counts)


def _limit(loss_cache: LossCache, picks: Sequence[int], later: int, budget: float) -> float:
    """Bound of `_committed` at the end of this round: its share of the free budget, by the number of candidates."""
    needed = _committed(loss_cache, chain(picks), 0, later + 1)
    counts = [len(loss_cache.costs.able) - len(picks) - number for number in range(later + 1)]
    share = min(1.0, 2 * counts[0] / sum(counts))  # most rounds need less than their share
    return needed + max(0.0, budget - needed) * share


def _committed(loss_cache: LossCache, variants: Sequence[Variant], since: int, later: int) -> float:
    """FLOPs spent, plus the least still needed: losses of variants from chunk `since` on, and `later` more rounds."""
    chunks, kind = range(since, len(loss_cache.chunks)), loss_cache.unhealed
    losses = sum(loss_cache.price(variants, chunk, kind) for chunk in chunks)
    each = round_flops(loss_cache.costs, loss_cache.chunks, loss_cache.criterion, loss_cache.refit)
    return loss_cache.spent["flops"] + losses + later * each


def round_flops(costs: Costs, chunks: Sequence[Chunk], criterion: str, refit: Refit | None = None) -> float:
    """Lower bound of a round's FLOPs: its candidates on the first chunk, and the loss of its winner on all data."""
    first = sum(costs.shared([BASE, *costs.candidates(())], batch.shape) for batch in chunks[0])
    fits = refit.flops * len(costs.able) if refit else 0.0
    return first + fits + whole_flops(costs, chunks) * (2 if criterion == DIVERGENCE else 1)


def whole_flops(costs: Costs, chunks: Sequence[Chunk]) -> float:
    """FLOPs of a pass of the unmodified model over all data."""
    return sum(costs.whole(BASE, batch.shape) for chunk in chunks for batch in chunk)
