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

from fulldepth.skip.elimination import Round, best, difference, judge
from fulldepth.skip.flops import Variant
from fulldepth.skip.ledger import Ledger

SCOUTED = 8
"""One chunk in so many is scored round by round before the first guess."""
LEAD = 1.0
"""Standard errors by which the guess must lead to be built upon."""
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
    chain = _guess(ledger, kind, picks, blocks, range(-(-len(chunks) // SCOUTED)))
    finish_first = _finishing_pays(ledger, kind, picks, chain, blocks)
    for chunk in chunks if finish_first else ():
        ledger.need(kind, _winners(picks, chain), chunk)
    for chunk in chunks:
        chain = _guess(ledger, kind, picks, blocks, range(1))
        ledger.need(kind, [v for of in _rounds(ledger, kind, picks, chain, blocks) for v in of], chunk)
    ledger.finish()


def _guess(ledger: Ledger, kind: str, picks: Sequence[int], blocks: int, scouted: Sequence[int]) -> list[int]:
    """The next picks as far as what is known tells them; the very last is not needed, for nothing is built on it."""
    chain: list[int] = []
    while len(picks) + len(chain) < blocks - 1:
        variants = _alive(ledger, kind, [*picks, *chain])
        for chunk in scouted:
            ledger.need(kind, variants, chunk)
        known = [set(ledger.known_chunks(kind, variant)) for variant in variants]
        leader = best(ledger, kind, variants, sorted(set.intersection(*known)))
        gaps = [difference(ledger, kind, variant, leader) for variant in variants if variant != leader]
        if any(gap.mean < LEAD * gap.error for gap in gaps):
            break
        chain += leader - {*picks, *chain}
    return chain


def _winners(picks: Sequence[int], chain: Sequence[int]) -> list[Variant]:
    return [Variant([*picks, *chain[:number]]) for number in range(1, len(chain) + 1)]


def _rounds(ledger: Ledger, kind: str, picks: Sequence[int], chain: Sequence[int], blocks: int) -> list[list[Variant]]:
    """The candidates of every round that can be run under a guess."""
    starts = [[*picks, *chain[:number]] for number in range(len(chain) + 1)]
    return [_alive(ledger, kind, start) for start in starts if len(start) < blocks]


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


def _finishing_pays(ledger: Ledger, kind: str, picks: Sequence[int], chain: Sequence[int], blocks: int) -> bool:
    """Whether to finish the guessed winners first, as rivals that others can lose to on a part of the data.

    The others then leave out what they share with the winners; it pays if enough of them lose early, which is told by
    their losses on the first chunk.
    """
    winners, count, shape = set(_winners(picks, chain)), len(ledger.chunks), ledger.chunks[0][0].shape
    rounds = [of for of in _rounds(ledger, kind, picks, chain, blocks) if winners & set(of)]
    losses = {v: ledger.total(kind, v, [0]) for of in rounds for v in of}
    ends = {v: min(losses[w] for w in of if w in winners) / losses[v] for of in rounds for v in of if losses[v] > 0}
    rest = [v for v in losses if v not in winners]
    together = count * ledger.costs.shared(list(losses), shape)
    apart = count * ledger.costs.shared(list(winners), shape) if winners else together
    apart += sum(
        ledger.costs.shared([v for v in rest if ends.get(v, 1.0) * count > chunk], shape) for chunk in range(count)
    )
    return apart < together
