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
from fulldepth.execution.decoding.session import DecodingSession

DRAFTS = 4
"""K for `draft_length="auto"`."""
SHARE = 1 / 3
"""Share of the layers that draft for `speculate_from="auto"`."""
STEPS, ROUNDS = 4, 6
"""Plain steps and rounds of drafts that a trial times."""
LOSS = 0.05
"""Share of the time of plain decoding of all new tokens; a trial ends after the round at which it has lost more."""
LEAST_TOKENS = 32
"""New tokens below which nothing is tried: one slow round would lose more than that share."""


def decode(session: DecodingSession, options: Options) -> None:
    """Decode until every sequence has ended."""
    stats, sequences, step = session.stats, session.sequences, session.step
    stats.mode = options.mode
    if options.mode == "early-exit":
        step = _EarlyExit(session, options).step
        stats.reason = f"Every token leaves at layer {options.exit_layer}; later layers do not run."
        if options.exit_layer is None:
            stats.reason = f"A token leaves where its {options.rule} exceeds {options.threshold}."
    begun = session.clock()
    step()
    stats.prompt_seconds = session.clock() - begun
    stats.prompt_positions = stats.layer_positions
    stats.layer_calls, stats.layer_positions = [0] * stats.num_layers, [0] * stats.num_layers
    begun = session.clock()
    if options.mode == "speculative":
        _decode_with_drafts(session, options)
    while sequences.active:
        step()
    stats.seconds = session.clock() - begun
    stats.new_tokens = [length - sequences.prompt_length for length in sequences.lengths]
    stats.tokens = sum(stats.new_tokens)


class _EarlyExit:
    """Exact early exit: each token leaves at a layer of its own, and its state waits there.

    Later layers run on waiting states when a later token needs them, so that each layer has the keys and values of all
    positions, from the same states as in a pass over the whole sequence. Sequences of a batch share the layers up to
    the deepest exit, and each gets what it would get alone.

    Args:
        session: new.
        options: with a threshold or an exit layer.
    """

    def __init__(self, session: DecodingSession, options: Options) -> None:
        self._session, self._options = session, options
        self._exits = [0] * session.num_layers
        self._exit_layers: list[list[int]] = [[] for _ in session.sequences.lengths]
        session.stats.exits, session.stats.exit_layers = self._exits, self._exit_layers
        self._waiting: dict[int, Tensor] = {}
        """Layer l -> `[A, N, D]` states of the positions that ran through layers 1..l and no further; they precede
        those that wait at earlier layers."""

    def step(self) -> None:
        """Decode one token of every active sequence; the first call also runs the prompts."""
        session, options, last = self._session, self._options, self._session.num_layers
        ids, mask = session.sequences.window()
        start = ids.shape[1] - 1 if any(self._exits) else 0  # layer 1 has run on all tokens but the last, or on none
        states = session.begin(ids, mask, start)
        rule = ExitRule(options.rule, options.threshold or 1.0, last)
        left_at, chosen = torch.zeros(len(ids), dtype=torch.long), torch.empty(0)  # [A] and [A, V]
        for layer in range(1, last + 1):
            if layer - 1 in self._waiting:
                states = torch.cat([self._waiting.pop(layer - 1), states], dim=1)
                session.begin(ids, mask, ids.shape[1] - states.shape[1])
            states = session.run((layer,), states)
            always = layer == (options.exit_layer or last)
            if not always and (options.exit_layer is not None or layer < options.min_layer):
                continue
            logits = session.runner.finish(states[:, -1:], layer)[:, -1]
            leaves = (left_at == 0) & (torch.ones(len(ids), dtype=torch.bool) if always else rule.leaves(logits).cpu())
            chosen = chosen if len(chosen) else torch.zeros_like(logits)
            chosen[leaves.to(logits.device)] = logits[leaves.to(logits.device)]
            left_at[leaves] = layer
            if bool((left_at > 0).all()):
                break
        if layer < last:
            earlier = [self._waiting.pop(layer)] if layer in self._waiting else []
            self._waiting[layer] = torch.cat([*earlier, states], dim=1)
        for row, layer in zip(session.sequences.active, left_at.tolist(), strict=True):
            self._exits[layer - 1] += 1
            self._exit_layers[row].append(layer)
        session.append(chosen)
        if len(session.alive) < len(ids):
            self._waiting = {layer: states[session.alive] for layer, states in self._waiting.items()}


