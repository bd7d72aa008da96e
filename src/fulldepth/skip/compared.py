"""Models compared with an original: held-out losses, times and bytes, as rows of a table and as findings.

The loss of a model is the mean of `-log q(token)` over all labelled tokens, in nats. Differences to the original are
paired, on the same tokens; the cluster of their standard error is the document (`uncertainty.ratio_error`). Times are
compared by the median of the rounds' ratios (`uncertainty.median_ratio`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from fulldepth.data.batches import Example
from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import PHASES, Runner, random_tokens, time_in_rounds
from fulldepth.execution.scoring import DEVICE_LOGITS, ScoredBatch, batch_sums
from fulldepth.hf import Anatomy, device_of
from fulldepth.progress import Watcher
from fulldepth.results import Finding, tabulate
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.elimination import LEAST, Difference, compare
from fulldepth.skip.fit import make_batches
from fulldepth.skip.outcome import joined
from fulldepth.thresholds import BUSY
from fulldepth.uncertainty import FEWEST_CLUSTERS, FEWEST_ROUNDS, Ratio, median_ratio


def in_words(gap: Difference, other: str) -> str:
    """A difference of losses to another model, as a part of a sentence."""
    if not math.isfinite(gap.free_error):
        few = f"an error takes {FEWEST_CLUSTERS} documents, these are {gap.documents}"
        return f"{gap.mean:+.4f} against {other} ({few})"
    if not gap.measurable:
        return f"no measurable difference from {other} (at most {abs(gap.mean) + gap.reach:.4f} nats)"
    error = f"standard error {gap.free_error:.4f}, {gap.documents} documents"
    if gap.documents < LEAST:
        error += f", measurable from {gap.reach / gap.free_error:.1f} standard errors"
    return f"{gap.mean:+.4f} against {other} ({error})"


def gap_finding(gap: Difference, sentence: str) -> Finding:
    """A difference of losses with its error, explained by a sentence."""
    if math.isfinite(gap.free_error):
        return Finding(gap.mean, "nats", sentence, standard_error=gap.free_error)
    return Finding(gap.mean, "nats", sentence, no_standard_error="too few documents")


@dataclass(frozen=True)
class HeldoutLosses:
    """Summed losses of every model on every sequence, or of a curve its measures."""

    sums: Mapping[str, np.ndarray]
    """Label -> `[N]` nats, the first is the original; of a curve, measure -> `[N, K + 1]`."""
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

    def added(self, label: str, other: str | None = None) -> Difference:
        """Loss of a model minus that of another one, on the same tokens; None = the original."""
        gaps = self.sums[label] - self.sums[other or next(iter(self.sums))]
        return compare(gaps, self.tokens, self.documents, len(gaps))


@torch.no_grad()
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
            placed = batch.to(device_of(model))
            logits = model(**placed.inputs, use_cache=False).logits  # [B, T, V]
            rows = logits[placed.where.to(logits.device)]  # [R, V]
            rows = rows.float() if rows.dtype.itemsize < 4 else rows
            losses = functional.cross_entropy(rows, placed.targets.to(rows.device), reduction="none")
            sums[label] += batch_sums(losses, placed)
            watcher.advance(1)
    if broken := [label for label, values in sums.items() if not np.isfinite(values).all()]:
        raise FulldepthError(f"The held-out loss of {broken[0]} is NaN or infinite.")
    return losses_of({label: np.array(values) for label, values in sums.items()}, batches)


def losses_of(sums: Mapping[str, np.ndarray], batches: Sequence[ScoredBatch]) -> HeldoutLosses:
    """Losses of sequences, with their tokens and documents."""
    return HeldoutLosses(
        sums,
        np.array([count for batch in batches for count in batch.tokens], dtype=np.float64),
        np.array([document for batch in batches for document in batch.documents]),
    )


def vocabulary(model: PreTrainedModel) -> int:
    """V, size of a model's vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


class Cell(NamedTuple):
    """One point of the grid of times."""

    batch: int
    context: int


