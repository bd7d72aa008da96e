"""Successive elimination: candidates are scored on more and more of the data, and dropped once significantly worse.

Two candidates are compared by their differences on the same sequences. Sequences of one document are correlated, so
they are summed: with sums of losses `a_g, b_g` over the `n_g` tokens seen of document g, out of G documents seen,

    r = sum(a_g - b_g) / sum(n_g),    se = sqrt(G / (G - 1) sum((a_g - b_g - r n_g)^2)) / sum(n_g)

is the ratio estimator of the difference of their mean losses, with its error as an estimate for any such data, robust
to correlation within documents (Cochran 1977, sections 6.4 and 9A; Liang and Zeger 1986). As an estimate for all N
held-out sequences, of which a share u was not seen, the error is multiplied by `sqrt(u)`, which is 0 once all were
seen: chunks are random parts of the sequences. This error is conservative if sequences of one document are
correlated, because single sequences are drawn.

A standard error is too small while no rare sequence of large loss was seen. So a candidate is dropped only where `r`
also exceeds a reserve for what such sequences may still add to the loss of the best:

    reserve = h (1 / D + q u) / n,    q = 0.02,    h = max(1.2 log(1 / (1 - confidence)), largest departure seen)

with n tokens in a sequence on average and D documents in all (of unequal size: `1 / D` is the sum of their squared
shares of the tokens): one document, and a share q of what was not seen, that cost the best candidate h nats a sequence
more. h is 3.6 at 0.95, or what a document departs from the mean difference of two candidates still compared, whichever
is more. The term of q ends where such a share would have been seen, `(1 - q)^G <= 1 - confidence`: from 149 documents
on. The form is a choice, and the promise is what simulations of it show (`tests/skip/test_race.py`): a round
keeps its best candidate where up to 2 % of the sequences add an exponential with a mean of 3 nats to their summed loss.
Rare sequences that add far more, of which the search has seen none, can still change a round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from fulldepth.core.uncertainty import FEWEST_DOCUMENTS, Difference, mean_difference
from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import BASE, LOSS, SCALED
from fulldepth.skip.goal import REACHED, Goal
from fulldepth.skip.loss_cache import LossCache
from fulldepth.skip.plan import name_of

BUDGET = "budget"
RARE = 0.02
"""q, the largest share of rare sequences that is allowed for."""
EXCHANGES = 8
"""Exchanges that are scored in one pass."""
HEAVY = 1.2
"""Least nats by which a rare sequence may be worse, divided by log(1 / risk)."""


@dataclass(frozen=True)
class Contest:
    """The candidates of a round."""

    before: Variant
    """The blocks removed before the round."""
    gains: Mapping[Variant, float]
    """Candidate -> its gain."""

    @property
    def gains_differ(self) -> bool:
        """True if gains differ; candidates are then compared by the loss added since `before`, per gain."""
        return len(set(self.gains.values())) > 1


@dataclass(frozen=True)
class Round:
    """How one block was chosen."""

    pick: int | str
    """1-based layer."""
    decided_by: str
    """`bounds`: all others were significantly worse; `data`: the best of those compared on all data; `budget`: the best
    when the time of the round was spent."""
    sure: bool
    """Whether the pick has the lowest mean loss over all data of this kind, not only the held-out ones, at the
    confidence of the search; False if the budget decided, or for fewer than `FEWEST_DOCUMENTS` documents."""
    closest: int | str | None
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


def difference(loss_cache: LossCache, contest: Contest, worse: Variant, better: Variant) -> Difference:
    """Loss of `worse` minus that of `better` on the chunks on which both are known, at the gain of `better`."""
    shared = set(loss_cache.known_chunks(better))
    chunks = [chunk for chunk in loss_cache.known_chunks(worse) if chunk in shared]
    scale = contest.gains[better] / contest.gains[worse]
    gap = scale * loss_cache.rows(worse, chunks) - loss_cache.rows(better, chunks)
    if scale != 1:
        gap += (1 - scale) * loss_cache.rows(contest.before, chunks)
    return mean_difference(gap, loss_cache.counts(chunks), loss_cache.owners(chunks), loss_cache.sequences)


def is_worse(gap: Difference, risk: float, least: float, *, any_data: bool = False) -> bool:
    """Return True if a candidate is worse with an error probability of at most `risk`, by Student's t.

    Args:
        gap: the difference to the better candidate.
        risk: the error probability.
        least: nats per token that the difference must exceed besides its error.
        any_data: test for any data of this kind, not only for all held-out sequences.
    """
    if gap.documents < FEWEST_DOCUMENTS:
        return False
    error = gap.standard_error if any_data else gap.error
    return gap.mean > least + error * gap.quantile(1 - risk)


def reserve(loss_cache: LossCache, gaps: Collection[Difference], confidence: float, *, any_data: bool = False) -> float:
    """Nats per token to allow for rare sequences that were not seen, see the module's docstring.

    Args:
        loss_cache: knows the tokens and documents of all held-out sequences.
        gaps: differences of the candidates compared, on the same sequences.
        confidence: of the search.
        any_data: for the mean over any data of this kind: u = 1, and no single document counts.
    """
    chunks = range(len(loss_cache.chunks))
    first = next(iter(gaps))
    risk = 1 - confidence
    tokens = np.bincount(np.unique(loss_cache.owners(chunks), return_inverse=True)[1], loss_cache.counts(chunks))
    total = float(tokens.sum())
    population = loss_cache.sequences
    largest = max(gap.largest for gap in gaps) * len(tokens)
    alone = 0.0 if any_data else float(tokens @ tokens) / total**2
    unseen = 1.0 if any_data else 1 - first.sequences / population
    rare = RARE * unseen if (1 - RARE) ** first.documents > risk else 0.0
    return max(HEAVY * math.log(1 / risk) * population, largest) / total * (alone + rare)


def best(loss_cache: LossCache, contest: Contest, variants: Sequence[Variant], chunks: Sequence[int]) -> Variant:
    """The variant of the lowest added loss per gain on some chunks; ties go to the one whose blocks come first."""
    start = loss_cache.total(contest.before, chunks) if contest.gains_differ else 0.0
    added = {variant: loss_cache.total(variant, chunks) - start for variant in variants}
    return min(variants, key=lambda variant: (added[variant] / contest.gains[variant], sorted(variant)))


def judge(
    loss_cache: LossCache, contest: Contest, winner: Variant, decided_by: str, confidence: float, scored: int
) -> Round:
    """The record of a round, in which the winner was scored on `scored` sequences."""
    pick = _name(loss_cache, winner - contest.before)
    population = loss_cache.sequences
    losers = [variant for variant in contest.gains if variant != winner]
    if not losers:
        return Round(pick, decided_by, True, None, None, None, population, scored, population)
    gaps = {variant: difference(loss_cache, contest, variant, winner) for variant in losers}
    near = min(gaps, key=lambda variant: (gaps[variant].in_errors, sorted(variant)))
    gap = gaps[near]
    sure = decided_by != BUDGET and all(
        is_worse(
            gap,
            (1 - confidence) / len(gaps),
            reserve(loss_cache, [gap], confidence, any_data=True),
            any_data=True,
        )
        for gap in gaps.values()
    )
    error = gap.standard_error if math.isfinite(gap.standard_error) else None
    closest = _name(loss_cache, near - contest.before)
    return Round(pick, decided_by, sure, closest, gap.mean, error, gap.sequences, scored, population)


def _name(loss_cache: LossCache, blocks: Variant) -> int | str:
    return name_of(blocks, loss_cache.costs.granularity)


def race(
    loss_cache: LossCache, contest: Contest, *, also: Collection[Variant], drop: bool, confidence: float, end: float
) -> tuple[Variant, str, int]:
    """Score all candidates on the first chunk, the remaining ones on the next, and so on.

    A candidate is dropped when it is worse than the best so far, by more than the reserve, at an error probability of
    `(1 - confidence) / (candidates x tests)`, where `tests` counts the chunks after which one can be dropped: at least
    `FEWEST_DOCUMENTS` documents were read, and not all data.

    Args:
        loss_cache: computes losses of its criterion.
        contest: the candidates.
        also: other variants that are needed on the same chunks.
        drop: False = score all on all data.
        confidence: probability that the best candidate is kept.
        end: seconds of the search at which the race ends with the best candidate so far.

    Returns:
        The winner; `data` (all were read), `bounds` (only the winner was left) or `budget`; and how many chunks it was
        scored on.
    """
    alive = list(contest.gains)
    chunks = range(len(loss_cache.chunks))
    also = [*also, *([contest.before] if contest.gains_differ else [])]
    risk = (1 - confidence) / len(alive) / max(1, num_tests(loss_cache.documents))
    for chunk in chunks[:-1]:
        loss_cache.need([*also, *alive], chunk)
        if not drop:
            continue
        leader = best(loss_cache, contest, alive, range(chunk + 1))
        gaps = {v: difference(loss_cache, contest, v, leader) for v in alive if v != leader}
        least = reserve(loss_cache, gaps.values(), confidence) if gaps else 0.0
        alive = [v for v in alive if v == leader or not is_worse(gaps[v], risk, least)]
        if len(alive) == 1:
            return leader, "bounds" if len(contest.gains) > 1 else "data", chunk + 1
        if loss_cache.spent["seconds"] >= end:
            return leader, BUDGET, chunk + 1
    loss_cache.need([*also, *alive], chunks[-1])
    return best(loss_cache, contest, alive, chunks), "data", len(chunks)


def eliminate(
    loss_cache: LossCache,
    goal: Goal,
    *,
    drop: bool = True,
    confidence: float = 0.95,
    seconds: float = math.inf,
    pool: int | None = None,
) -> tuple[list[Variant], list[Round]]:
    """Remove blocks one by one until the goal, each time the one that costs least per gain, given those before.

    Args:
        loss_cache: computes losses of its criterion.
        goal: when to end, and the gain of every block.
        drop: drop candidates early; False = score all on all data (the search `exact`).
        confidence: probability that a round keeps its best candidate, the one of the lowest added loss per gain on all
            held-out data, for the losses that the module's docstring names.
        seconds: of all rounds. A round that has spent its share of them, by the number of candidates, ends with the
            best candidate so far, and a message to the watcher.
        pool: candidates of a round after the first, those that added least per gain when last scored; None = all.

    Returns:
        The blocks of each removal, in order, and how each was chosen.
    """
    picks: list[Variant] = []
    rounds: list[Round] = []
    removed = BASE
    while goal.left(removed) and (gains := goal.round_of(loss_cache.costs, removed)):
        if picks and pool is not None:
            added = _last_added(loss_cache, picks)
            rate = {
                variant: added[variant - removed] / gain
                for variant, gain in gains.items()
                if variant - removed in added
            }
            gains = {variant: gains[variant] for variant in sorted(rate, key=lambda v: (rate[v], sorted(v)))[:pool]}
        contest = Contest(removed, gains)
        title = f"Round {len(picks) + 1}, {goal.progress(removed)}"
        loss_cache.begin(title, len(gains) * loss_cache.num_batches)
        to_come = min(goal.left(removed) / max(gains.values()), len(gains))
        left = [len(gains) - later for later in range(math.ceil(to_come))]
        spent = loss_cache.spent["seconds"]
        end = spent + (seconds - spent) * min(1.0, 2 * left[0] / sum(left))  # most rounds need less than their share
        # The plan needs the losses of the chain, which shares most of the work with the candidates.
        also = [] if loss_cache.criterion == SCALED else chain(picks)
        winner, decided_by, count = race(loss_cache, contest, also=also, drop=drop, confidence=confidence, end=end)
        loss_cache.finish()
        if _adds_too_much(loss_cache, goal, winner):
            break
        scored = sum(map(len, loss_cache.tokens[:count]))
        rounds.append(judge(loss_cache, contest, winner, decided_by, confidence, scored))
        if stopped := rounds[-1].stopped:
            loss_cache.watcher.say(f"{title}: {stopped}.")
        picks.append(winner - removed)
        removed = winner
    return picks, rounds


def exchange(
    loss_cache: LossCache, goal: Goal, picks: Sequence[Variant], *, confidence: float, flops: float
) -> tuple[list[Variant], list[dict[str, Any]]]:
    """Put one removal back and remove another block in its place, as long as that lowers the criterion.

    A pass estimates the loss of every exchange whose gain still suffices: that without the removal (measured), plus
    what the other block added when it was last scored. The `EXCHANGES` of the lowest estimates race against the
    present blocks, on the losses themselves. A pass starts only if its FLOPs are left.

    Args:
        loss_cache: after `eliminate`.
        goal: of the search.
        picks: the blocks of each removal.
        confidence: of each race.
        flops: most FLOPs of all passes.

    Returns:
        The removals, and for each exchange `back`, `out` and the `loss` after it, in nats.
    """
    added = _last_added(loss_cache, picks)
    picks = list(picks)
    done = list[dict[str, Any]]()
    shapes = [b.shape for chunk in loss_cache.chunks for b in chunk]

    def price(variants: Collection[Variant]) -> float:
        return sum(loss_cache.costs.shared(variants, shape) for shape in shapes)

    end = loss_cache.spent["flops"] + flops
    everywhere = range(len(loss_cache.chunks))
    while picks:
        removed = chain(picks)[-1]
        back = {pick: removed - pick for pick in picks}
        if loss_cache.spent["flops"] + price([removed, *back.values()]) > end:
            break
        loss_cache.need_everywhere(f"Exchanges, pass {len(done) + 1}", [removed, *back.values()])
        least = min(goal.gain(removed), goal.needed)
        estimates: dict[Variant, float] = {}
        pairs: dict[Variant, tuple[Variant, Variant]] = {}
        for pick, variant in back.items():
            for other in goal.round_of(loss_cache.costs, variant):
                more = other - variant
                if more in added and not more & pick and goal.gain(other) >= least - REACHED:
                    estimates[other] = loss_cache.mean(variant) + added[more]
                    pairs[other] = pick, more
        likely = sorted(estimates, key=lambda variant: (estimates[variant], sorted(variant)))[:EXCHANGES]
        while likely and loss_cache.spent["flops"] + price(likely) > end:
            likely.pop()
        if not likely:
            break
        contest = Contest(removed, dict.fromkeys([removed, *likely], 1.0))
        loss_cache.begin(f"Exchanges, pass {len(done) + 1}", len(likely) * loss_cache.num_batches)
        winner, _, _ = race(loss_cache, contest, also=(), drop=True, confidence=confidence, end=math.inf)
        loss_cache.finish()
        if winner == removed or loss_cache.total(winner, everywhere) >= loss_cache.total(removed, everywhere):
            break
        if _adds_too_much(loss_cache, goal, winner):  # the criterion may fall while the loss grows
            break
        pick, more = pairs[winner]
        picks[picks.index(pick)] = more
        names = {"back": _name(loss_cache, pick), "out": _name(loss_cache, more)}
        done.append({**names, "loss": loss_cache.mean(winner, LOSS)})
    return picks, done


def _adds_too_much(loss_cache: LossCache, goal: Goal, variant: Variant) -> bool:
    """Return True if a variant adds more to the loss than the goal allows; its loss is computed where it is needed."""
    if math.isinf(goal.most_loss):
        return False
    loss_cache.need_everywhere("Loss so far", [BASE, variant], loss_cache.unhealed)
    return loss_cache.mean(variant, LOSS) - loss_cache.mean(BASE, LOSS) > goal.most_loss


def _last_added(loss_cache: LossCache, picks: Sequence[Variant]) -> dict[Variant, float]:
    """Blocks of one removal -> the nats per token that they added in the last round that scored them."""
    added = {}
    for before in chain(picks)[:-1]:
        for variant in loss_cache.costs.candidates(before):
            if chunks := loss_cache.known_chunks(variant):
                change = loss_cache.total(variant, chunks) - loss_cache.total(before, chunks)
                added[variant - before] = change / float(loss_cache.counts(chunks).sum())
    return added


def chain(picks: Sequence[Variant]) -> list[Variant]:
    """The unmodified model and the model after each removal: the variants whose losses a plan holds."""
    return list(accumulate(picks, Variant.union, initial=BASE))


def num_tests(documents: Sequence[Sequence[int]]) -> int:
    """Number of chunks, the last one left out, after which at least `FEWEST_DOCUMENTS` documents were read."""
    seen: set[int] = set()
    counts = [len(seen := seen.union(chunk)) for chunk in documents[:-1]]
    return sum(count >= FEWEST_DOCUMENTS for count in counts)
