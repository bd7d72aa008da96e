r"""When a sample leaves: a rule, a threshold and the first layer that allows it.

A sample leaves after the first layer l >= `min_layer` at which its value exceeds the threshold t, else after the last
layer L. With the probabilities :math:`p_1 \ge p_2 \ge \ldots` of the classifier applied to :math:`h_l`, and C classes,
the value is

- `confidence`: :math:`p_1`;
- `margin`: :math:`p_1 - p_2`;
- `entropy`: :math:`1 + \sum_c p_c \log p_c / \log C`;
- `patience`: :math:`r / L`, where the r layers up to this one, all from `min_layer` on, predict the same class.

All are at most 1, so t = 1 is the full model.

Source: "Representation progression and aligned training", Sec. 2.2 (confidence); `execution.decoding.rules`, which
decoding shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulldepth.execution.decoding import ExitRule
from fulldepth.settings.exit import Rule


@dataclass(frozen=True)
class Exit:
    """A rule with its threshold, for a model of L layers."""

    rule: Rule
    threshold: float
    min_layer: int
    num_layers: int

    @property
    def is_full(self) -> bool:
        """Whether no sample leaves before the last layer, whatever it predicts."""
        return self.threshold >= 1

    def decision(self) -> ExitRule:
        """The rule, to be called once for every layer from `min_layer` on."""
        return ExitRule(self.rule, self.threshold, self.num_layers)

    def layers(self, certainty: Tensor, prediction: Tensor) -> Tensor:
        """[N] layer after which each sample leaves, 1..L.

        Args:
            certainty: `[L, N]` of layers 1..L; not read by `patience`.
            prediction: `[L, N]` predicted classes.
        """
        left = torch.full((prediction.shape[1],), self.num_layers, dtype=torch.int64)
        staying = torch.ones_like(left, dtype=torch.bool)
        rule = self.decision()
        for layer in range(self.min_layer, self.num_layers):
            leaves = rule.decide(certainty[layer - 1], prediction[layer - 1]) & staying
            left[leaves] = layer
            staying &= ~leaves
        return left
