"""Data loading of a run: order of the items, number of worker processes, and collation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import default_data_collator

from fulldepth.data import ShuffledSampler, flatten_windows
from fulldepth.errors import FulldepthError
from fulldepth.losses import per_batch_terms
from fulldepth.losses.trainer import AnyTrainer
from fulldepth.training.settings import TrainSettings

MOST_WORKERS = 4
"""Default maximum for each training process; few suffice, as reading a window is a copy from the page cache."""
SMALL_RUN = 1 << 24
"""Tokens below which a run starts no workers by default: starting them takes longer than reading all tokens."""
FORKS = "TOKENIZERS_PARALLELISM"


def worker_count(settings: TrainSettings, processes: int) -> int:
    """Data loading processes of each training process: `workers`, or by default up to four, one for each core.

    Args:
        settings: the run's settings.
        processes: training processes on this machine.
    """
    if settings.workers is not None:
        return settings.workers
    if settings.steps * settings.global_batch_size * settings.sequence_length < SMALL_RUN:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_WORKERS, cores // processes)


def window_collator(settings: TrainSettings) -> Callable[[list[Any]], dict[str, Any]]:
    """The collator of windows: one row per window, or one row in all where flash attention must separate documents.

    Raises:
        FulldepthError: if a penalty needs each window in a row of its own.
    """
    if settings.data.across_documents or settings.attention != "flash_attention_2":
        return default_data_collator
    for name in per_batch_terms(settings.objective.terms):
        raise FulldepthError(
            f"With attention=flash_attention_2 and data.across_documents=false a batch is one long row, and "
            f"{name} is a function of each sequence. Use attention=sdpa, or across_documents=true."
        )
    return flatten_windows


class LoadingMixin(AnyTrainer):
    """Gives a Trainer with `settings` the order of a run: one pass of `steps * global_batch_size` items.

    Every step is a full batch, also across epoch boundaries. Batches do not depend on the numbers of processes, workers
    and micro-batches, or on resuming.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> ShuffledSampler:
        settings: TrainSettings = self.settings
        items = len(self.train_dataset if train_dataset is None else train_dataset)
        return ShuffledSampler(items, seed=settings.seed, length=settings.steps * settings.global_batch_size)

    def get_train_dataloader(self) -> Any:
        """The Trainer's data loader, with workers that ignore SIGTERM."""
        loader = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's adapter forwards attribute reads, not writes
        inner.worker_init_fn = partial(_start_worker, inner.worker_init_fn)
        return loader

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, without warnings of tokenizers in workers."""
        with _silent_forks():
            return super().train(*args, **kwargs)


def _start_worker(start: Callable[[int], None] | None, number: int) -> None:
    """Ignore SIGTERM: schedulers send it to every process, and a dying worker would end the run before it saves."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if start is not None:
        start(number)


@contextmanager
def _silent_forks() -> Iterator[None]:
    """Suppress the fork warning of tokenizers in every worker; workers tokenise nothing."""
    before = os.environ.get(FORKS)
    os.environ.setdefault(FORKS, "false")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(FORKS, None)