@dataclass
class Measured:
    """Measurements of all models."""

    labels: list[str]
    """The original first."""
    parameter_bytes: dict[str, int]
    losses: HeldoutLosses | None = None
    """None without data."""
    times: dict[tuple[str, Cell, str], list[float]] = field(default_factory=dict)
    """(label, cell, phase) -> seconds of each round."""
    other_load: dict[Cell, float] = field(default_factory=dict)
    """Share of the processor that other programs used during the rounds, by cell."""
    memory: dict[tuple[str, Cell], tuple[int, float]] = field(default_factory=dict)
    """(label, cell) -> peak memory, and bytes of the cache for one token; empty if not measured."""

    def take_times(
        self,
        cell: Cell,
        runs: Mapping[str, Runner],
        anatomy: Anatomy,
        timing: BenchSettings,
        watcher: Watcher,
    ) -> torch.Tensor:
        """Time all models in rounds; returns the tokens that they ran, `[B, context + new]`."""
        ids = random_tokens(anatomy, cell.batch, cell.context + timing.max_new_tokens, timing.seed)
        options = timing.model_dump(include={"repeats", "warmup", "seed"})
        rounds = time_in_rounds(runs, ids, cell.context, **options, advance=watcher.advance)
        self.other_load[cell] = rounds.other_load
        self.times |= {(label, cell, phase): seconds for (label, phase), seconds in rounds.seconds.items()}
        return ids

    def busy(self, *cells: Cell) -> Finding | None:
        """The finding in place of comparisons of times, if other programs used more than `BUSY` of the processor."""
        other = max(self.other_load[cell] for cell in cells or self.other_load)
        if other <= BUSY:
            return None
        text = f"The machine was busy: other programs used {other:.0%} of its processor. Times are not compared."
        return Finding(None, "1", text)

    def ratio(self, label: str, phase: str, *cells: Cell) -> Ratio:
        """Time over the original's; in several cells (none = all), a round's time is the geometric mean of theirs."""
        own, base = (
            np.exp(np.mean([np.log(self.times[name, cell, phase]) for cell in cells or self.other_load], axis=0))
            for name in (label, self.labels[0])
        )  # [rounds] each
        return median_ratio(own, base)

    def ratio_text(self, label: str, phase: str) -> str:
        """The time over the original's over all cells, as the end of a sentence."""
        ratio = self.ratio(label, phase)
        if not math.isfinite(ratio.low):
            rounds = len(next(iter(self.times.values())))
            enough = f"an interval takes {FEWEST_ROUNDS} rounds, this is {rounds}"
            return f"{ratio.value:.3f} times the original's ({enough})"
        if not ratio.differs:
            return f"no measurable difference from the original's (at most {max(ratio.high - 1, 1 - ratio.low):.1%})"
        return f"{ratio.value:.3f} times the original's (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"

    def table(self) -> pd.DataFrame:
        """Rows with the columns `model`, `batch` and `context`."""
        tables = []
        for label in self.labels:
            rows: list[tuple[Any, ...]] = [
                ("parameter_bytes", "model", None, None, "value", self.parameter_bytes[label], None, "bytes")
            ]
            if self.losses is not None:
                rows.append(("loss", "model", None, None, "mean", self.losses.mean(label), self.losses.count, "nats"))
                added = self.losses.added(label)
                if label != self.labels[0] and math.isfinite(added.free_error):
                    error = added.free_error, added.documents
                    rows.append(("loss", "model", None, None, "difference_stderr", *error, "nats"))
            rows += self._ratios(label, *self.other_load)
            tables.append(tabulate(rows, model=label, batch=None, context=None))
            for cell, load in self.other_load.items():
                sizes = zip(("peak_memory", "kv_bytes_per_token"), self.memory.get((label, cell), ()), strict=False)
                rows = [(measure, "model", None, None, "value", size, None, "bytes") for measure, size in sizes]
                for phase in PHASES:
                    seconds = self.times[label, cell, phase]
                    rows.append((f"{phase}_time", phase, None, None, "median", median(seconds), len(seconds), "s"))
                if label == self.labels[0]:
                    rows.append(("other_load", "model", None, None, "value", load, None, "1"))
                rows += self._ratios(label, cell)
                tables.append(tabulate(rows, model=label, batch=cell.batch, context=cell.context))
        return joined(tables, model="str", batch="Int64", context="Int64")

    def _ratios(self, label: str, *cells: Cell) -> Iterator[tuple[Any, ...]]:
        """Times over the original's: median over the rounds and the ends of its interval; none on a busy machine."""
        if label == self.labels[0] or self.busy(*cells) is not None:
            return
        for phase in PHASES:
            rounds = len(self.times[label, cells[0], phase])
            for statistic, value in zip(("median", "low", "high"), self.ratio(label, phase, *cells), strict=True):
                if math.isfinite(value):
                    yield "time_ratio", phase, None, None, statistic, value, rounds, "1"
