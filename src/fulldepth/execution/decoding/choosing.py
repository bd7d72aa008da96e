"""Choice of E and K from measured acceptance and layer times, so that speculation is used only where it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulldepth.execution.decoding.session import Session

PROMPT_POSITIONS = 8
"""Last positions of each prompt at which acceptance is measured."""
STEPS = 8
"""First tokens that are decoded plainly, while acceptance and times are measured."""
SHARES = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
"""Candidates for E as shares of the layers."""
LENGTHS = (1, 2, 3, 4, 6, 8)
"""Candidates for K."""
GROWTH = 0.05
"""Assumed growth of a layer's time with each further position, before rounds were measured."""
LEAST = 1.05
"""Predicted speed-up below which no round is tried."""
LOSS = 0.05
"""Largest share of the time of plain decoding that measuring and trials may cost, if all new tokens are decoded."""
LEAST_TOKENS = 32
"""New tokens below which nothing is measured: the steps that run layer by layer and one reading of drafts take about as
long as 1.5 tokens."""


@dataclass
class Times:
    """Seconds for one position of every active sequence, except `plain`."""

    plain: float = 0.0
    """One token by the model's own forward pass."""
    begin: float = 0.0
    """Embeddings, masks and positions."""
    layer: float = 0.0
    """One layer."""
    head: float = 0.0
    """Final norm and head."""
    growth: float = GROWTH
    """Relative growth of the time of layers and head with each further position."""

    def round(self, num_layers: int, early: int, length: int) -> float:
        """Seconds of a round: K + 1 passes of layers 1..E with K drafts, then the rest on K + 1 positions at once."""
        drafting = (length + 1) * (self.begin + early * self.layer) + length * self.head
        wider = 1 + self.growth * length
        return drafting + self.begin + ((num_layers - early) * self.layer + self.head) * wider

    def fit(self, num_layers: int, early: int, length: int, seconds: float) -> None:
        """Set the growth so that a measured round of K drafts has its measured time."""
        base, growth = self.round(num_layers, early, length), self.growth
        rest = ((num_layers - early) * self.layer + self.head) * length
        if rest > 0:
            self.growth = max(0.0, growth + (seconds - base) / rest)


def tokens_per_round(acceptance: float, length: int) -> float:
    """`(1 - a^(K+1)) / (1 - a)`: expected tokens of a round with K drafts (Leviathan et al. 2023, Eq. 1)."""
    if acceptance >= 1:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


@dataclass
class Estimate:
    """What is known of one E and K."""

    layer: int
    draft_length: int
    acceptance: float
    tokens_per_round: float
    predicted_speedup: float


def estimates(times: Times, num_layers: int, early: int, acceptance: float, lengths: Sequence[int]) -> list[Estimate]:
    """The predicted speed-up of every K: tokens per round times the plain time of a token, over the round's time."""
    made = []
    for length in lengths:
        tokens = tokens_per_round(acceptance, length)
        speedup = tokens * times.plain / times.round(num_layers, early, length)
        made.append(Estimate(early, length, acceptance, tokens, speedup))
    return made


