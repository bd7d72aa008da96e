"""Effective depth: the first layer that is accurate enough (aligned training, Def. 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup

EPSILONS = (0.01, 0.05, 0.1, 0.2)
"""Tolerances of Def. 1: short of perfect accuracy."""
RELATIVE_EPSILONS = (0.01, 0.05, 0.1)
"""Tolerances short of the last layer's accuracy."""


def effective_depth(accuracy: Tensor | Sequence[float], eps: float, relative: bool = False) -> int:
    r"""The eps-effective depth.

    .. math:: \min \{ l : \mathrm{Acc}^{(l)} \ge 1 - \epsilon \}, \text{ else } L

    Few models reach `1 - eps` on language; `relative=True` asks instead for `(1 - eps) Acc^(L)`, which the last layer
    always reaches. (If the last layer is never right, layer 1 is as good as it, and the answer is 1.)

    Args:
        accuracy: layer-wise accuracy of layers 1..L, `[L]`; a NaN reaches nothing.
        eps: tolerance in [0, 1].
        relative: measure against the last layer's accuracy rather than against 1.

    Returns:
        A 1-based layer in 1..L.

    Raises:
        ValueError: if `eps` is out of range or `accuracy` does not hold one value per layer.

    Source: "Representation progression and aligned training", Def. 1; the relative form is ours.
    """
    values = accuracy if isinstance(accuracy, Tensor) else torch.tensor(accuracy, dtype=torch.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"accuracy must hold one value per layer, [L], got shape {tuple(values.shape)}")
    if not 0 <= eps <= 1:
        raise ValueError(f"eps must lie in [0, 1], got {eps}")
    target = (1 - eps) * values[-1] if relative else 1 - eps
    enough = (values >= target).nonzero()
    return int(enough[0]) + 1 if len(enough) else len(values)


class EffectiveDepth(Measure):
    """Effective depth for several tolerances, absolute (Def. 1) and relative to the last layer's accuracy.

    NaN where there is nothing to say: no position has a target or, for the relative form, the last layer is never
    right.
    """

    name = "effective_depth"
    units = dict.fromkeys(
        [f"eps={eps:g}" for eps in EPSILONS] + [f"relative_eps={eps:g}" for eps in RELATIVE_EPSILONS], "layers"
    )
    needs = frozenset({"targets"})
    correct: Tensor
    count: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("correct", setup.num_layers)
        self.add_sum("count", dtype=torch.int64)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        correct = observation.lens.correct[1:]  # [L, M]
        self.correct += correct.sum(1).to(self.correct)
        self.count += correct.shape[1]

    def compute(self) -> tuple[dict[str, float], int]:
        """Statistic -> layer, and the number of positions behind it."""
        accuracy, count = self.correct / self.count, int(self.count)
        depths = {f"eps={eps:g}": float(effective_depth(accuracy, eps)) for eps in EPSILONS}
        relative = {f"relative_eps={eps:g}": float(effective_depth(accuracy, eps, True)) for eps in RELATIVE_EPSILONS}
        if not count:
            depths = dict.fromkeys(depths, torch.nan)
        if not accuracy[-1] > 0:
            relative = dict.fromkeys(relative, torch.nan)
        return depths | relative, count

    def rows(self) -> list[Row]:
        """One row for each tolerance; they belong to no layer."""
        depths, count = self.compute()
        return [
            Row(self.name, "residual", None, None, statistic, value, count, "layers")
            for statistic, value in depths.items()
        ]

    @classmethod
    def memory(cls, setup: Setup) -> int:
        """Bytes held: a sum per layer and one count."""
        return 8 * (setup.num_layers + 1)
