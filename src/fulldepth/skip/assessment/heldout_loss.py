r"""Losses of several models on the same held-out sequences, and standard errors of their differences.

The loss of a model is the mean of `-log q(token)` over all labelled tokens, in nats. Differences to the first model are
computed on the same tokens; the standard error sums by document (`selection/elimination.py`), as an
estimate for any such data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from fulldepth.data.batches import Example
from fulldepth.errors import FulldepthError
from fulldepth.execution.scoring import DEVICE_LOGITS, Batch, batch_sums
from fulldepth.hf import device_of
from fulldepth.progress import Watcher
from fulldepth.skip.scored_batches import make_batches
from fulldepth.skip.selection.elimination import Difference, compare


@dataclass(frozen=True)
class HeldoutLosses:
    """Summed losses of every model on every sequence."""

    sums: Mapping[str, np.ndarray]
    """Label -> `[N]` nats; the others are compared with the first model."""
    tokens: np.ndarray
    """[N] tokens that count."""
    documents: np.ndarray
    """[N] the document of each sequence."""

    @property
    def count(self) -> int:
        """Tokens that count in all sequences."""
        return int(self.tokens.sum())

    def mean(self, label: str) -> float:
        """Nats per token."""
        return float(self.sums[label].sum()) / self.count

    def added(self, label: str) -> Difference:
        """Loss of a model minus that of the first, in nats per token."""
        first = next(iter(self.sums.values()))
        return compare(self.sums[label] - first, self.tokens, self.documents, len(self.tokens))


def heldout_losses(
    models: Mapping[str, PreTrainedModel], examples: Sequence[Example], batch_size: int, watcher: Watcher
) -> HeldoutLosses:
    """Compute the loss of every model on every sequence, by ordinary forward passes.

    Args:
        models: label -> a causal language model in evaluation mode; all have the same vocabulary.
        examples: held-out examples.
        batch_size: sequences per batch; fewer if their logits would take more than about half a GiB.
        watcher: receives progress after every batch.

    Raises:
        FulldepthError: if no token of the examples counts, or a loss is NaN or infinite.
    """
    longest = max(map(len, examples), default=1)
    largest = max(vocabulary(model) for model in models.values())
    batches = make_batches(examples, min(batch_size, max(1, DEVICE_LOGITS // (longest * largest))))
    watcher.begin("Held-out loss", len(batches) * len(models))
    sums: dict[str, list[float]] = {label: [] for label in models}
    for batch in batches:
        for label, model in models.items():
            sums[label] += _sums(model, batch)
            watcher.advance(1)
    if broken := [label for label, values in sums.items() if not np.isfinite(values).all()]:
        raise FulldepthError(f"The held-out loss of {broken[0]} is NaN or infinite.")
    return HeldoutLosses(
        {label: np.array(values) for label, values in sums.items()},
        np.array([count for batch in batches for count in batch.tokens], dtype=np.float64),
        np.array([document for batch in batches for document in batch.documents]),
    )


def vocabulary(model: PreTrainedModel) -> int:
    """V, size of a model's vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


@torch.no_grad()
def _sums(model: PreTrainedModel, batch: Batch) -> list[float]:
    """Nats of each sequence of a batch."""
    placed = batch.to(device_of(model))
    logits = model(**placed.inputs, use_cache=False).logits  # [B, T, V]
    rows = logits[placed.where.to(logits.device)]  # [R, V]
    rows = rows.float() if rows.dtype.itemsize < 4 else rows
    losses = functional.cross_entropy(rows, placed.targets.to(rows.device), reduction="none")
    return batch_sums(losses, placed)
