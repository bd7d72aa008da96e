"""Cache of held-out losses, keyed by (variant, data chunk). Shared across processes and saved to disk.

A search depends on nothing else, so a resumed search gives the same result: it runs again from the start and reads
every loss that was computed before.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import Costs, Variant
from fulldepth.execution.scoring import BASE, DIVERGENCE, LOSS, SCALED, Batch, Scorer
from fulldepth.files import atomic
from fulldepth.hf.scalars import Scalars
from fulldepth.progress import Watcher
from fulldepth.settings import Settings
from fulldepth.skip.plan import Factors
from fulldepth.skip.selection.stored import SCHEMA_VERSION, StoredProgress, check_task, damaged, read_progress

SPENT = ("forwards", "flops", "seconds")
Chunk = Sequence[Batch]


@dataclass(frozen=True)
class Refit:
    """The fit of a candidate's scalars (criterion `scaled`), and its cost."""

    fit: Callable[[Variant], dict[str, Any]]
    """Returns the entries of a `RefitResult`."""
    forwards: int
    flops: float


class RefitResult(Settings):
    """Result of a candidate's fit, as plain values."""

    scalars: Factors


Sums = dict[str, dict[Variant, dict[int, list[float]]]]
"""Kind -> variant -> chunk -> summed loss of each sequence, in nats."""


