"""Self-speculative decoding: the first layers draft tokens, the others confirm them, and nothing runs twice.

Elhoushi et al. 2024 (LayerSkip, Section 4.3): layers 1..E and the model's own final norm and head draft K tokens; then
layers E+1..L run on the stored states of all drafts at once. Keys, values and states of the first E layers are reused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fulldepth.execution.decoding.session import Session
from fulldepth.hf import Scalars, Switches


class Round(NamedTuple):
    """What one round of speculation did, summed over its sequences."""

    sequences: int
    drafts: int
    """Drafts of each sequence."""
    accepted: int
    rejected: int
    """Sequences with a draft that was not confirmed."""
    added: int
    """New tokens."""


class Skipper(NamedTuple):
    """Turns the skipped parts of a drafting model off for drafts, and on for their confirmation."""

    switches: Switches
    layers: Collection[int]
    scalars: Scalars | None

    @property
    def unused(self) -> Collection[int]:
        """Layers of which drafts compute nothing."""
        return self.layers if self.switches.granularity == "layer" else ()

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """While open, the layers' parts are skipped."""
        self.switches.skip(self.layers)
        self.switches.scalars = self.scalars
        try:
            yield
        finally:
            self.switches.scalars = None
            self.switches.skip(())


def speculate(
    session: Session, early: int, length: int, threshold: float | None = None, skipper: Skipper | None = None
) -> Round:
    """One round: draft up to `length` tokens for every active sequence, and confirm them.

    Args:
        session: with the prompt decoded.
        early: E, layers that draft.
        length: K, maximum number of drafts.
        threshold: drafting ends where the largest probability of the next draft of every sequence is below it.
        skipper: drafts come from all layers without some parts, the first of which is after layer `early` (from 0);
            later layers read the keys and values that the full model has of known tokens.
    """
    sequences, stats = session.sequences, session.stats
    ids, mask = sequences.window()
    start = ids.shape[1] - 1
    length = min(length, sequences.max_length - sequences.width - 1)  # no draft is beyond the model's positions
    draft = _Draft(session, early, ids, mask)
    draft.extend(length, threshold, skipper)
    if skipper is not None:
        session.cache.crop_after(early, start)
    ids, mask = draft.ids[:, : start + len(draft.states)], draft.mask[:, : start + len(draft.states)]
    session.begin(ids, mask, start)
    states = session.run(range(early + 1, session.num_layers + 1), torch.cat(draft.states, dim=1))
    logits = session.runner.finish(states)
    drafts = draft.ids[:, start + 1 :]
    tokens = session.choice.accept(logits, drafts, draft.scores)
    counts = session.commit(tokens)
    accepted = rejected = 0
    for drafted, new, count in zip(drafts.tolist(), tokens, counts, strict=True):
        ends = next((at for at, token in enumerate(drafted, start=1) if sequences.is_end(token)), len(drafted))
        common = min(_common(new[:count], drafted), ends)
        stats.drafted += ends
        accepted += common
        rejected += common < min(ends, count)
    done = Round(len(ids), drafts.shape[1], accepted, rejected, sum(counts))
    stats.rounds += 1
    stats.accepted += accepted
    stats.sequence_rounds += done.sequences
    stats.added += done.added
    return done


def _common(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    differs = (at for at, (own, other) in enumerate(zip(first, second, strict=False)) if own != other)
    return next(differs, min(len(first), len(second)))


class _Draft:
    """Drafts after the known tokens, with states of layer E at the last known token and at drafts."""

    def __init__(self, session: Session, early: int, ids: Tensor, mask: Tensor) -> None:
        self._session, self._layers = session, range(1, early + 1)
        self.ids, self.mask = ids, mask
        self.states: list[Tensor] = []
        """[A, 1, D] each."""
        self.scores: list[Tensor] = []
        """[A, V] of which each draft was chosen."""

    def extend(self, length: int, threshold: float | None, skipper: Skipper | None) -> None:
        """Draft up to `length` tokens, with a skipper through the later layers without the skipped parts.

        The first E layers keep nothing of the drafting model, not even its scalars: their states are the full model's.
        """
        sequences, choice, num_layers = self._session.sequences, self._session.choice, self._session.num_layers
        ended = [False] * len(self.ids)
        while True:
            at = self.ids.shape[1] - 1
            state = self._session.run(self._layers, self._session.begin(self.ids, self.mask, at))
            self.states.append(state)
            if len(self.scores) >= length:
                return
            early = self._layers[-1] if self._layers else 0
            if skipper is not None:
                with skipper.drafting():
                    state = self._session.run(range(early + 1, num_layers + 1), state, skipper.unused)
            scores = choice.scores(
                self._session.runner.finish(state, None if skipper else early)[:, -1], len(self.scores)
            )
            if threshold is not None and float(scores.softmax(-1).amax(-1).max()) < threshold:
                return
            tokens = choice.choose(scores)
            self._append(tokens)
            self.scores.append(scores)
            ended = [done or sequences.is_end(token) for done, token in zip(ended, tokens.tolist(), strict=True)]
            if all(ended):
                return

    def _append(self, tokens: Tensor) -> None:
        """Add one draft to every sequence."""
        sequences = self._session.sequences
        for row, token in zip(sequences.active, tokens.tolist(), strict=True):
            sequences.tokens[row, sequences.lengths[row] + len(self.scores)] = token
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
