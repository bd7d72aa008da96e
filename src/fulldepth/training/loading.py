"""How a run reads its items: in which order, with how many worker processes, in which shape."""

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
"""Of a training process, unless `workers` says otherwise: reading a window is a copy out of the page cache."""
SMALL_RUN = 1 << 24
"""Tokens; a run that reads fewer starts no workers by itself: starting them takes longer than all of its reading."""
FORKS = "TOKENIZERS_PARALLELISM"


def worker_count(settings: TrainSettings, processes: int) -> int:
    """Processes that load data for each training process: `workers`, or by default up to four, one for each core.

    Args:
        settings: of the run.
        processes: that train on this machine.
    """
    if settings.workers is not None:
        return settings.workers
    if settings.steps * settings.global_batch_size * settings.sequence_length < SMALL_RUN:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_WORKERS, cores // processes)


def window_collator(settings: TrainSettings) -> Callable[[list[Any]], dict[str, Any]]:
    """What makes a batch out of windows: rows, or one row where attention could not keep documents apart otherwise.

    Raises:
        FulldepthError: if a penalty needs the windows as rows of their own.
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

    Every step is a full batch, also where one epoch of the data ends and the next begins; the numbers of processes, of
    workers and of micro-batches change no batch, and neither does a resumption.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> ShuffledSampler:
        settings: TrainSettings = self.settings
        items = len(self.train_dataset if train_dataset is None else train_dataset)
        return ShuffledSampler(items, seed=settings.seed, length=settings.steps * settings.global_batch_size)

    def get_train_dataloader(self) -> Any:
        """The Trainer's own, with workers that leave SIGTERM to the process that trains."""
        loader = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's adapter hands reads on, not writes
        inner.worker_init_fn = partial(_start_worker, inner.worker_init_fn)
        return loader

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        with _silent_forks():
            return super().train(*args, **kwargs)


def _start_worker(start: Callable[[int], None] | None, number: int) -> None:
    """Schedulers send SIGTERM to every process of a job; a worker that died of it would end the run before it saves."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if start is not None:
        start(number)


@contextmanager
def _silent_forks() -> Iterator[None]:
    """Keep tokenizers, which have been used by now, from warning in every worker; workers tokenise nothing."""
    before = os.environ.get(FORKS)
    os.environ.setdefault(FORKS, "false")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(FORKS, None)
