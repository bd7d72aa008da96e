"""`Mean`: a number of some samples, with its standard error over documents, rows or images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fulldepth.metrics.jackknife import ratio_error
from fulldepth.uncertainty import deal, share_interval


@dataclass(frozen=True)
class Mean:
    """A number of samples, with its standard error over clusters; None for fewer than three of them."""

    value: float
    error: float | None
    groups: int = 0
    """Groups of clusters."""
    samples: int = 0

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of a difference of shares (`uncertainty.share_interval`); None without a standard error."""
        return None if self.error is None else share_interval(self.value, self.error, self.groups, self.samples)

    @classmethod
    def of(cls, values: Tensor, cluster: Tensor) -> Mean:
        """The mean of `values: [N]`.

        Args:
            values: of each sample.
            cluster: `[N]` int64 identity of each sample's unit of independence (see `fulldepth.uncertainty`).
        """
        group = groups_of(cluster)
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, values.double())
        error = float(ratio_error(sums, group.bincount()))
        return cls(float(values.double().mean()), error if math.isfinite(error) else None, len(sums), len(values))


def groups_of(cluster: Tensor) -> Tensor:
    """[N] group of each sample, dealt by the hash of its cluster."""
    return torch.from_numpy(deal(cluster.cpu().numpy()))
