"""Decoding loops: plain steps, early exit, and self-speculative decoding.

In self-speculative decoding the first layers draft tokens, the others confirm them, and nothing runs twice.

Elhoushi et al. 2024 (LayerSkip, Section 4.3): layers 1..E and the model's own final norm and head draft K tokens; then
layers E+1..L run on the stored states of all drafts at once. Keys, values and states of the first E layers are reused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from fulldepth.execution.decoding.options import AUTO, ExitRule, Options
from fulldepth.execution.decoding.session import DecodingSession, shared_beginning

DRAFTS = 4
"""K for `draft_length="auto"`."""
SHARE = 1 / 3
"""Share of the layers that draft for `speculate_from="auto"`."""
STEPS = 4
ROUNDS = 6
"""Plain steps and rounds of drafts that a trial times."""
LOSS = 0.05
"""Share of the time of plain decoding of all new tokens; a trial ends after the round at which it has lost more."""
LEAST_TOKENS = 32
"""New tokens below which nothing is tried: one slow round would lose more than that share."""


def decode(session: DecodingSession, options: Options) -> None:
    """Decode until every sequence has ended."""
    stats = session.stats
    step = session.step
    if options.threshold is not None:
        step = _EarlyExit(session, options, options.threshold).step
        stats.mode = "early-exit"
        stats.reason = f"A token leaves where its {options.rule} exceeds {options.threshold}."
    begun = session.clock()
    step()
    stats.prompt_seconds = session.clock() - begun
    stats.prompt_positions = stats.layer_positions
    stats.begin()
    begun = session.clock()
    if options.speculate_from is not None:
        _decode_with_drafts(session, options)
    while session.active:
        step()
    stats.seconds = session.clock() - begun


class _EarlyExit:
    """Exact early exit: each token leaves at a layer of its own, and its state waits there.

    Later layers run on waiting states when a later token needs them, so that each layer has the keys and values of all
    positions, from the same states as in a pass over the whole sequence. Sequences of a batch share the layers up to
    the deepest exit, and each gets what it would get alone.
    """

    def __init__(self, session: DecodingSession, options: Options, threshold: float) -> None:
        self._session = session
        self._min_layer = options.min_layer
        self._rule = partial(ExitRule, options.rule, threshold, session.num_layers)
        self._exit_layers = session.stats.exit_layers = [[] for _ in session.active]
        self._waiting: dict[int, Tensor] = {}
        """Layer l -> `[A, N, D]` states of the positions that ran through layers 1..l and no further; they precede
        those that wait at earlier layers."""

    def step(self) -> None:
        """Decode one token of every active sequence; the first call also runs the prompts."""
        session = self._session
        rule = self._rule()
        last = self._session.num_layers
        active = session.active
        states = session.begin(session.start)
        left_at = torch.zeros(len(active), dtype=torch.long)  # [A]
        exit_logits = torch.empty(0)  # [A, V]
        for layer in range(1, last + 1):
            if layer - 1 in self._waiting:
                states = torch.cat([self._waiting.pop(layer - 1), states], dim=1)
                session.begin(session.length - states.shape[1])
            states = session.run((layer,), states)
            if layer < self._min_layer:
                continue
            logits = session.runner.finish(states[:, -1:], layer)[:, -1]
            leaves = (left_at == 0) & (rule.leaves(logits).cpu() | torch.tensor(layer == last))
            if len(exit_logits):
                logits = torch.where(leaves.to(logits.device)[:, None], logits, exit_logits)
            exit_logits = logits
            left_at[leaves] = layer
            if bool((left_at > 0).all()):
                break
        if layer < last:
            earlier = [self._waiting.pop(layer)] if layer in self._waiting else []
            self._waiting[layer] = torch.cat([*earlier, states], dim=1)
        for row, layer in zip(active, left_at.tolist(), strict=True):
            self._exit_layers[row].append(layer)
        alive = session.append(session.choose(session.scores(exit_logits))[:, None])
        if len(alive) < len(active):
            self._waiting = {layer: states[alive] for layer, states in self._waiting.items()}


def _decode_with_drafts(session: DecodingSession, options: Options) -> None:
    """Draft and confirm until the sequence has ended, or a trial shows that plain decoding is faster."""
    stats = session.stats
    given = options.speculate_from
    early = given if isinstance(given, int) else max(1, round(SHARE * stats.num_layers))
    length = options.draft_length if isinstance(options.draft_length, int) else DRAFTS
    stats.speculate_from = early
    stats.draft_length = length
    stats.reason = f"Up to {length} tokens a round are drafts of layers 1 to {early}, as asked."
    draft = partial(speculate, session, early, length)
    if AUTO not in (given, options.draft_length) or _pays(session, draft):
        stats.mode = "speculative"
        while session.active:
            draft()


def _pays(session: DecodingSession, draft: Callable[[], int]) -> bool:
    """Decode some tokens plainly and some with drafts, and decide once which is faster; says so in `stats.reason`.

    The rounds end early where they have lost `LOSS` of the time of plain decoding, so that they cost at most that and
    one round.
    """
    stats = session.stats
    room = session.max_length - session.stats.prompt_length
    if room < LEAST_TOKENS:
        stats.reason = f"Plain decoding: a trial of drafts does not pay for fewer than {LEAST_TOKENS} new tokens."
        return False
    steps: list[float] = []
    rounds = 0
    seconds = 0.0
    worth = 0.0  # seconds that plain decoding would have taken
    while session.active and len(steps) < STEPS:
        begun = session.clock()
        session.step()
        steps.append(session.clock() - begun)
    while session.active and rounds < ROUNDS and seconds - worth <= LOSS * median(steps) * room:
        begun = session.clock()
        worth += median(steps) * draft()
        seconds += session.clock() - begun
        rounds += 1
    if not rounds:
        stats.reason = "Plain decoding: the sequence ended before drafts were timed."
        return False
    stats.paid = seconds <= worth
    stats.trial_seconds = max(0.0, seconds - worth)
    stats.reason = (
        f"{'Drafting goes on' if stats.paid else 'Plain decoding'} after a trial: drafts of layers 1 to "
        f"{stats.speculate_from} were {worth / seconds:.2f} times as fast as plain steps (rounds: {rounds}), which "
        f"cost {stats.trial_seconds:.2f} s."
    )
    return stats.paid


def speculate(session: DecodingSession, early: int, length: int) -> int:
    """One round: draft up to `length` tokens, and confirm them; returns the number of new tokens.

    Args:
        session: of one sequence, with the prompt decoded.
        early: E, layers that draft.
        length: K, maximum number of drafts.
    """
    stats = session.stats
    start = session.start
    known = session.length
    length = min(length, session.max_length - known - 1)  # no draft is beyond the model's positions
    drafts: list[int] = []
    states: list[Tensor] = []  # [1, 1, D] each: of layer E at the last known token and at drafts
    scores: list[Tensor] = []  # [1, V] each, of which a draft was chosen
    while not drafts or drafts[-1] not in session.end_tokens:
        at = start + len(drafts)
        states.append(session.run(range(1, early + 1), session.begin(at, at + 1)))
        if len(drafts) >= length:
            break
        scores.append(session.scores(session.runner.finish(states[-1], early)[:, -1], len(drafts)))
        drafts.append(int(session.choose(scores[-1])))
        session.tokens[session.active, at + 1] = drafts[-1]
    session.begin(start, start + len(states))
    late = session.run(range(early + 1, session.num_layers + 1), torch.cat(states, dim=1))
    new = session.accept(session.runner.finish(late)[0], drafts, scores)
    session.append(session.tokens.new_tensor([new]))
    count = session.length - known
    stats.drafted += len(drafts)
    stats.accepted += shared_beginning(new[:count], drafts)
    stats.rounds += 1
    stats.added += count
    return count
