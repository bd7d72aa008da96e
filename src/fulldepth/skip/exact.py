"""The picks of the plain loop, at less than its cost.

The plain loop runs the model once for every candidate of every round. Here several rounds are run together, a chunk of
the data at a time, and whatever their candidates share from the first block on is computed once, across rounds too: a
candidate that lies below the blocks removed before differs from the same candidate of the round before only above the
lowest of them. A later round can be run before the picks that it starts from are known, if these are guessed: it is
run along when that costs less than running it by itself afterwards, times the probability that the guess is right.

Nothing is decided by a guess. A round is settled when every candidate of the true picks before it was scored on all
data, or has lost for certain on a part of them: losses are no less than 0, so a sum only grows, and one that exceeds
the total of a rival cannot win. What a wrong guess has left out is made up for in another pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from fulldepth.skip.elimination import Round, best, difference, judge
from fulldepth.skip.flops import Variant
from fulldepth.skip.ledger import Ledger
from fulldepth.skip.score import BASE, SCALED

DRAWS = 400
"""Courses of the search that are drawn, to tell how probable guesses are."""
TOLD = 8
"""A round whose candidates were scored on one part in so many of the data tells its own next pick."""
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
    """One pass over the data for the rounds that are not settled; the first of them is settled by it."""
    left = [len(ledger.round_of(picks)) - number for number in range(blocks - len(picks))]
    ledger.begin(f"Blocks {len(picks) + 1} to {blocks}", sum(left) * ledger.num_batches)
    starts = _starts(ledger, kind, picks, blocks)
    first = _winners(ledger, kind, starts)
    for chunk in range(len(ledger.chunks)) if first else ():
        ledger.need(kind, first, chunk)
    for chunk in range(len(ledger.chunks)):
        starts = _starts(ledger, kind, picks, blocks)
        variants = [variant for start in starts for variant in _alive(ledger, kind, start)]
        ledger.need(kind, [*_base(kind), *variants], chunk)
    ledger.finish()


def _base(kind: str) -> list[Variant]:
    """The plan needs the losses of the base, which is most of the way to its variants."""
    return [] if kind == SCALED else [BASE]


def _starts(ledger: Ledger, kind: str, picks: Sequence[int], blocks: int) -> list[Variant]:
    """The sets of picks from which rounds are to be run together: the true one, and guesses that are worth it."""
    starts, shape = [Variant(picks)], ledger.chunks[0][0].shape
    running = [*_base(kind), *_alive(ledger, kind, picks)]
    odds = {} if kind == SCALED else _odds(ledger, kind, picks, blocks)
    for guess in sorted(odds, key=lambda guess: (len(guess), -odds[guess], sorted(guess))):
        candidates = _alive(ledger, kind, guess)
        alone, now = ledger.costs.shared(candidates, shape), ledger.costs.shared(running, shape)
        if ledger.costs.shared([*running, *candidates], shape) - now < odds[guess] * alone:
            starts.append(guess)
            running += candidates
    return starts


def _odds(ledger: Ledger, kind: str, picks: Sequence[int], blocks: int) -> dict[Variant, float]:
    """Sets of picks that a round may start from -> the probability that one will, by the errors of what is known.

    Courses of the search are drawn. In each round the drawn losses of its own candidates decide if enough is known of
    them, else those of the round before, as if removals did not depend on each other.
    """
    count: dict[Variant, int] = {}
    drawn: dict[Variant, dict[int, np.ndarray] | None] = {}
    if _drawn(ledger, kind, Variant(picks), least=1) is None:
        return {}
    for draw in range(DRAWS):
        start = Variant(picks)
        losses: dict[int, np.ndarray] = {}
        while len(start) < blocks - 1:
            if start not in drawn:
                drawn[start] = _drawn(ledger, kind, start, 1 if len(start) == len(picks) else ledger.sequences / TOLD)
            losses = drawn[start] or losses
            start |= {min((layer for layer in losses if layer not in start), key=lambda layer: losses[layer][draw])}
            count[start] = count.get(start, 0) + 1
    return {start: found / DRAWS for start, found in count.items()}


def _drawn(ledger: Ledger, kind: str, start: Variant, least: float) -> dict[int, np.ndarray] | None:
    """Layer -> draws of the mean loss on all data when it is removed next, up to a constant, as independent normals.

    None if not all candidates are known on at least so many sequences.
    """
    variants = _alive(ledger, kind, start)
    common = set.intersection(*(set(ledger.known_chunks(kind, variant)) for variant in variants))
    if sum(len(ledger.tokens[chunk]) for chunk in common) < least:
        return None
    most = max(variants, key=lambda variant: len(ledger.known_chunks(kind, variant)))
    gaps = {max(v - start): difference(ledger, kind, v, most) for v in variants}
    noise = np.random.default_rng(0).standard_normal((len(gaps), DRAWS))
    return {layer: gap.mean + min(gap.error, 1.0) * row for (layer, gap), row in zip(gaps.items(), noise, strict=True)}


def _alive(ledger: Ledger, kind: str, picks: Collection[int]) -> list[Variant]:
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


def _winners(ledger: Ledger, kind: str, starts: Sequence[Variant]) -> list[Variant]:
    """The guessed winners, if it pays to finish them first as rivals that others can lose to on a part of the data.

    The others then leave out what they share with the winners; it pays if enough of them lose early, which is told by
    their losses on the first chunk.
    """
    rounds = [of for start in starts if set(starts) & set(of := _alive(ledger, kind, start))]
    if not rounds or any(ledger.missing(kind, of, 0) for of in rounds):
        return []
    losses = {v: ledger.total(kind, v, [0]) for of in rounds for v in of}
    best_of = [min((v for v in of if v in starts), key=losses.__getitem__) for of in rounds]
    ends = {v: losses[winner] / (losses[v] or 1.0) for of, winner in zip(rounds, best_of, strict=True) for v in of}
    first, rest = [BASE, *best_of], [v for v in losses if v not in best_of]
    count, shape = len(ledger.chunks), ledger.chunks[0][0].shape
    apart = count * ledger.costs.shared(first, shape)
    apart += sum(ledger.costs.shared([v for v in rest if ends[v] * count > chunk], shape) for chunk in range(count))
    return first if apart < count * ledger.costs.shared([*first, *rest], shape) else []
