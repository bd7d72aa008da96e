"""The picks of the plain loop, at little more than half its cost.

The plain loop runs the model once for every candidate of every round. Here, on each chunk of the data, the leading
blocks that variants share are computed once, within a round and across rounds: a candidate below the removed blocks
differs from the same candidate of the previous round only above the lowest removed block. Later rounds are therefore
run together with the first, starting from likely picks, where the expected saving exceeds the cost.

Such guesses do not affect the result. A round is settled when every candidate after the true picks was scored on all
data, or has certainly lost on a part of them: losses are non-negative, so a sum only grows, and one that exceeds the
total of a rival cannot win. Candidates that a wrong guess has left out are scored in another pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import SCALED
from fulldepth.skip.selection.elimination import Round, along, best, difference, judge
from fulldepth.skip.selection.loss_cache import LossCache

DRAWS = 400
"""Number of simulated searches that estimate the probability of guesses."""
ENOUGH = 4
"""A round's own losses are used in simulations once its candidates were scored on one in `ENOUGH` chunks."""


def exact(loss_cache: LossCache, blocks: int, *, confidence: float = 0.95) -> tuple[list[int], list[Round]]:
    """Remove blocks one by one, each time the one that costs least on all data given those removed before.

    Args:
        loss_cache: computes losses of its criterion.
        blocks: k.
        confidence: for `Round.sure`.

    Returns:
        Layers in the order of removal, and how each was chosen.
    """
    picks: list[int] = []
    rounds: list[Round] = []
    chunks = range(len(loss_cache.chunks))
    while len(picks) < blocks:
        passes = sum(len(loss_cache.candidates(picks)) - number for number in range(blocks - len(picks)))
        loss_cache.begin(f"Blocks {len(picks) + 1} to {blocks}", passes * loss_cache.num_batches)
        for chunk in chunks:
            starts = _starts(loss_cache, picks, blocks)
            variants = [variant for start in starts for variant in _possible(loss_cache, start)]
            loss_cache.need([*along(loss_cache, picks), *variants], chunk)
        loss_cache.finish()
        while len(picks) < blocks:
            possible = _possible(loss_cache, picks)
            if any(len(loss_cache.known_chunks(variant)) < len(chunks) for variant in possible):
                break  # one may be the best of its round, but was not scored on all data
            rounds.append(judge(loss_cache, picks, best(loss_cache, possible, chunks), "data", confidence))
            picks.append(rounds[-1].pick)
    return picks, rounds


def _starts(loss_cache: LossCache, picks: Sequence[int], blocks: int) -> list[Variant]:
    """The sets of picks from which rounds are run together: the true one, and guesses that pay.

    A guess pays if its round costs less in addition to the others than by itself afterwards, times the probability that
    the guess is right.
    """
    starts, shape = [Variant(picks)], loss_cache.chunks[0][0].shape
    running = [*along(loss_cache, picks), *_possible(loss_cache, picks)]
    cost = loss_cache.costs.shared(running, shape)
    odds = {} if loss_cache.criterion == SCALED else _odds(loss_cache, starts[0], blocks)
    for guess in sorted(odds, key=lambda guess: (len(guess), -odds[guess], sorted(guess))):
        candidates = _possible(loss_cache, guess)
        both = loss_cache.costs.shared([*running, *candidates], shape)
        if both - cost < odds[guess] * loss_cache.costs.shared(candidates, shape):
            starts.append(guess)
            running, cost = [*running, *candidates], both
    return starts


def _odds(loss_cache: LossCache, picks: Variant, blocks: int) -> dict[Variant, float]:
    """Set of picks that a later round may start from -> its probability given the known losses.

    The search is simulated `DRAWS` times: each round removes the layer of the lowest drawn loss. Losses are drawn from
    the known losses of the round if there are enough of them, else those of the previous round are kept.
    """
    losses = np.full((loss_cache.costs.num_layers + 1, DRAWS), np.inf)
    courses = {picks: np.arange(DRAWS)}
    odds: dict[Variant, float] = {}
    if not _draw(loss_cache, picks, least=1):
        return {}
    for _ in range(len(picks) + 1, blocks):
        parts: dict[Variant, list[np.ndarray]] = {}
        for start, at in courses.items():
            least = 1 if start == picks else len(loss_cache.chunks) // ENOUGH
            for layer, drawn in _draw(loss_cache, start, least).items():
                losses[layer, at] = drawn[at]
            pick = losses[:, at].argmin(axis=0)
            losses[pick, at] = np.inf
            for layer in np.unique(pick):
                parts.setdefault(start | {int(layer)}, []).append(at[pick == layer])
        courses = {start: np.concatenate(part) for start, part in parts.items()}
        odds |= {start: len(at) / DRAWS for start, at in courses.items()}
    return odds


def _draw(loss_cache: LossCache, start: Variant, least: int) -> dict[int, np.ndarray]:
    """Layer -> [DRAWS] mean losses on all data when it is removed next, up to a constant, as independent normals.

    Empty if a candidate of the round is known on fewer than `least` chunks.
    """
    variants = loss_cache.candidates(start)
    chunks = {variant: len(loss_cache.known_chunks(variant)) for variant in variants}
    if min(chunks.values()) < max(1, least):
        return {}
    longest = max(variants, key=lambda variant: chunks[variant])
    gaps = {max(variant - start): difference(loss_cache, variant, longest) for variant in variants}
    noise = np.random.default_rng(0).standard_normal((len(gaps), DRAWS))
    return {layer: gap.mean + min(gap.error, 1.0) * row for (layer, gap), row in zip(gaps.items(), noise, strict=True)}


def _possible(loss_cache: LossCache, picks: Collection[int]) -> list[Variant]:
    """Candidates of a round whose sums so far do not exceed the lowest extrapolated total."""
    variants, tokens = loss_cache.candidates(picks), loss_cache.counts(range(len(loss_cache.chunks))).sum()
    chunks = {v: loss_cache.known_chunks(v) for v in variants}
    sums = {v: loss_cache.total(v, chunks[v]) for v in variants}
    totals = [sums[v] * (tokens / loss_cache.counts(chunks[v]).sum()) for v in variants if chunks[v]]
    return [v for v in variants if not totals or sums[v] <= min(totals)]
