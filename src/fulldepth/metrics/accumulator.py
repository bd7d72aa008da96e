"""`Accumulator`: base class of metrics that are accumulated over batches and processes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

CPU = torch.device("cpu")


class Accumulator(Metric):
    """A metric whose states are tensors of a fixed size, each initialised with one value.

    torchmetrics stores a default for every state; here the default is a single expanded number, not a full copy.
    """

    full_state_update = False

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float64,
        fill: int | None = 0,
        reduce: Literal["sum", "max", "cat"] = "sum",
        device: torch.device = CPU,
    ) -> None:
        """Add a state; `reduce` is the reduction over processes.

        With `fill=None` it begins uninitialised, so that a CPU holds only the pages that data are written to.
        """
        self.add_state(name, torch.empty(0, device=device), dist_reduce_fx=reduce)
        self._defaults[name] = torch.full((), fill or 0, dtype=dtype, device=device).expand(shape)
        state = torch.empty(shape, dtype=dtype, device=device)
        setattr(self, name, state if fill is None else state.fill_(fill))

    @property
    def nbytes(self) -> int:
        """Size of the states in bytes; independent of the size of the data set."""
        return self.own_bytes

    @property
    def own_bytes(self) -> int:
        """Size in bytes of the states of this accumulator alone."""
        return sum(state.nbytes for state in self.metric_state.values() if isinstance(state, Tensor))
