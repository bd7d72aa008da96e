r"""When a sample leaves: a rule, a threshold and the first layer that allows it.

A sample leaves after the first layer l >= `min_layer` at which its rule holds, else after the last layer L. With the
probabilities :math:`p_1 \ge p_2 \ge \ldots` of the classifier applied to :math:`h_l`, C classes, and a threshold t < 1:

- `confidence`: :math:`p_1 \ge t`;
- `margin`: :math:`p_1 - p_2 \ge t`;
- `entropy`: :math:`1 + \sum_c p_c \log p_c / \log C \ge t`;
- `patience`: the layers :math:`l - n + 1, \ldots, l`, all from `min_layer` on, predict the same class, where
  :math:`n = \lceil t L \rceil`.

t = 1 is the full model for every rule: all samples leave after layer L.

Source: "Representation progression and aligned training", Sec. 2.2 (confidence); Zhou et al., "BERT loses patience"
(NeurIPS 2020; patience).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fulldepth.settings.exit import Rule


@dataclass(frozen=True)
class Exit:
    """A rule with its threshold, for a model of L layers."""

    rule: Rule
    threshold: float
    min_layer: int
    num_layers: int

    @property
    def patience(self) -> int:
        """n, the number of layers in a row that must agree."""
        return max(1, math.ceil(round(self.threshold * self.num_layers, 9)))  # 0.7 * 10 is above 7 in floating point

    def layers(self, certainty: Tensor, prediction: Tensor) -> Tensor:
        """[N] layer after which each sample leaves, 1..L.

        Args:
            certainty: `[L, N]` of layers 1..L (see `certainty`); not read by `patience`.
            prediction: `[L, N]` predicted classes.
        """
        left = torch.full_like(prediction[0], self.num_layers)
        staying = torch.ones_like(left, dtype=torch.bool)
        queue = Queue(self)
        for layer in range(self.min_layer, self.num_layers):
            leaves = queue.leaving(certainty[layer - 1], prediction[layer - 1]) & staying
            left[leaves] = layer
            staying &= ~leaves
        return left


class Queue:
    """The samples that have not left yet, from layer `min_layer` on.

    Args:
        exit: the rule.
    """

    def __init__(self, exit: Exit) -> None:
        self._exit = exit
        self._previous: Tensor | None = None
        self._agreeing: Tensor | None = None

    def leaving(self, certainty: Tensor, prediction: Tensor) -> Tensor:
        """[N] bool: whether each sample leaves after the next layer; call once for every layer, in order.

        Args:
            certainty: `[N]`.
            prediction: `[N]` predicted classes.
        """
        if self._exit.threshold >= 1:
            return torch.zeros_like(prediction, dtype=torch.bool)
        if self._exit.rule != "patience":
            return certainty.double() >= self._exit.threshold
        if self._previous is None or self._agreeing is None:
            self._agreeing = torch.ones_like(prediction)
        else:
            self._agreeing = torch.where(prediction == self._previous, self._agreeing + 1, 1)
        self._previous = prediction
        return self._agreeing >= self._exit.patience

    def keep(self, rows: Tensor) -> None:
        """Keep these samples only: indices, or a mask over `[N]`."""
        if self._previous is not None and self._agreeing is not None:
            self._previous, self._agreeing = self._previous[rows], self._agreeing[rows]


def certainty(logits: Tensor, rule: Rule) -> Tensor:
    """[N] the value that is compared with the threshold, in [0, 1]; zeros for `patience`, which reads predictions.

    Args:
        logits: `[N, C]`, in float32 or float64.
        rule: name of the rule.
    """
    if rule == "patience":
        return logits.new_zeros(len(logits))
    if rule == "entropy":
        shifted = logits - logits.logsumexp(-1, keepdim=True)
        entropy = -(shifted.exp() * shifted.clamp(min=torch.finfo(logits.dtype).min)).sum(-1)
        return (1 - entropy / math.log(max(2, logits.shape[-1]))).clamp(0, 1)
    total = logits.logsumexp(-1)
    if rule == "confidence":
        return (logits.amax(-1) - total).exp().clamp(max=1)
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    return ((best - total).exp() - (second - total).exp()).clamp(0, 1)


def theoretical_speedup(exits: Tensor) -> float:
    r"""Layers of the full model over layers that are run: :math:`\sum_i L m_i / \sum_i i m_i`, in [1, L].

    Args:
        exits: `[L]` number of samples that leave after layers 1..L, :math:`m_i`; at least one in all.

    Source: "Representation progression and aligned training", App. (SPEC section 3).
    """
    exits = exits.double()
    layers = torch.arange(1, len(exits) + 1, dtype=torch.float64, device=exits.device)
    return float(len(exits) * exits.sum() / (layers * exits).sum())
