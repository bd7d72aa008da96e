"""Early exit: each token leaves at a layer of its own, with a correct cache for the layers that it did not visit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulldepth.execution.decoding.options import Options
from fulldepth.execution.decoding.rules import ExitRule
from fulldepth.execution.decoding.session import DecodingSession


def exiting_step(session: DecodingSession, options: Options) -> Callable[[], None]:
    """The function that decodes one token of every active sequence.

    Its first call also runs the prompts. Sequences of a batch share the layers up to the deepest exit, and each
    gets what it would get alone.

    Args:
        session: new.
        options: with a threshold or an exit layer.
    """
    if options.policy == "propagate":
        return lambda: _propagate(session, options)
    return _Recomputing(session, options).step


class _Exits:
    """Exit layers and predictions of the active sequences in one step."""

    def __init__(self, session: DecodingSession, options: Options) -> None:
        self._session, self._options = session, options
        self._rule = ExitRule(options.rule, options.threshold or 1.0, session.num_layers)
        self._layers = torch.zeros(len(session.sequences.active), dtype=torch.long)
        self._logits = torch.empty(0)

    @property
    def left(self) -> Tensor:
        """[A] bool: sequences whose token has left."""
        return self._layers > 0

    def check(self, layer: int, states: Tensor) -> bool:
        """Decide which tokens leave after a layer, from their states `[A, 1, D]`; returns whether all have left."""
        last, fixed = layer == self._session.num_layers, self._options.exit_layer
        if bool(self.left.all()) or (layer != fixed if fixed else layer < self._options.min_layer and not last):
            return bool(self.left.all())
        logits = self._session.runner.finish(states, layer)[:, -1]
        leaves = torch.ones(len(states), dtype=torch.bool) if last or fixed else self._rule.leaves(logits).cpu()
        leaves &= ~self.left
        if not len(self._logits):
            self._logits = torch.zeros_like(logits)
        self._logits[leaves.to(logits.device)] = logits[leaves.to(logits.device)]
        self._layers[leaves] = layer
        return bool(self.left.all())

    def commit(self) -> None:
        """Append the chosen tokens and count the exits."""
        stats = self._session.stats
        assert stats.exits is not None
        assert stats.exit_layers is not None
        for row, layer in zip(self._session.sequences.active, self._layers.tolist(), strict=True):
            stats.exits[layer - 1] += 1
            stats.exit_layers[row].append(layer)
        self._session.append(self._logits)


class _Recomputing:
    """Exact early exit: states wait where their token left, and layers run on them when a later token needs them.

    A layer then has the keys and values of all positions, from the same states as in a pass over the whole sequence.
    """

    def __init__(self, session: DecodingSession, options: Options) -> None:
        self._session, self._options = session, options
        self._waiting: dict[int, Tensor] = {}
        """Layer l -> `[A, N, D]` states of the positions that ran through layers 1..l and no further; they precede
        those that wait at earlier layers."""

    def step(self) -> None:
        """Decode one token of every active sequence."""
        session, exits = self._session, _Exits(self._session, self._options)
        ids, mask = session.sequences.window()
        states = session.begin(ids, mask, session.cache.lengths[0])
        for layer in range(1, session.num_layers + 1):
            if layer - 1 in self._waiting:
                states = torch.cat([self._waiting.pop(layer - 1), states], dim=1)
                session.begin(ids, mask, ids.shape[1] - states.shape[1])
            states = session.run((layer,), states)
            if exits.check(layer, states[:, -1:]):
                break
        if layer < session.num_layers:
            earlier = [self._waiting.pop(layer)] if layer in self._waiting else []
            self._waiting[layer] = torch.cat([*earlier, states], dim=1)
        exits.commit()
        if len(session.alive) < len(ids):
            self._waiting = {layer: states[session.alive] for layer, states in self._waiting.items()}


def _propagate(session: DecodingSession, options: Options) -> None:
    """Decode one token of every active sequence; later layers compute its keys and values from its state at the exit.

    Elbayad et al. 2020 (Depth-Adaptive Transformer, Section 3) copy states in this way, and CALM after them. The
    prompt runs through all layers.
    """
    exits = _Exits(session, options)
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
