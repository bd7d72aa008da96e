"""The picks of the plain loop, at less than its cost.

The plain loop runs the model once for every candidate of every round. Here, successive elimination first tells which
blocks will probably go. Under that guess the candidates of all rounds are run together, a chunk of the data at a time,
and whatever they share from the first block on is computed once, across rounds too: a candidate that lies below the
blocks removed before differs from the same candidate of the round before only above the lowest of them.

Nothing is decided by the guess. A round is settled when every candidate of the true blocks before it was scored on all
data, or has lost for certain on a part of them: losses are no less than 0, so a sum only grows, and one that exceeds
the total of a rival cannot win. Where the guess was wrong, the rounds after it are done again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fulldepth.skip.elimination import Round, best, difference, eliminate, judge
from fulldepth.skip.flops import Variant
from fulldepth.skip.ledger import Ledger
from fulldepth.skip.score import BASE, SCALED

RISK = 0.3
"""Probability of a wrong guess up to which it is built upon: about what sharing saves of a round's cost."""
WIDTH, LEAST, FLOOR, FACTOR = 4, 0.05, 0.03, 1.0
ROUNDING = 1e-9
"""By how much, relative, a sum must exceed a rival's total: sums in another order differ by less."""


def exact(ledger: Ledger, kind: str, blocks: int, *, confidence: float = 0.95) -> tuple[list[int], list[Round]]:
    """Remove blocks one by one, each time the one that costs least on all data with those before it removed.

    Args:
        ledger: what scores.
        kind: the loss that decides.
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
            picks = [*picks, rounds[-1].pick]
    return picks, rounds


def _together(ledger: Ledger, kind: str, picks: Sequence[int], blocks: int) -> None:
    """One pass over the data for all rounds that are not settled; the first of them is settled by it."""
    left = [len(ledger.round_of(picks)) - number for number in range(blocks - len(picks))]
    ledger.begin(f"Blocks {len(picks) + 1} to {blocks}", sum(left) * ledger.num_batches)
    for chunk in range(len(ledger.chunks)):
        starts = _likely(ledger, kind, picks, blocks)
        variants = [variant for start in starts for variant in _alive(ledger, kind, start)]
        ledger.need(kind, [BASE, *variants], chunk)  # the plan needs the base, which is most of the way to the others
    ledger.finish()


def _likely(ledger: Ledger, kind: str, picks: Sequence[int], blocks: int) -> list[Variant]:
    shape = ledger.chunks[0][0].shape
    starts = [Variant(picks)]
    running = [BASE, *_alive(ledger, kind, picks)]
    level = {Variant(picks): 1.0}
    for _ in range(len(picks), blocks - 1):
        following: dict[Variant, float] = {}
        for start in sorted(level, key=lambda v: (-level[v], sorted(v)))[:WIDTH]:
            if level[start] >= LEAST:
                for variant, odds in _odds(ledger, kind, start).items():
                    following[variant] = following.get(variant, 0.0) + level[start] * odds
        level = following
        for start in sorted(level, key=lambda v: (-level[v], sorted(v))):
            if level[start] < FLOOR: break
            candidates = _alive(ledger, kind, start)
            alone = ledger.costs.shared(candidates, shape)
            more = ledger.costs.shared([*running, *candidates], shape) - ledger.costs.shared(running, shape)
            if more < FACTOR * level[start] * alone:
                starts.append(start)
                running += candidates
    return starts


def _odds(ledger: Ledger, kind: str, start: Variant) -> dict[Variant, float]:
    variants = _alive(ledger, kind, start)
    ledger.need(kind, variants, 0)
    most = max(variants, key=lambda variant: len(ledger.known_chunks(kind, variant)))
    gaps = [difference(ledger, kind, variant, most) for variant in variants]
    rng = np.random.default_rng(0)
    err = np.array([g.error if np.isfinite(g.error) else 1.0 for g in gaps]); mean=np.array([g.mean for g in gaps])
    draws = rng.standard_normal((400, len(variants))) * err + mean
    won = np.bincount(draws.argmin(1), minlength=len(variants)) / 400
    return {v: float(w) for v, w in zip(variants, won, strict=True) if w > 0}


def _alive(ledger: Ledger, kind: str, picks: Sequence[int]) -> list[Variant]:
    """Candidates of a round that have not lost for certain."""
    variants = ledger.round_of(picks)
    every = range(len(ledger.chunks))
    totals = [ledger.total(kind, variant, every) for variant in _finished(ledger, kind, variants)]
    if not totals:
        return variants
    bound = min(totals) * (1 + ROUNDING)
    return [v for v in variants if ledger.total(kind, v, ledger.known_chunks(kind, v)) <= bound]


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
    winners, count, shape = set(map(Variant, starts[1:])), len(ledger.chunks), ledger.chunks[0][0].shape
    rounds = [of for start in starts if winners & set(of := _alive(ledger, kind, start))]
    if not rounds:
        return False
    losses = {v: ledger.total(kind, v, [0]) for of in rounds for v in of}
    ends = {v: min(losses[w] for w in of if w in winners) / (losses[v] or 1.0) for of in rounds for v in of}
    rest = [v for v in losses if v not in winners]
    apart = count * ledger.costs.shared([BASE, *winners], shape)
    apart += sum(ledger.costs.shared([v for v in rest if ends[v] * count > chunk], shape) for chunk in range(count))
    return apart < count * ledger.costs.shared([BASE, *losses], shape)
