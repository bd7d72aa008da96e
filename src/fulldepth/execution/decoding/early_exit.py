"""Early exit: each token leaves at a layer of its own, with a correct cache for the layers that it did not visit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulldepth.execution.decoding.candidates import Candidates
from fulldepth.execution.decoding.options import Options
from fulldepth.execution.decoding.rules import ExitRule
from fulldepth.execution.decoding.session import Session


def exiting_step(session: Session, options: Options) -> Callable[[], None]:
    """The function that decodes one token of every active sequence.

    Its first call also runs the prompts. Sequences of a batch share the layers up to the deepest exit, and each
    gets what it would get alone.

    Args:
        session: new.
        options: with a threshold or an exit layer.
    """
    if options.policy == "propagate" and options.exit_layer is None:
        return _Propagating(session, options).step
    return _Recomputing(session, options).step


class _Exits:
    """Exit layers and predictions of the active sequences in one step."""

    def __init__(self, session: Session, options: Options) -> None:
        self._session, self._options = session, options
        threshold = 1.0 if options.threshold is None else options.threshold
        self._rule = ExitRule(options.rule, threshold, session.num_layers)
        cheap = options.lens_candidates is not None and options.threshold is not None
        self._candidates = Candidates(session.runner, options) if cheap else None
        self._layers = torch.zeros(len(session.sequences.active), dtype=torch.long)
        self._logits: Tensor | None = None

    @property
    def left(self) -> Tensor:
        """[A] bool: sequences whose token has left."""
        return self._layers > 0

    def check(self, layer: int, states: Tensor) -> bool:
        """Decide which tokens leave after a layer, from their states `[A, 1, D]`; returns whether all have left."""
        if bool(self.left.all()):
            return True
        last, fixed = layer == self._session.num_layers, self._options.exit_layer
        if (fixed is not None and layer != fixed) or (layer < self._options.min_layer and not last and fixed is None):
            return False
        everywhere = last or fixed is not None
        rows = self._read_whole(states, layer, everywhere)
        if not len(rows):
            return False
        whole = states if len(rows) == len(states) else states[rows.to(states.device)]
        logits = self._session.runner.finish(whole, layer)[:, -1]
        self._session.stats.lens_positions += len(rows)
        leaves = torch.ones(len(rows), dtype=torch.bool) if everywhere else self._rule.leaves(logits).cpu()
        if self._candidates is not None and not everywhere:
            self._candidates.note(rows, logits)
        leaves &= ~self.left[rows]
        if self._logits is None:
            self._logits = logits.new_zeros(len(states), logits.shape[-1])
        self._logits[rows[leaves].to(logits.device)] = logits[leaves.to(logits.device)]
        self._layers[rows[leaves]] = layer
        return bool(self.left.all())

    def _read_whole(self, states: Tensor, layer: int, everywhere: bool) -> Tensor:
        """Indices of the sequences whose token is read with the whole head."""
        rows = torch.arange(len(states))
        if self._candidates is None:
            return rows
        return rows[~self.left if everywhere else ~self.left & self._candidates.may_leave(states, layer)]

    def commit(self) -> None:
        """Append the chosen tokens and count the exits."""
        assert self._logits is not None
        sequences, stats, choice = self._session.sequences, self._session.stats, self._session.choice
        assert stats.exits is not None
        assert stats.exit_layers is not None
        for row, layer in zip(sequences.active, self._layers.tolist(), strict=True):
            stats.exits[layer - 1] += 1
            stats.exit_layers[row].append(layer)
        self._session.commit([[token] for token in choice.choose(choice.scores(self._logits)).tolist()])


class _Recomputing:
    """Exact early exit: states wait where their token left, and layers run on them when a later token needs them.

    A layer then has the keys and values of all positions, from the same states as in a pass over the whole sequence.
    """

    def __init__(self, session: Session, options: Options) -> None:
        self._session, self._options = session, options
        self._waiting: dict[int, Tensor] = {}
        """Layer l -> `[A, N, D]` states of the positions that ran through layers 1..l and no further; they precede
        those that wait at earlier layers."""

    def step(self) -> None:
        """Decode one token of every active sequence."""
        session, exits = self._session, _Exits(self._session, self._options)
        ids, mask = session.sequences.window()
        width = ids.shape[1]
        start = session.cache.lengths[0]
        states = session.begin(ids, mask, start)
        for layer in range(1, session.num_layers + 1):
            if layer - 1 in self._waiting:
                states = torch.cat([self._waiting.pop(layer - 1), states], dim=1)
                start = width - states.shape[1]
                session.begin(ids, mask, start)
            states = session.run((layer,), states)
            if exits.check(layer, states[:, -1:]):
                break
        if layer < session.num_layers:
            earlier = self._waiting.pop(layer, None)
            self._waiting[layer] = states if earlier is None else torch.cat([earlier, states], dim=1)
        exits.commit()
        kept = session.alive
        if len(kept) < len(ids):
            self._waiting = {layer: states[kept] for layer, states in self._waiting.items()}


class _Propagating:
    """Approximate early exit: later layers compute keys and values of a token from its state at the exit, nothing else.

    Elbayad et al. 2020 (Depth-Adaptive Transformer, Section 3) copy states in this way, and CALM after them. The
    prompt runs through all layers.
    """

    def __init__(self, session: Session, options: Options) -> None:
        self._session, self._options = session, options

    def step(self) -> None:
        """Decode one token of every active sequence."""
        session, exits = self._session, _Exits(self._session, self._options)
        ids, mask = session.sequences.window()
        is_prompt = not session.cache.lengths[0]
        states = session.begin(ids, mask, session.cache.lengths[0])
        for layer in range(1, session.num_layers + 1):
            after = session.run((layer,), states)
            left = exits.left.to(after.device).view(-1, *[1] * (after.ndim - 1))
            states = after if is_prompt else torch.where(left, states, after)
            if exits.check(layer, states[:, -1:]) and not is_prompt:
                session.write(range(layer + 1, session.num_layers + 1), states)
                break
        exits.commit()
