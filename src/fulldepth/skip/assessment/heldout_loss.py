"""Losses of several models on the same held-out sequences, and standard errors of their differences.

The loss of a model is the mean of `-log q(token)` over all labelled tokens, in nats. Differences to the first model are
paired, on the same tokens; the cluster of their standard error is the document (`uncertainty.ratio_error`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from fulldepth.uncertainty import FEWEST_CLUSTERS, SIGNIFICANT, quantile, ratio_error

FEW_DOCUMENTS = 8
"""Documents below which Student's t replaces `SIGNIFICANT` standard errors."""


class AddedLoss(NamedTuple):
    """Loss of a model minus that of the original, on the same tokens."""

    mean: float
    """In nats per token."""
    error: float
    """Standard error over documents; NaN for fewer than `FEWEST_CLUSTERS` documents."""
    documents: int

    @property
    def least(self) -> float:
        """The smallest difference that is measurable, in nats."""
        return self.error * (SIGNIFICANT if self.documents >= FEW_DOCUMENTS else quantile(self.documents))

    def text(self, original: str) -> str:
        """The difference as a part of a sentence."""
        if not math.isfinite(self.error):
            few = f"an error takes {FEWEST_CLUSTERS} documents, these are {self.documents}"
            return f"{self.mean:+.4f} against {original} ({few})"
        if abs(self.mean) <= self.least:
            return f"no measurable difference from {original} (at most {abs(self.mean) + self.least:.4f} nats)"
        error = f"standard error {self.error:.4f}, {self.documents} documents"
        if self.documents < FEW_DOCUMENTS:
            error += f", measurable from {self.least / self.error:.1f} standard errors"
        return f"{self.mean:+.4f} against {original} ({error})"


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

    def added(self, label: str) -> AddedLoss:
        """Loss of a model minus that of the first."""
        gaps = self.sums[label] - next(iter(self.sums.values()))
        names, at = np.unique(self.documents, return_inverse=True)
        error = ratio_error(np.bincount(at, weights=gaps), np.bincount(at, weights=self.tokens))
        return AddedLoss(float(gaps.sum()) / self.count, float(error), len(names))


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
