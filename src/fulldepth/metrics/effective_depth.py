"""Effective depth: the first layer that reaches a target accuracy (aligned training, Def. 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.jackknife import leave_one_out, standard_error

EPSILONS = (0.01, 0.05, 0.1, 0.2)
"""Tolerances relative to perfect accuracy (Def. 1)."""
RELATIVE_EPSILONS = (0.01, 0.05, 0.1)
"""Tolerances relative to the last layer's accuracy."""
STATISTICS = (*(f"eps={eps:g}" for eps in EPSILONS), *(f"relative_eps={eps:g}" for eps in RELATIVE_EPSILONS))
ERROR_OF = "standard_error_of_"


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

    NaN if no position has a target or, for the relative form, if the last layer is never correct. Each has a standard
    error over sequences; it is 0 if every replicate gives the same layer.
    """

    name = "effective_depth"
    units = dict.fromkeys((*STATISTICS, *(ERROR_OF + statistic for statistic in STATISTICS)), "layers")
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
        """Statistic -> value (depths and their standard errors), and the number of positions."""
        depths = _depths(self.correct.sum(0), self.count.sum(0))
        without = torch.stack(
            [_depths(*sums) for sums in zip(leave_one_out(self.correct), leave_one_out(self.count), strict=True)]
        )
        errors = standard_error(without)
        named = dict(zip(STATISTICS, depths.tolist(), strict=True))
        named |= {ERROR_OF + name: error for name, error in zip(STATISTICS, errors.tolist(), strict=True)}
        return named, int(self.count.sum())

    def rows(self) -> list[Row]:
        """One row for each tolerance and one for its standard error if it is known; `layer` is None."""
        return self.rows_of(*self.compute())


def _depths(correct: Tensor, count: Tensor) -> Tensor:
    """[S] the depths of `STATISTICS`, from correct predictions `[L]` and the number of positions."""
    accuracy = correct / count
    if not count:
        return torch.full((len(STATISTICS),), torch.nan, dtype=torch.float64)
    depths = [float(effective_depth(accuracy, eps)) for eps in EPSILONS]
    right = bool(accuracy[-1] > 0)
    depths += [float(effective_depth(accuracy, eps, True)) if right else torch.nan for eps in RELATIVE_EPSILONS]
    return torch.tensor(depths, dtype=torch.float64)