@dataclass
class Probe:
    """Decodes the first tokens plainly, and measures times and the acceptance of drafts of some layers.

    The drafts of layer E at a position are accepted as often as they would be in a round: greedy, if their top token is
    the model's; sampled, with probability `sum_x min(p(x), q(x))`.
    """

    session: Session
    layers: Sequence[int]
    """Candidates for E."""
    times: Times = field(default_factory=Times)
    spent: float = 0.0
    """Seconds that measuring took beyond plain decoding."""
    _wide_head: float = 0.0
    """Seconds of the head for the last positions of the prompts."""
    _states: dict[int, list[Tensor]] = field(default_factory=dict)
    _scores: list[Tensor] = field(default_factory=list)

    def prompt(self) -> None:
        """Run the prompts, and decode the first token of each sequence."""
        self._wide_head = self._step(PROMPT_POSITIONS)[2]

    def steps(self, count: int = STEPS) -> None:
        """Decode tokens plainly; half of them by the model's own forward pass, for its time."""
        own, parts = [], []
        for index in range(count):
            if not self.session.sequences.active:
                break
            begun = self.session.clock()
            if index % 2:
                self.session.step()
                own.append(self.session.clock() - begun)
            else:
                parts.append(self._step(1))
        if own:
            begin, layers, head = (median(values) for values in zip(*parts, strict=True))
            self.times = Times(median(own), begin, layers / self.session.num_layers, head)
            beyond = sum(map(sum, parts)) - len(parts) * self.times.plain
            self.spent = max(0.0, beyond) + max(0.0, self._wide_head - head)

    @property
    def reading_seconds(self) -> float:
        """Expected time of `acceptance`: that of the head for the prompts' last positions, for as many as are read."""
        return self._wide_head * sum(map(len, self._scores)) / max(1, len(self._scores[0]))

    def acceptance(self, layer: int) -> float:
        """Acceptance of the drafts of a layer; slightly optimistic, since few positions are measured."""
        begun = self.session.clock()
        scores, choice = torch.cat(self._scores), self.session.choice
        drafts = choice.warped(self.session.runner.finish(torch.cat(self._states[layer])[:, None], layer)[:, 0])
        if choice.samples:
            hits = torch.minimum(scores.softmax(-1), drafts.softmax(-1)).sum(-1).sum()
        else:
            hits = (scores.argmax(-1) == drafts.argmax(-1)).sum()
        accepted = (float(hits) + 0.5) / (len(scores) + 0.5)
        self.spent += self.session.clock() - begun
        return accepted

    def _step(self, positions: int) -> tuple[float, float, float]:
        """Decode one token layer by layer, and keep states of the last positions: seconds of begin, layers and head."""
        session = self.session
        ids, mask = session.sequences.window()
        moments = [session.clock()]
        states = session.begin(ids, mask, session.cache.get_seq_length())
        moments.append(session.clock())
        counted = mask[:, -states.shape[1] :][:, -positions:].bool()
        kept = {}
        for layer in range(1, session.num_layers + 1):
            states = session.run((layer,), states)
            if layer in self.layers:
                kept[layer] = states[:, -positions:]
        moments.append(session.clock())
        logits = session.runner.finish(states[:, -positions:])
        moments.append(session.clock())
        for layer, each in kept.items():
            self._states.setdefault(layer, []).append(each[counted])
        self._scores.append(session.choice.warped(logits[counted]))
        session.commit([[token] for token in session.choice.choose(session.choice.scores(logits[:, -1])).tolist()])
        begin, layers, head = (after - before for before, after in pairwise(moments))
        return begin, layers, head


def candidates(num_layers: int) -> list[int]:
    """Layers that are tried as E, deepest first."""
    return sorted({min(num_layers - 1, max(1, round(share * num_layers))) for share in SHARES}, reverse=True)


class Chosen(NamedTuple):
    """The best E and K, and what is known of the others."""

    best: Estimate
    measured: list[dict[str, Any]]
    """Estimates with a measured acceptance; empty if no layer was read."""
    why: str
    """`measured`; `hopeless`: no layer would pay if all its drafts were accepted; `dear`: measuring would cost too
    much. In the last two cases the acceptance of `best` is 1."""


def choose(probe: Probe, layers: Sequence[int], lengths: Sequence[int], allowance: float = math.inf) -> Chosen:
    """The best E and K by predicted speed-up.

    Deeper layers predict the last one better, so a layer is only read if it would pay with the acceptance of the next
    deeper candidate.

    Args:
        probe: with times.
        layers: candidates for E.
        lengths: candidates for K.
        allowance: seconds that all measuring may take beyond plain decoding.
    """
    num_layers, bound, why = probe.session.num_layers, 1.0, "hopeless"
    made: list[Estimate] = []
    hoped: list[Estimate] = []
    for layer in sorted(layers, reverse=True):
        hopeful = estimates(probe.times, num_layers, layer, bound, lengths)
        hoped += [] if made else hopeful
        if max(each.predicted_speedup for each in hopeful) < LEAST:
            continue
        if probe.spent + probe.reading_seconds > allowance:
            why = "dear"
            break
        bound = probe.acceptance(layer)
        made += estimates(probe.times, num_layers, layer, bound, lengths)
    best = max(made or hoped, key=lambda each: each.predicted_speedup)
    return Chosen(best, [vars(each).copy() for each in made], "measured" if made else why)
