"""Effective depth: the first layer that reaches a target accuracy (aligned training, Def. 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.uncertainty import crossing

EPSILONS = (0.01, 0.05, 0.1, 0.2)
"""Tolerances relative to perfect accuracy (Def. 1)."""
RELATIVE_EPSILONS = (0.01, 0.05, 0.1)
"""Tolerances relative to the last layer's accuracy."""
STATISTICS = (*(f"eps={eps:g}" for eps in EPSILONS), *(f"relative_eps={eps:g}" for eps in RELATIVE_EPSILONS))
LOW_OF, HIGH_OF = "low_of_", "high_of_"


def effective_depth(accuracy: Tensor | Sequence[float], eps: float, relative: bool = False) -> int:
    r"""The eps-effective depth.

    .. math:: \min \{ l : \mathrm{Acc}^{(l)} \ge 1 - \epsilon \}, \text{ else } L

    Few models reach `1 - eps` on language; `relative=True` uses the threshold `(1 - eps) Acc^(L)` instead, which the
    last layer always reaches. (If the last layer is never correct, the result is 1.)

    Args:
        accuracy: layer-wise accuracy of layers 1..L, `[L]`; NaN is below every threshold.
        eps: tolerance in [0, 1].
        relative: take the threshold relative to the last layer's accuracy rather than to 1.

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

    NaN if no position has a target or, for the relative form, if the last layer is never correct. A depth is a step, so
    it has a 95 % interval instead of a standard error (see `uncertainty.crossing`): `low_of_` is the first layer whose
    accuracy is not below the threshold by more than the error of the (paired) difference, `high_of_` the first whose
    accuracy is above it by more than that error.
    """

    name = "effective_depth"
    units = dict.fromkeys((kind + statistic for kind in ("", LOW_OF, HIGH_OF) for statistic in STATISTICS), "layers")
    needs = frozenset({"targets"})
    correct: Tensor
    count: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_grouped("correct", setup.num_layers)
        self.add_grouped("count", dtype=torch.int64)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        correct = observation.lens.correct[1:].T.to(self.correct)  # [M, L]
        group = observation.lens_groups(self.setup).to(self.count.device)
        self.correct.index_add_(0, group, correct)
        self.count += group.bincount(minlength=len(self.count))

    def compute(self) -> tuple[dict[str, float], int]:
        """Statistic -> value (depths, and the intervals that are known), and the number of positions."""
        count = int(self.count.sum())
        accuracy = self.correct.sum(0).cpu() / count
        named: dict[str, float] = {}
        for name, eps in zip(STATISTICS, (*EPSILONS, *RELATIVE_EPSILONS), strict=True):
            relative = name.startswith("relative")
            if not count or (relative and not accuracy[-1] > 0):
                named[name] = math.nan
                continue
            named[name] = float(effective_depth(accuracy, eps, relative))
            target = (1 - eps) * (self.correct[:, -1:] if relative else self.count[:, None])
            if interval := crossing((target - self.correct).cpu().numpy(), self.count.cpu().numpy()):
                named |= {LOW_OF + name: interval[0] + 1.0, HIGH_OF + name: interval[1] + 1.0}
        return named, count

    def rows(self) -> list[Row]:
        """One row for each tolerance, and two for its interval if it is known; `layer` is None."""
        return self.rows_of(*self.compute())
