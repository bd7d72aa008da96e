"""The picks of the plain loop, at less than its cost.

The plain loop runs the model once for every candidate of every round. Here the rounds are run together: which blocks
will go is guessed from what was scored so far, and on each chunk of the data the candidates of all rounds under that
guess are run in one pass, in which whatever they share from the first block on is computed once (also across rounds: a
candidate below the blocks that went before differs from its sibling only above them). Nothing is decided by a guess. A
round is settled when every candidate of the true blocks before it was scored on all data, or has lost already on a part
of them: losses are no less than 0, so a sum that exceeds the total of a rival that was finished only grows. Where the
guess was wrong, what is missing is made up for in another pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from scipy import stats

from fulldepth.skip.elimination import Round, best, difference, judge
from fulldepth.skip.flops import Variant
from fulldepth.skip.ledger import Ledger
from fulldepth.skip.score import BASE

SCOUTED = 8
"""One chunk in so many is scored round by round before the first guess."""
RISK = 0.3
"""Probability of a wrong guess up to which it is built upon: about what sharing saves of a round's cost."""
ROUNDING = 1e-9
"""By how much, relative, a sum must exceed a rival's: sums in another order differ by less."""


def exact(ledger: Ledger, kind: str, blocks: int, *, confidence: float = 0.95) -> tuple[list[int], list[Round]]:
    """Remove blocks one by one, each time the one that costs least on all data with those before it removed.

    Args:
        ledger: what scores.
        kind: the loss that decides; sums of it must not decrease with more data.
        blocks: k.
        confidence: for what is said about other data.

    Returns:
        Layers in the order of removal, and how each was chosen.
    """
    picks: list[int] = []
    rounds: list[Round] = []
    while len(picks) < blocks:
        _together(ledger, kind, picks, blocks)
        while len(picks) < blocks and _settled(ledger, kind, picks):
            variants = ledger.round_of(picks)
            winner = best(ledger, kind, _finished(ledger, kind, variants), range(len(ledger.chunks)))
            rounds.append(judge(ledger, kind, variants, winner, "data", confidence))
            picks.append(rounds[-1].pick)
    return picks, rounds


def _together(ledger: Ledger, kind: str, picks: Sequence[int], blocks: int) -> None:
    """One pass over the data for all rounds that are not settled; the first of them is settled by it."""
    chunks = range(len(ledger.chunks))
    left = [len(ledger.round_of(picks)) - number for number in range(blocks - len(picks))]
    ledger.begin(f"Blocks {len(picks) + 1} to {blocks}", sum(left) * ledger.num_batches)
    starts = _likely(ledger, kind, picks, blocks, range(-(-len(chunks) // SCOUTED)))
    finish_first = _finishing_pays(ledger, kind, starts)
    for chunk in chunks if finish_first else ():
        ledger.need(kind, [BASE, *_winners(starts)], chunk)
    for chunk in chunks:
        starts = _likely(ledger, kind, picks, blocks, range(1))
        variants = [variant for start in starts for variant in _alive(ledger, kind, start)]
        ledger.need(kind, [BASE, *variants], chunk)  # the plan needs the base, which is most of the way to the others
    ledger.finish()


def _likely(ledger: Ledger, kind: str, picks: Sequence[int], blocks: int, scouted: Sequence[int]) -> list[list[int]]:
    """What rounds will start from: the true picks, and sets of picks that will likely come to be, whatever the order.

    The chain of the best so far is followed; at each of its steps every other candidate may turn out to be better. A set
    is likely if those that are not in it, all steps together, will not be with a probability of `1 - RISK`.
    """
    starts, chain, risks = [list(picks)], list(picks), dict.fromkeys(ledger.costs.able, 0.0)
    while len(chain) < blocks - 1:
        variants = _alive(ledger, kind, chain)
        for chunk in scouted:
            ledger.need(kind, variants, chunk)
        known = [set(ledger.known_chunks(kind, variant)) for variant in variants]
        leader = best(ledger, kind, variants, sorted(set.intersection(*known)))
        for variant in variants:
            (layer,) = variant.difference(chain)
            gap = difference(ledger, kind, variant, leader)
            risks[layer] += 0.0 if variant == leader or not gap.error else float(stats.norm.sf(gap.mean / gap.error))
        chain += leader.difference(chain)
        if sum(risk for layer, risk in risks.items() if layer not in chain) <= RISK:
            starts.append(list(chain))
    return starts


def _winners(starts: Sequence[Sequence[int]]) -> list[Variant]:
    """The sets of picks that are guessed."""
    return [Variant(start) for start in starts[1:]]


def _alive(ledger: Ledger, kind: str, picks: Sequence[int]) -> list[Variant]:
    """Candidates of a round that have not lost for certain."""
    variants = ledger.round_of(picks)
    every = range(len(ledger.chunks))
    totals = [ledger.total(kind, variant, every) for variant in _finished(ledger, kind, variants)]
    if not totals:
        return variants
    bound = min(totals) * (1 + ROUNDING)
    return [v for v in variants if _known(ledger, kind, v) <= bound or len(ledger.known_chunks(kind, v)) == len(every)]


def _known(ledger: Ledger, kind: str, variant: Variant) -> float:
    """What a variant has lost on the chunks that are known."""
    chunks = ledger.known_chunks(kind, variant)
    return ledger.total(kind, variant, chunks) if chunks else 0.0


def _finished(ledger: Ledger, kind: str, variants: Sequence[Variant]) -> list[Variant]:
    return [v for v in variants if len(ledger.known_chunks(kind, v)) == len(ledger.chunks)]


def _settled(ledger: Ledger, kind: str, picks: Sequence[int]) -> bool:
    """Whether the best candidate of the round after these picks is known for certain."""
    alive = _alive(ledger, kind, picks)
    return len(_finished(ledger, kind, alive)) == len(alive)


def _finishing_pays(ledger: Ledger, kind: str, starts: Sequence[Sequence[int]]) -> bool:
    """Whether to finish the guessed winners first, as rivals that others can lose to on a part of the data.

    The others then leave out what they share with the winners; it pays if enough of them lose early, which is told by
    their losses on the first chunk.
    """
    winners, count, shape = set(_winners(starts)), len(ledger.chunks), ledger.chunks[0][0].shape
    rounds = [of for start in starts if winners & set(of := _alive(ledger, kind, start))]
    if not rounds:
        return False
    losses = {v: ledger.total(kind, v, [0]) for of in rounds for v in of}
    ends = {v: min(losses[w] for w in of if w in winners) / (losses[v] or 1.0) for of in rounds for v in of}
    rest = [v for v in losses if v not in winners]
    apart = count * ledger.costs.shared([BASE, *winners], shape)
    apart += sum(ledger.costs.shared([v for v in rest if ends[v] * count > chunk], shape) for chunk in range(count))
    return apart < count * ledger.costs.shared([BASE, *losses], shape)
