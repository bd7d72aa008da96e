r"""A cheap test of whether a token may leave, from the logits of a few tokens.

The rules `confidence` and `margin` compare a value of the probabilities :math:`p` over the vocabulary with a threshold.
The same value of :math:`p_c / p(S)`, the probabilities over a set S of candidates, is at least as large as that over
all tokens, provided that the most probable token is in S:
:math:`p_1 / p(S) \ge p_1`, and :math:`(p_1 - p_{2'}) / p(S) \ge p_1 - p_2` with the second of S. If it does not exceed
the threshold, the layer need not be read whole. If it does, the layer is read whole and the rule is applied to that. So
a token leaves only where the rule itself lets it leave; it may leave later than with every layer read whole, where the
most probable token is not among the candidates.

S is the K most probable tokens of the last layer that was read whole for this position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.execution.decoding.options import Options
from fulldepth.execution.decoding.rules import certainty
from fulldepth.execution.layer_runner import LayerRunner


class Candidates:
    """The candidates of the positions of one step.

    Args:
        runner: of the model.
        options: with `lens_candidates`, a rule and a threshold.
    """

    def __init__(self, runner: LayerRunner, options: Options) -> None:
        assert options.lens_candidates is not None
        assert options.threshold is not None
        self._runner, self._rule, self._threshold = runner, options.rule, options.threshold
        self._count, self._tokens = options.lens_candidates, torch.empty(0)

    def may_leave(self, states: Tensor, layer: int) -> Tensor:
        """[A] bool, on the CPU: positions that have to be read whole, from states `[A, T, D]` of which the last counts.

        All of them before the first `note`.
        """
        if not self._tokens.numel():
            return torch.ones(len(states), dtype=torch.bool)
        values = certainty(self._runner.finish_some(states, self._tokens, layer), self._rule)
        return (values.double() > self._threshold).cpu()

    def note(self, rows: Tensor, logits: Tensor) -> None:
        """Take the most probable tokens of positions that were read whole.

        Args:
            rows: `[R]` indices of the positions; all of them at the first call.
            logits: `[R, V]`.
        """
        best = logits.topk(min(self._count, logits.shape[-1]), dim=-1).indices
        if not self._tokens.numel():
            self._tokens = best
        else:
            self._tokens[rows.to(best.device)] = best