class LossCache:
    """Losses of variants on chunks of the data, and the cost of computing them.

    Args:
        scorer: runs variants.
        chunks: parts of the held-out data, each a random sample of it.
        process: this process.
        criterion: the default kind of loss: `loss`, `kl` or `scaled`.
        path: the progress file; None = not saved.
        fingerprint: model, data and settings that the progress belongs to.
        resume: continue from the file, if there is one.
        watcher: receives progress after each variant and batch.
        refit: for the criterion `scaled`.

    Raises:
        FulldepthError: if the file belongs to another search, cannot be read, or exists and `resume` is not set.
    """

    def __init__(
        self,
        scorer: Scorer,
        chunks: Sequence[Chunk],
        process: Processes,
        *,
        criterion: str = LOSS,
        path: Path | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        resume: bool = False,
        watcher: Watcher | None = None,
        refit: Refit | None = None,
    ) -> None:
        self.scorer, self.chunks, self.process, self.path = scorer, chunks, process, path
        self.criterion, self.fingerprint = criterion, dict(fingerprint or {})
        self.watcher, self.refit = watcher or Watcher(), refit
        self.costs: Costs = scorer.costs
        self.tokens = [[count for batch in chunk for count in batch.tokens] for chunk in chunks]
        """Tokens that count, of each sequence of each chunk."""
        self.documents = [[document for batch in chunk for document in batch.documents] for chunk in chunks]
        """The document of each sequence of each chunk."""
        self.sequences = sum(map(len, self.tokens))
        """Held-out sequences."""
        self.num_batches = sum(map(len, chunks))
        """Held-out batches."""
        self.spent = dict.fromkeys(SPENT, 0.0)
        self._sums: Sums = {}
        self._stored: Sums = {}
        """Losses in the progress file; a step that ran before the restart takes its own results from here."""
        self._tasks: dict[str, Any] = {}
        self._stored_tasks: dict[str, Any] = {}
        self._fitted: set[str] = set()
        self._log: list[list[float]] = []
        """`SPENT` by the end of each step."""
        self._steps = 0
        self._open = 0
        stored = process.agree(self._read(resume) if process.is_main else None)
        if isinstance(stored, str):
            raise FulldepthError(stored)
        if stored is not None:
            self._load(stored)

    @property
    def unhealed(self) -> str:
        """The kind of the losses in the plan, which are without scalars."""
        return LOSS if self.criterion == SCALED else self.criterion

    def candidates(self, picks: Collection[int]) -> list[Variant]:
        """The candidates of the round after these picks."""
        return self.costs.candidates(picks)

    def missing(self, variants: Collection[Variant], chunk: int, kind: str | None = None) -> list[Variant]:
        """The variants whose losses on a chunk are not known, in a fixed order."""
        return sorted((v for v in set(variants) if chunk not in self._chunks(v, kind)), key=sorted)

    def known_chunks(self, variant: Variant) -> list[int]:
        """The chunks on which a variant's losses are known, in order."""
        return sorted(self._chunks(variant))

    def rows(self, variant: Variant, chunks: Sequence[int], kind: str | None = None) -> np.ndarray:
        """[N] summed losses of the sequences of some chunks, in nats."""
        sums = self._chunks(variant, kind)
        return np.array([value for chunk in chunks for value in sums[chunk]], dtype=np.float64)

    def counts(self, chunks: Sequence[int]) -> np.ndarray:
        """[N] tokens that count, of the same sequences."""
        return np.array([count for chunk in chunks for count in self.tokens[chunk]], dtype=np.float64)

    def owners(self, chunks: Sequence[int]) -> np.ndarray:
        """[N] documents of the same sequences."""
        return np.array([document for chunk in chunks for document in self.documents[chunk]], dtype=np.int64)

    def total(self, variant: Variant, chunks: Sequence[int], kind: str | None = None) -> float:
        """Sum over some chunks, in nats."""
        return float(self.rows(variant, chunks, kind).sum())

    def mean(self, variant: Variant, kind: str | None = None) -> float:
        """Mean over all tokens that count, in nats; the losses must be known on all chunks."""
        chunks = range(len(self.chunks))
        return self.total(variant, chunks, kind) / float(self.counts(chunks).sum())

    def price(self, variants: Collection[Variant], chunk: int, kind: str | None = None) -> float:
        """FLOPs of the missing losses of the variants on a chunk, in one process."""
        kind = kind or self.criterion
        missing = self.missing(variants, chunk, kind)
        shapes = [batch.shape for batch in self.chunks[chunk]]
        if kind == SCALED:
            fits = sum(self.refit.flops for v in missing if self.refit and _name(v) not in self._tasks)
            return fits + sum(self.costs.whole(v, shape) for v in missing for shape in shapes)
        if missing and kind == DIVERGENCE:
            missing = sorted({*missing, BASE}, key=sorted)
        return sum(self.costs.shared(missing, shape) for shape in shapes)

    def need(self, variants: Collection[Variant], chunk: int, kind: str | None = None) -> None:
        """Compute the missing losses of these variants on a chunk, in one pass."""
        kind = kind or self.criterion
        missing = self.missing(variants, chunk, kind)
        if kind == SCALED:
            self._refit(missing)
        cost = len(missing) * len(self.chunks[chunk]), self.price(missing, chunk, kind)
        if self._step(lambda: self._evaluate(kind, missing, chunk), lambda: cost):
            return
        for name in (LOSS, DIVERGENCE) if kind == DIVERGENCE else (kind,):
            for variant in missing:
                sums = self._stored.get(name, {}).get(variant, {}).get(chunk)
                if sums is None:
                    raise damaged(self.path, f"the {name} of {_layers(variant) or 'the model'} is missing")
                self._set(name, variant, chunk, sums)

    def need_everywhere(self, title: str, variants: Collection[Variant], kind: str | None = None) -> None:
        """Compute the missing losses of these variants on all chunks, as a step with its own progress bar."""
        self.begin(title, len(variants) * self.num_batches)
        for chunk in range(len(self.chunks)):
            self.need(variants, chunk, kind)
        self.finish()

    def task(
        self, work: Mapping[str, Callable[[], Any]], cost: Callable[[Any], tuple[float, float]], kind: Any
    ) -> list[Any]:
        """Results of other tasks, each run once by one process.

        Args:
            work: name -> function that returns the result as plain values.
            cost: result of a task -> its forwards and FLOPs.
            kind: pydantic type of a result, which stored results are checked against.
        """
        names = list(work)
        for start in range(0, len(names), self.process.world):
            group = names[start : start + self.process.world]
            if not self._step(partial(self._do, group, work), partial(self._cost_of, group, cost)):
                for name in group:
                    if name not in self._stored_tasks:
                        raise damaged(self.path, f"tasks: {name} is missing")
                    self._tasks[name] = check_task(self.path, name, self._stored_tasks[name], kind)
        return [self._tasks[name] for name in names]

    def begin(self, title: str, total: int) -> None:
        """Start a step of the search of at most `total` passes over a batch."""
        self.finish()
        self._open = total
        self.watcher.begin(title, total)

    def finish(self) -> None:
        """End the current step; passes that were not needed count as done."""
        self._advance(self._open)

    def _advance(self, count: int) -> None:
        if count := min(count, self._open):
            self._open -= count
            self.watcher.advance(count)

    def _chunks(self, variant: Variant, kind: str | None = None) -> dict[int, list[float]]:
        """Chunk -> known summed losses of a variant."""
        return self._sums.get(kind or self.criterion, {}).get(variant, {})

    def _set(self, kind: str, variant: Variant, chunk: int, sums: list[float]) -> None:
        self._sums.setdefault(kind, {}).setdefault(variant, {})[chunk] = sums

    def _cost_of(self, group: Sequence[str], cost: Callable[[Any], tuple[float, float]]) -> tuple[float, float]:
        costs = [cost(self._tasks[name]) for name in group]
        return sum(forwards for forwards, _ in costs), sum(flops for _, flops in costs)

    def _step(self, work: Callable[[], None], cost: Callable[[], tuple[float, float]]) -> bool:
        """Run one step of the search; False if it ran before a restart, so that its cost is known."""
        new = self._steps == len(self._log)
        if new:
            start = time.perf_counter()
            work()
            added = (*cost(), time.perf_counter() - start)
            self._log.append([before + more for before, more in zip(self.spent.values(), added, strict=True)])
            self._save()
        self.spent = dict(zip(SPENT, self._log[self._steps], strict=True))
        self._steps += 1
        return new

    def _refit(self, variants: Sequence[Variant]) -> None:
        """Fit the scalars of these variants, unless that was done before."""
        unfitted = [variant for variant in variants if _name(variant) not in self._fitted]
        self._fitted.update(map(_name, unfitted))
        refit = self.refit
        if unfitted and refit is None:
            raise FulldepthError("There are no examples to fit scalars on.")
        if unfitted and refit is not None:
            work = {_name(v): partial(refit.fit, v) for v in unfitted}
            self.task(work, lambda _: (refit.forwards, refit.flops), RefitResult)
            for name in work:
                try:
                    Scalars.from_dict(
                        self._tasks[name]["scalars"], self.scorer.anatomy.num_layers, self.scorer.granularity
                    )
                except FulldepthError as error:
                    raise damaged(self.path, f"tasks: {name}: {error}") from error

    def _evaluate(self, kind: str, variants: Sequence[Variant], chunk: int) -> None:
        """Score this process's share of (batch, variant) pairs, in order so that prefixes stay shared; gather all."""
        numbers = range(len(self.chunks[chunk]))
        units = [(number, variant) for number in numbers for variant in variants]
        bounds = [round(len(units) * rank / self.process.world) for rank in range(self.process.world + 1)]
        share = units[bounds[self.process.rank] : bounds[self.process.rank + 1]]
        scored: dict[tuple[int, Variant], dict[str, list[float]]] = {}
        for number in sorted({number for number, _ in share}):
            own = [variant for at, variant in share if at == number]
            sums = self._score(kind, self.chunks[chunk][number], own)
            scored |= {(number, variant): sums[variant] for variant in own}
        self._advance(len(units) - len(share))
        parts = {key: sums for scores in self.process.gather(scored) for key, sums in scores.items()}
        for variant in variants:
            for name in parts[0, variant]:
                values = [value for number in numbers for value in parts[number, variant][name]]
                if not all(map(math.isfinite, values)):
                    raise FulldepthError(
                        f"With the blocks {sorted(variant)} skipped the loss is not finite in "
                        f"{self.scorer.anatomy.model.dtype}; use another precision (dtype float32 or bfloat16)."
                    )
                self._set(name, variant, chunk, values)

    def _score(self, kind: str, batch: Batch, variants: Sequence[Variant]) -> dict[Variant, dict[str, list[float]]]:
        if kind != SCALED:
            return self.scorer.sums(batch, variants, divergence=kind == DIVERGENCE, advance=self._advance)
        sums = {}
        for variant in variants:
            scalars = self._tasks[_name(variant)]["scalars"]
            sums[variant] = {SCALED: self.scorer.healed_sums(batch, variant, scalars)[LOSS]}
            self._advance(1)
        return sums

    def _do(self, group: Sequence[str], work: Mapping[str, Callable[[], Any]]) -> None:
        results = {name: work[name]() for at, name in enumerate(group) if at == self.process.rank}
        for gathered in self.process.gather(results):
            self._tasks |= gathered

    def _save(self) -> None:
        if self.path is None or not self.process.is_main:
            return
        document = {
            "schema_version": SCHEMA_VERSION,
            "of": self.fingerprint,
            "log": self._log,
            "tasks": self._tasks,
            "sums": {
                kind: {_layers(variant): sums for variant, sums in by_variant.items()}
                for kind, by_variant in self._sums.items()
            },
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(self.path) as part:
                part.write_text(json.dumps(document), encoding="utf-8")
        except OSError as error:
            raise FulldepthError(f"Cannot write the progress to {self.path}: {error.strerror or error}.") from error

    def _read(self, resume: bool) -> StoredProgress | str | None:
        """The progress file, or an error message."""
        if self.path is None or not self.path.exists():
            return None
        if not resume:
            return f"{self.path} holds an unfinished search. Go on with it (resume), or choose another output folder."
        try:
            return read_progress(self.path, self.fingerprint)
        except FulldepthError as error:
            return str(error)

    def _load(self, stored: StoredProgress) -> None:
        """Take over stored progress, after a check against chunks and layers."""
        self._log, self._stored_tasks = [list(spent) for spent in stored.log], dict(stored.tasks)
        depth = self.costs.num_layers
        for kind, by_variant in stored.sums.items():
            for key, by_chunk in by_variant.items():
                variant = Variant(int(layer) for layer in key.split(",") if layer)
                if max(variant, default=0) > depth:
                    raise damaged(self.path, f"sums.{kind} names layer {max(variant)}, the model has {depth}")
                sums = {int(chunk): values for chunk, values in by_chunk.items()}
                for chunk, values in sums.items():
                    if chunk >= len(self.tokens) or len(values) != len(self.tokens[chunk]):
                        raise damaged(self.path, f"sums.{kind} of {key or 'the model'}: chunk {chunk} does not fit")
                self._stored.setdefault(kind, {})[variant] = sums


def _layers(variant: Variant) -> str:
    """The key of a variant in the file: `3,7`."""
    return ",".join(map(str, sorted(variant)))


def _name(variant: Variant) -> str:
    return f"scaled {_layers(variant)}"
