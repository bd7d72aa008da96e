"""Losses of several models on the same held-out sequences, and their paired differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.core.uncertainty import Difference, mean_difference
from fulldepth.data.batches import Example
from fulldepth.execution.llama_cpp import LlamaCpp
from fulldepth.execution.predictions import DEVICE_BYTES, read_predictions
from fulldepth.execution.scoring import LOSS, ScoredBatch, batch_sums, kept, make_batches, predicted
from fulldepth.hf import device_of


@dataclass(frozen=True)
class HeldoutLosses:
    """Summed losses of every model on every sequence."""

    sums: Mapping[str, np.ndarray]
    """Label -> `[N]` nats; the first is the original."""
    tokens: np.ndarray
    """[N] tokens that count."""
    documents: np.ndarray
    """[N] the document of each sequence."""

    @classmethod
    def of_batches(cls, sums: Mapping[str, Sequence[float]], batches: Sequence[ScoredBatch]) -> HeldoutLosses:
        """The losses of all sequences of some batches, in their order."""
        tokens = np.array([count for batch in batches for count in batch.tokens], dtype=np.float64)
        documents = np.array([document for batch in batches for document in batch.documents])
        return cls({label: np.array(values) for label, values in sums.items()}, tokens, documents)

    @property
    def counted(self) -> HeldoutLosses:
        """The losses of the sequences in which a token counts."""
        counts = self.tokens > 0
        sums = {label: values[counts] for label, values in self.sums.items()}
        return HeldoutLosses(sums, self.tokens[counts], self.documents[counts])

    @property
    def count(self) -> int:
        """Tokens that count in all sequences."""
        return int(self.tokens.sum())

    def mean(self, label: str) -> float:
        """Nats per token."""
        return float(self.sums[label].sum()) / self.count

    def of(self, label: str) -> Difference:
        """Nats per token, with the standard error: the difference from 0."""
        return mean_difference(self.sums[label], self.tokens, self.documents, len(self.tokens))

    def rows(self, label: str) -> Iterator[tuple[Any, ...]]:
        """The rows of `loss`: the mean, the standard error of its difference to the original, and the number of groups
        by which that difference is measurable (`Difference.groups`).
        """
        yield "loss", "model", None, None, "mean", self.mean(label), self.count, "nats"
        added = self.added(label)
        if label != next(iter(self.sums)) and math.isfinite(added.standard_error):
            yield "loss", "model", None, None, "difference_stderr", added.standard_error, added.documents, "nats"
            yield "loss", "model", None, None, "difference_groups", added.groups, added.documents, "1"

    def added(self, label: str, other: str | None = None) -> Difference:
        """Loss of a model minus that of another one, on the same tokens; None = the original."""
        gaps = self.sums[label] - self.sums[other or next(iter(self.sums))]
        return mean_difference(gaps, self.tokens, self.documents, len(gaps))


@torch.no_grad()
def heldout_losses(
    models: Mapping[str, PreTrainedModel | LlamaCpp],
    examples: Sequence[Example],
    batch_size: int,
    watcher: Watcher,
    kinds: Sequence[str] = (LOSS,),
) -> dict[str, HeldoutLosses]:
    """Compute the loss of every model on every sequence, by ordinary forward passes, or by llama.cpp.

    Args:
        models: label -> a causal language model in evaluation mode, or one that llama.cpp serves; all have the same
            vocabulary.
        examples: held-out examples.
        batch_size: sequences per batch; fewer if their logits would take more than about half a GiB.
        watcher: receives progress after every batch.
        kinds: `loss`; `kl`, the divergence KL(first model || model); `greedy_agreement`, the number of tokens for which
            both predict the same next token.

    Returns:
        Kind -> its sums.

    Raises:
        FulldepthError: if no token of the examples counts, or a loss is NaN or infinite.
    """
    longest = max(map(len, examples), default=1)
    largest = max(vocabulary(model) for model in models.values())
    sequences = DEVICE_BYTES // (longest * largest * torch.float32.itemsize)
    configs = (model.config for model in models.values() if not isinstance(model, LlamaCpp))
    batches = make_batches(examples, min(batch_size, max(1, sequences)), next(configs, None))
    watcher.begin("Held-out loss", len(batches) * len(models))
    sums: dict[str, dict[str, list[float]]] = {kind: {label: [] for label in models} for kind in kinds}
    for batch in batches:
        first: Tensor | None = None
        for label, model in models.items():
            if isinstance(model, LlamaCpp):
                sums[LOSS][label] += batch_sums(model.losses(batch), batch)
            else:
                placed = batch.to(device_of(model))
                logits = model(**placed.inputs, use_cache=False).logits  # [B, T, V]
                logits = logits[placed.where.to(logits.device)]  # [R, V]
                first = logits if first is None else first
                base = predicted(None, first) if len(kinds) > 1 else ()
                columns = read_predictions(None, logits, placed.targets, kept(kinds, base))
                for kind, values in zip(kinds, columns, strict=True):
                    sums[kind][label] += batch_sums(values, placed)
            watcher.advance(1)
    if broken := [label for label, values in sums[LOSS].items() if not np.isfinite(values).all()]:
        raise FulldepthError(f"The held-out loss of {broken[0]} is NaN or infinite.")
    return {kind: HeldoutLosses.of_batches(by_label, batches) for kind, by_label in sums.items()}


def vocabulary(model: PreTrainedModel | LlamaCpp) -> int:
    """V, size of a model's vocabulary."""
    if isinstance(model, LlamaCpp):
        return model.vocab_size
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])
