"""Cache of held-out losses, keyed by (variant, data chunk). Shared across processes, and saved to disk.

A search decides by nothing else, so an interrupted search comes to the same end: it runs again from the start, and
reads every loss that was computed before.
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
from fulldepth.progress import Watcher
from fulldepth.settings import Settings
from fulldepth.skip.plan import Factors
from fulldepth.skip.selection.stored import SCHEMA_VERSION, StoredProgress, check_task, damaged, read_progress

SPENT = ("forwards", "flops", "seconds")
Chunk = Sequence[Batch]


@dataclass(frozen=True)
class Refit:
    """How the scalars of a candidate are fitted (criterion `scaled`), and what a fit costs."""

    fit: Callable[[Variant], dict[str, Any]]
    """Gives a `RefitResult`."""
    forwards: int
    flops: float


class RefitResult(Settings):
    """What a fit of a candidate gives, as plain values."""

    scalars: Factors


class LossCache:
    """What is known about variants, and what finding it out has cost.

    Args:
        scorer: runs variants.
        chunks: the held-out data in parts, each a random sample of it.
        process: this process.
        path: the progress file; None keeps nothing.
        fingerprint: what the progress belongs to (model, data, settings).
        resume: go on with the file, if there is one.
        watcher: told after each variant and batch.
        refit: for the criterion `scaled`.

    Raises:
        FulldepthError: if the file belongs to something else, cannot be read, or is there and `resume` is not set.
    """

    def __init__(
        self,
        scorer: Scorer,
        chunks: Sequence[Chunk],
        process: Processes,
        *,
        path: Path | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        resume: bool = False,
        watcher: Watcher | None = None,
        refit: Refit | None = None,
    ) -> None:
        self.scorer, self.chunks, self.process, self.path = scorer, chunks, process, path
        self.fingerprint = dict(fingerprint or {})
        self.watcher, self.refit = watcher or Watcher(), refit
        self.tokens = [[count for batch in chunk for count in batch.tokens] for chunk in chunks]
        """Tokens that count, of each sequence of each chunk."""
        self.documents = [[document for batch in chunk for document in batch.documents] for chunk in chunks]
        """The document of each sequence of each chunk."""
        self._sums: dict[str, dict[Variant, dict[int, list[float]]]] = {}
        self._stored: dict[str, dict[Variant, dict[int, list[float]]]] = {}
        """What the progress file holds; a step that was made before takes from it what it gave, and no more."""
        self._tasks: dict[str, Any] = {}
        self._stored_tasks: dict[str, Any] = {}
        self._fitted: set[str] = set()
        self._log: list[list[float]] = []
        """Spent by the end of each step."""
        self._steps = 0
        self._open = 0
        self.spent = dict.fromkeys(SPENT, 0.0)
        found = self.process.agree(self._read(resume) if self.process.is_main else None)
        if isinstance(found, str):
            raise FulldepthError(found)
        if found is not None:
            self._load(found)

    @property
    def costs(self) -> Costs:
        """Of the model's parts."""
        return self.scorer.costs

    @property
    def sequences(self) -> int:
        """Held-out sequences."""
        return sum(map(len, self.tokens))

    @property
    def num_batches(self) -> int:
        """Held-out batches."""
        return sum(map(len, self.chunks))

    def round_of(self, picks: Collection[int]) -> list[Variant]:
        """The candidates of the round after these picks."""
        return self.costs.candidates(picks)

    def missing(self, kind: str, variants: Collection[Variant], chunk: int) -> list[Variant]:
        """Those of the variants whose losses on a chunk are not known, in a fixed order."""
        known = self._sums.get(kind, {})
        return sorted((v for v in set(variants) if chunk not in known.get(v, {})), key=sorted)

    def known_chunks(self, kind: str, variant: Variant) -> list[int]:
        """The chunks on which a variant's losses are known, in order."""
        return sorted(self._sums.get(kind, {}).get(variant, {}))

    def rows(self, kind: str, variant: Variant, chunks: Sequence[int]) -> np.ndarray:
        """[N] summed losses of the sequences of some chunks, in nats."""
        known = self._sums.get(kind, {}).get(variant, {})
        return np.array([value for chunk in chunks for value in known[chunk]], dtype=np.float64)

    def counts(self, chunks: Sequence[int]) -> np.ndarray:
        """[N] tokens that count, of the same sequences."""
        return np.array([count for chunk in chunks for count in self.tokens[chunk]], dtype=np.float64)

    def owners(self, chunks: Sequence[int]) -> np.ndarray:
        """[N] documents of the same sequences."""
        return np.array([document for chunk in chunks for document in self.documents[chunk]], dtype=np.int64)

    def total(self, kind: str, variant: Variant, chunks: Sequence[int]) -> float:
        """Sum over some chunks, in nats."""
        return float(self.rows(kind, variant, chunks).sum())

    def mean(self, kind: str, variant: Variant) -> float:
        """Mean over all tokens that count, in nats; the variant must be known on all chunks."""
        every = range(len(self.chunks))
        return self.total(kind, variant, every) / float(self.counts(every).sum())

    def price(self, kind: str, variants: Collection[Variant], chunk: int) -> float:
        """FLOPs of what is missing of the variants on a chunk, as one process makes it."""
        todo = self.missing(kind, variants, chunk)
        shapes = [batch.shape for batch in self.chunks[chunk]]
        if kind == SCALED:
            fits = sum(self.refit.flops for v in todo if self.refit and _name(v) not in self._tasks)
            return fits + sum(self.costs.whole(v, shape) for v in todo for shape in shapes)
        if todo and kind == DIVERGENCE:
            todo = sorted({*todo, BASE}, key=sorted)
        return sum(self.costs.shared(todo, shape) for shape in shapes)

    def need(self, kind: str, variants: Collection[Variant], chunk: int) -> None:
        """Have the losses of these variants on a chunk, in one pass over what is missing."""
        todo = self.missing(kind, variants, chunk)
        if kind == SCALED:
            self._refit(todo)
        forwards, flops = len(todo) * len(self.chunks[chunk]), self.price(kind, todo, chunk)
        if not self._step(lambda: self._evaluate(kind, todo, chunk), lambda: (forwards, flops)):
            for name in (LOSS, DIVERGENCE) if kind == DIVERGENCE else (kind,):
                for variant in todo:
                    known = self._stored.get(name, {}).get(variant, {}).get(chunk)
                    if known is None:
                        raise damaged(self.path, f"the {name} of {_layers(variant) or 'the model'} is not there")
                    self._sums.setdefault(name, {}).setdefault(variant, {})[chunk] = known

    def task(
        self, work: Mapping[str, Callable[[], Any]], cost: Callable[[Any], tuple[float, float]], kind: Any
    ) -> list[Any]:
        """What pieces of other work give, each done once by one process.

        Args:
            work: name -> what gives its result, in plain values.
            cost: forwards and FLOPs of a piece, out of its result.
            kind: type of a result, as pydantic understands it; what the progress file holds must be of it.
        """
        names = list(work)
        for start in range(0, len(names), self.process.world):
            group = names[start : start + self.process.world]
            costs = partial(self._cost_of, group, cost)
            if not self._step(partial(self._do, group, work), costs):
                for name in group:
                    if name not in self._stored_tasks:
                        raise damaged(self.path, f"tasks: {name} is not there")
                    self._tasks[name] = check_task(self.path, name, self._stored_tasks[name], kind)
        return [self._tasks[name] for name in names]

    def begin(self, title: str, total: int) -> None:
        """A piece of the search of at most `total` passes over a batch starts."""
        self.finish()
        self._open = total
        self.watcher.begin(title, total)

    def finish(self) -> None:
        """What was begun is over, often with less than was thought."""
        self._advance(self._open)

    def _advance(self, count: int) -> None:
        if count := min(count, self._open):
            self._open -= count
            self.watcher.advance(count)

    def _cost_of(self, group: Sequence[str], cost: Callable[[Any], tuple[float, float]]) -> tuple[float, float]:
        costs = [cost(self._tasks[name]) for name in group]
        return sum(forwards for forwards, _ in costs), sum(flops for _, flops in costs)

    def _step(self, work: Callable[[], None], cost: Callable[[], tuple[float, float]]) -> bool:
        """One step of the search; False if it was made before a restart, and its cost is known."""
        new = self._steps == len(self._log)
        if new:
            start = time.perf_counter()
            work()
            spent = (*cost(), time.perf_counter() - start)
            self._log.append([before + now for before, now in zip(self.spent.values(), spent, strict=True)])
            self._save()
        self.spent = dict(zip(SPENT, self._log[self._steps], strict=True))
        self._steps += 1
        return new

    def _refit(self, variants: Sequence[Variant]) -> None:
        """Have the scalars of these variants fitted."""
        todo = [variant for variant in variants if _name(variant) not in self._fitted]
        self._fitted.update(map(_name, todo))
        if todo and self.refit is None:
            raise FulldepthError("There are no examples to fit scalars on.")
        refit = self.refit
        if todo and refit is not None:
            work = {_name(v): partial(refit.fit, v) for v in todo}
            self.task(work, lambda _: (refit.forwards, refit.flops), RefitResult)

    def _evaluate(self, kind: str, todo: Sequence[Variant], chunk: int) -> None:
        """Share the work, and put together what all found: slices of (batch, variant), so that prefixes stay shared."""
        units = [(number, variant) for number in range(len(self.chunks[chunk])) for variant in todo]
        bounds = [round(len(units) * rank / self.process.world) for rank in range(self.process.world + 1)]
        mine = units[bounds[self.process.rank] : bounds[self.process.rank + 1]]
        found: list[tuple[int, Variant, dict[str, list[float]]]] = []
        for number in sorted({number for number, _ in mine}):
            variants = [variant for at, variant in mine if at == number]
            sums = self._score(kind, self.chunks[chunk][number], variants)
            found += [(number, variant, sums[variant]) for variant in variants]
        self._advance(len(units) - len(mine))
        parts = {(number, variant): sums for share in self.process.gather(found) for number, variant, sums in share}
        for variant in todo:
            for name in parts[0, variant]:
                whole = [value for number in range(len(self.chunks[chunk])) for value in parts[number, variant][name]]
                if not all(map(math.isfinite, whole)):
                    raise FulldepthError(
                        f"With the blocks {sorted(variant)} skipped the loss is not finite in "
                        f"{self.scorer.anatomy.model.dtype}; use another precision (dtype float32 or bfloat16)."
                    )
                self._sums.setdefault(name, {}).setdefault(variant, {})[chunk] = whole

    def _score(self, kind: str, batch: Batch, variants: Sequence[Variant]) -> dict[Variant, dict[str, list[float]]]:
        if kind != SCALED:
            return self.scorer.sums(batch, variants, divergence=kind == DIVERGENCE, advance=self._advance)
        found = {}
        for variant in variants:
            scalars = self._tasks[_name(variant)]["scalars"]
            found[variant] = {SCALED: self.scorer.healed_sums(batch, variant, scalars)[LOSS]}
            self._advance(1)
        return found

    def _do(self, group: Sequence[str], work: Mapping[str, Callable[[], Any]]) -> None:
        mine = {name: work[name]() for at, name in enumerate(group) if at == self.process.rank}
        for found in self.process.gather(mine):
            self._tasks |= found

    def _save(self) -> None:
        if self.path is None or not self.process.is_main:
            return
        document = {
            "schema_version": SCHEMA_VERSION,
            "of": self.fingerprint,
            "log": self._log,
            "tasks": self._tasks,
            "sums": {
                kind: {_layers(variant): known for variant, known in of.items()} for kind, of in self._sums.items()
            },
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(self.path) as part:
                part.write_text(json.dumps(document), encoding="utf-8")
        except OSError as error:
            raise FulldepthError(f"Cannot write the progress to {self.path}: {error.strerror or error}.") from error

    def _read(self, resume: bool) -> StoredProgress | str | None:
        """The progress file, or words for what is wrong with it."""
        if self.path is None or not self.path.exists():
            return None
        if not resume:
            return f"{self.path} holds an unfinished search. Go on with it (resume), or choose another output folder."
        try:
            return read_progress(self.path, self.fingerprint)
        except FulldepthError as error:
            return str(error)

    def _load(self, stored: StoredProgress) -> None:
        """Take over what is stored, if it is about these chunks and layers.

        Raises:
            FulldepthError: if it is not.
        """
        self._log, self._stored_tasks = [list(spent) for spent in stored.log], dict(stored.tasks)
        depth = self.costs.num_layers
        for kind, of in stored.sums.items():
            for key, known in of.items():
                variant = Variant(int(layer) for layer in key.split(",") if layer)
                if max(variant, default=0) > depth:
                    raise damaged(self.path, f"sums.{kind} names layer {max(variant)}, the model has {depth}")
                sums = {int(chunk): values for chunk, values in known.items()}
                for chunk, values in sums.items():
                    if chunk >= len(self.tokens) or len(values) != len(self.tokens[chunk]):
                        raise damaged(self.path, f"sums.{kind} of {key or 'the model'}: chunk {chunk} does not fit")
                self._stored.setdefault(kind, {})[variant] = sums


def _layers(variant: Variant) -> str:
    """The key of a variant in the file: `3,7`."""
    return ",".join(map(str, sorted(variant)))


def _name(variant: Variant) -> str:
    return f"scaled {_layers(variant)}"