def _decode_with_drafts(session: DecodingSession, options: Options) -> None:
    """Draft and confirm until every sequence has ended, or a trial shows that plain decoding is faster."""
    stats, given = session.stats, options.speculate_from
    early = given if isinstance(given, int) else max(1, round(SHARE * stats.num_layers))
    length = options.draft_length if isinstance(options.draft_length, int) else DRAFTS
    stats.speculate_from, stats.draft_length = early, length
    stats.reason = f"Up to {length} tokens a round are drafts of layers 1 to {early}, as asked."
    draft = partial(speculate, session, early, length, options.draft_threshold)
    if AUTO in (given, options.draft_length) and not _pays(session, draft):
        stats.mode = "plain"
        return
    while session.sequences.active:
        draft()


def _pays(session: DecodingSession, draft: Callable[[], float]) -> bool:
    """Decode some tokens plainly and some with drafts, and decide once which is faster; says so in `stats.reason`.

    The rounds end early where they have lost `LOSS` of the time of plain decoding, so that they cost at most that and
    one round.
    """
    stats, sequences = session.stats, session.sequences
    room = sequences.max_length - sequences.prompt_length
    if room < LEAST_TOKENS:
        stats.reason = f"Plain decoding: a trial of drafts does not pay for fewer than {LEAST_TOKENS} new tokens."
        return False
    steps: list[float] = []
    rounds, seconds, worth = 0, 0.0, 0.0  # worth: what plain decoding would have taken
    while sequences.active and len(steps) < STEPS:
        begun = session.clock()
        session.step()
        steps.append(session.clock() - begun)
    while sequences.active and rounds < ROUNDS and seconds - worth <= LOSS * median(steps) * room:
        begun = session.clock()
        worth += median(steps) * draft()
        seconds, rounds = seconds + session.clock() - begun, rounds + 1
    if not rounds:
        stats.reason = "Plain decoding: the sequences ended before drafts were timed."
        return False
    stats.paid, stats.trial_seconds = seconds <= worth, max(0.0, seconds - worth)
    stats.reason = (
        f"{'Drafting goes on' if stats.paid else 'Plain decoding'} after a trial: drafts of layers 1 to "
        f"{stats.speculate_from} were "
        f"{worth / seconds:.2f} times as fast as plain steps (rounds: {rounds}), which cost "
        f"{stats.trial_seconds:.2f} s."
    )
    return stats.paid


def speculate(session: DecodingSession, early: int, length: int, threshold: float | None) -> float:
    """One round: draft up to `length` tokens for every active sequence, and confirm them.

    Args:
        session: with the prompt decoded.
        early: E, layers that draft.
        length: K, maximum number of drafts.
        threshold: drafting ends where the largest probability of the next draft of every sequence is below it.

    Returns:
        Mean number of new tokens of a sequence.
    """
    sequences, choice, stats, last = session.sequences, session.choice, session.stats, session.num_layers
    ids, mask = sequences.window()
    start = ids.shape[1] - 1
    length = min(length, sequences.max_length - sequences.width - 1)  # no draft is beyond the model's positions
    states: list[Tensor] = []  # [A, 1, D] each: of layer E at the last known token and at drafts
    scores: list[Tensor] = []  # [A, V] each, of which a draft was chosen
    ended = torch.zeros(len(ids), dtype=torch.bool)
    while True:
        state = session.run(range(1, early + 1), session.begin(ids, mask, ids.shape[1] - 1))
        states.append(state)
        if len(scores) >= length:
            break
        logits = session.runner.finish(state, early)[:, -1]
        score = choice.scores(logits, len(scores))
        if threshold is not None and float(score.softmax(-1).amax(-1).max()) < threshold:
            break
        tokens = choice.choose(score)
        for row, token in zip(sequences.active, tokens.tolist(), strict=True):
            sequences.tokens[row, sequences.lengths[row] + len(scores)] = token
        ids, mask = torch.cat([ids, tokens[:, None]], dim=1), torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        scores.append(score)
        ended |= torch.tensor([token in sequences.end_tokens for token in tokens.tolist()])
        if bool(ended.all()):
            break
    reach = start + len(states)
    session.begin(ids[:, :reach], mask[:, :reach], start)
    logits = session.runner.finish(session.run(range(early + 1, last + 1), torch.cat(states, dim=1)))
    drafts = ids[:, start + 1 :]
    tokens_of = choice.accept(logits, drafts, scores)
    counts = session.commit(tokens_of)
    for drafted, new, count in zip(drafts.tolist(), tokens_of, counts, strict=True):
        ends = next((at for at, token in enumerate(drafted, start=1) if token in sequences.end_tokens), len(drafted))
        same = [own == other for own, other in zip(new[:count], drafted[:ends], strict=False)]
        stats.drafted += ends
        stats.accepted += [*same, False].index(False)
    stats.rounds += 1
    stats.sequence_rounds += len(ids)
    stats.added += sum(counts)
    return sum(counts) / len(ids)
