"""Metrics that are accumulated over batches and processes, and a seeded, capped sample of tokens."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import ranks

CPU = torch.device("cpu")
CHUNK = 128
"""Tokens that are copied at a time."""


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
        return sum(state.nbytes for state in self.metric_state.values() if isinstance(state, Tensor))


EMPTY = torch.iinfo(torch.int64).max
"""Priority of a free slot, larger than that of any token."""


def priority(keys: Tensor, seed: int) -> Tensor:
    """A pseudo-random int64 in [0, 2^62) for every key: a deterministic function of key and seed.

    The `k` smallest priorities of a data set are a uniform sample of size `k` without replacement, independent of
    batching and of the number of processes. They are `uncertainty.ranks` of the keys, with the top bit set for even
    seeds.
    """
    numbers = keys.cpu().numpy().astype(np.uint64) ^ np.uint64((seed + 1) % 2 << 63)
    return torch.from_numpy((ranks(numbers, seed) & np.uint64((1 << 62) - 1)).astype(np.int64)).to(keys.device)


class Sample:
    """The tokens of a reservoir, in the order of the data. They share its memory and are valid until it is updated.

    This is not a tuple, because torchmetrics squeezes one-element tensors in tuples that `compute` returns.

    Attributes:
        features: [N, *shape], float32 unless the reservoir was made for another precision.
        keys: [N] int64.
        labels: [N] int64, -100 for tokens without a label.
        seen: number of tokens offered; the sample is complete if this is N.
    """

    def __init__(self, features: Tensor, keys: Tensor, labels: Tensor, seen: int) -> None:
        self.features = features
        self.keys = keys
        self.labels = labels
        self.seen = seen


class Reservoir(Accumulator):
    """Keeps the `capacity` tokens of smallest seeded priority, with their features and labels.

    Args:
        capacity: maximum number of tokens.
        shape: shape of one token's features, for example (L+1, D).
        seed: seed of the priorities.
        device: device of the sample.
        dtype: precision of the features.
    """

    features: Tensor
    keys: Tensor
    labels: Tensor
    priorities: Tensor
    seen: Tensor

    def __init__(
        self,
        capacity: int,
        shape: tuple[int, ...],
        seed: int = 0,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"a reservoir keeps at least one token, got capacity {capacity}")
        self.capacity = capacity
        self.shape = tuple(shape)
        self.seed = seed
        self.add("features", (capacity, *shape), dtype=dtype, fill=None, reduce="cat", device=device)
        for name, fill in (("keys", 0), ("labels", 0), ("priorities", EMPTY)):
            self.add(name, (capacity,), dtype=torch.int64, fill=fill, reduce="cat", device=device)
        self.add("seen", (), dtype=torch.int64, device=device)
        self._last: Any = None

    def update(self, features: Tensor, keys: Tensor, labels: Tensor | None = None) -> None:
        """Offer a batch: `features [N, *shape]`, `keys [N]` unique over the data set, `labels [N]`."""
        self.seen += len(keys)
        priorities = priority(keys.to(self.priorities.device), self.seed)
        offered = (priorities < self.priorities.max()).nonzero().flatten()
        pool = torch.cat([self.priorities, priorities[offered]])
        best = pool.argsort()[: self.capacity]
        stays = torch.zeros(len(pool), dtype=torch.bool, device=pool.device)
        stays[best] = True
        slots = (~stays[: self.capacity]).nonzero().flatten()
        new = offered[stays[self.capacity :]]
        slots = slots[: len(new)]
        source = new.to(features.device)
        for targets, tokens in zip(slots.split(CHUNK), source.split(CHUNK), strict=True):
            self.features[targets] = features[tokens].to(self.features)
        self.keys[slots] = keys[source.to(keys.device)].to(self.keys)
        self.labels[slots] = IGNORE if labels is None else labels[source.to(labels.device)].to(self.labels)
        self.priorities[slots] = priorities[new]

    def observe(self, observation: Any, site: str) -> None:
        """Offer the counted tokens of an observation, once even if several measures that share the reservoir do so."""
        if observation is self._last:
            return
        self._last = observation
        features = observation.tokens if site == "residual" else observation.features(site)
        self.update(features.transpose(0, 1), observation.keys, observation.token_labels)

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self._last = None

    def compute(self) -> Sample:
        """Return the sample over all processes, sorted by key, so that sums do not depend on the split of the data.

        The tokens are sorted in place, because a copy may be as large as everything else that a run holds.
        """
        priorities = self.priorities.flatten()
        keys = self.keys.flatten()
        best = priorities.argsort()[: self.capacity]
        best = best[priorities[best] < EMPTY]
        best = best[keys[best].argsort()]
        features = self.features.flatten(0, -len(self.shape) - 1)  # [tokens of all processes, *shape]
        with torch.inference_mode(features.is_inference()):
            for part in features.unbind(1) if self.shape else (features,):
                part[: len(best)] = part[best]
            for state in (self.keys, self.labels, self.priorities):
                flat = state.view(-1)
                flat[: len(best)] = flat[best]
            self.priorities.view(-1)[len(best) :] = EMPTY
        count = len(best)
        return Sample(features[:count], self.keys.flatten()[:count], self.labels.flatten()[:count], int(self.seen))
