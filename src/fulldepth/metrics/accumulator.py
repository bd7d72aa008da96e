"""`Accumulator`: the base of everything that is summed over batches and processes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

CPU = torch.device("cpu")


class Accumulator(Metric):
    """A metric whose states are tensors of a fixed size, each filled with one value at the start.

    torchmetrics keeps a copy of every state's default beside it; here that copy is one number, expanded.
    """

    full_state_update = False

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float64,
        fill: int = 0,
        reduce: Literal["sum", "max", "cat"] = "sum",
        device: torch.device = CPU,
    ) -> None:
        """Add a state; `reduce` says how those of several processes become one."""
        self.add_state(name, torch.empty(0, device=device), dist_reduce_fx=reduce)
        self._defaults[name] = torch.full((), fill, dtype=dtype, device=device).expand(shape)
        setattr(self, name, torch.full(shape, fill, dtype=dtype, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes that the states hold, for a data set of any size."""
        return sum(state.nbytes for state in self.metric_state.values() if isinstance(state, Tensor))
