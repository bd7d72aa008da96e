"""Memory and start-up of the shuffled order of a large data set, against torch's RandomSampler.

Each case is a process of its own: a synthetic data set of N windows (nothing stored), batches of 8 through a
DataLoader, 2,000 batches. Memory is how far the peak resident size rises above what the process held before the
sampler was made.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from fulldepth.data import ShuffledSampler

WINDOWS, LENGTH, BATCH, BATCHES, SKIPPED = 102_000_000, 1024, 8, 2000, 50_000_000


class Windows(Dataset[dict[str, torch.Tensor]]):
    """`size` windows of LENGTH ids that are made when they are read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + LENGTH)
        return {"input_ids": ids, "labels": ids.clone()}


def peak() -> float:
    """MiB of this process at most so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def one(name: str, size: int, workers: int) -> None:
    data = Windows(size)
    list(DataLoader(Windows(BATCH), batch_size=BATCH))  # torch's own modules
    before, start = peak(), time.perf_counter()
    sampler: Sampler[int] = ShuffledSampler(size) if name == "shuffled" else RandomSampler(data)
    batches: Iterator[object] = iter(DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=workers))
    next(batches)
    first = time.perf_counter() - start
    for _ in range(BATCHES):
        next(batches)
    print(f"{name:9} {workers} workers: {peak() - before:8.1f} MiB, first batch after {first:6.2f} s", flush=True)


def skip(size: int) -> None:
    """Seconds that a resumption spends on the windows that it has read before, as accelerate skips them."""
    start = time.perf_counter()
    for number, _ in enumerate(BatchSampler(ShuffledSampler(size), BATCH, drop_last=False)):
        if number == SKIPPED // BATCH:
            break
    print(f"skipping {SKIPPED:,} windows: {time.perf_counter() - start:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--only", choices=("shuffled", "random"))
    parser.add_argument("--workers", type=int)
    chosen = parser.parse_args()
    if chosen.only:
        one(chosen.only, chosen.windows, chosen.workers or 0)
        return
    for name, workers in (("shuffled", 0), ("shuffled", 2), ("random", 0)):
        case = ["--windows", str(chosen.windows), "--only", name, "--workers", str(workers)]
        subprocess.run([sys.executable, __file__, *case], check=True)
    skip(chosen.windows)


if __name__ == "__main__":
    main()
