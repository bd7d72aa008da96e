"""Cache of held-out losses, keyed by (variant, data chunk). Shared across processes and saved to disk.

A search depends on nothing else, so a resumed search gives the same result: it runs again from the start and reads
the result of every step that ran before.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import Field, JsonValue

from fulldepth.core.distributed import Processes
from fulldepth.core.errors import FulldepthError, differences, one_line
from fulldepth.core.files import read_document, sha256_of, write_text
from fulldepth.core.progress import Watcher
from fulldepth.execution.flops import Costs, Variant
from fulldepth.execution.scoring import BASE, DIVERGENCE, LOSS, SCALED, ScoredBatch, Scorer
from fulldepth.settings import Settings
from fulldepth.skip.plan import Amount, Factors

PROGRESS = "progress.json"
"""File with the progress of a search."""
SCHEMA_VERSION = 4
MOST_BYTES = 1 << 30
"""Largest file. It holds a number for each sequence, variant and chunk."""
SPENT = ("forwards", "flops", "seconds")
Chunk = Sequence[ScoredBatch]
Result = tuple[Any, int, float]
"""A result as plain values, and the forwards and FLOPs that it took."""
Work = Callable[[], Result]

Summed = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Nats; far above any loss, and small enough to be squared."""
Removed = Annotated[str, Field(pattern=r"^([a-z]+ [1-9][0-9]{0,5}(,[a-z]+ [1-9][0-9]{0,5})*)?$", max_length=100_000)]
"""Blocks that a variant lacks, such as `attention 3,mlp 7`; empty for the unmodified model."""


class StoredStep(Settings):
    """Stored results of one step of a search."""

    spent: tuple[Amount, Amount, Amount]
    """Forwards, FLOPs and seconds of the search by its end."""
    tasks: dict[str, JsonValue] = Field(default_factory=dict)
    """Name of a task -> its result."""
    sums: dict[Literal["loss", "kl", "scaled"], dict[Removed, list[Summed]]] = Field(default_factory=dict)
    """Kind -> variant -> summed loss of each sequence of a chunk, in nats."""


class StoredProgress(Settings):
    """The entries of `progress.json`."""

    schema_version: Literal[4]
    of: dict[str, JsonValue]
    """Model, data and settings that the progress belongs to."""
    steps: list[StoredStep]
    sha256: str
    """Of the steps, so that a changed number is found."""


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
        refit: for the criterion `scaled`: fits the scalars of a variant.

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
        refit: Callable[[Variant], tuple[dict[str, Any], int, float]] | None = None,
    ) -> None:
        self.scorer = scorer
        self.chunks = chunks
        self.process = process
        self.path = path
        self.criterion = criterion
        self.fingerprint = dict(fingerprint or {})
        self.watcher = watcher or Watcher()
        self.refit = refit
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
        self._sums: dict[str, dict[Variant, dict[int, list[float]]]] = {}
        """Kind -> variant -> chunk -> summed loss of each sequence, in nats."""
        self._tasks: dict[str, Any] = {}
        self._steps: list[dict[str, Any]] = process.first(partial(self._read, resume))
        """Of `StoredStep`."""
        self._number = 0
        """Of the next step."""
        self._open = 0

    @property
    def unhealed(self) -> str:
        """The kind of the losses in the plan, which are without scalars."""
        return LOSS if self.criterion == SCALED else self.criterion

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

    def need(self, variants: Collection[Variant], chunk: int, kind: str | None = None) -> None:
        """Compute the missing losses of these variants on a chunk, in one pass."""
        kind = kind or self.criterion
        missing = sorted((v for v in set(variants) if chunk not in self._chunks(v, kind)), key=sorted)
        if kind == SCALED:
            unfitted = [variant for variant in missing if _fit_of(variant) not in self._tasks]
            assert self.refit is not None
            self.task({_fit_of(variant): partial(self.refit, variant) for variant in unfitted}, dict[str, Factors])
        if self._number == len(self._steps):
            self._record(partial(self._evaluate, kind, missing, chunk))
        sums = self._next()["sums"]
        keys = {_key(variant): variant for variant in missing}
        for name in (LOSS, DIVERGENCE) if kind == DIVERGENCE else (kind,):
            by_variant = sums.get(name, {})
            if by_variant.keys() != keys.keys() or {*map(len, by_variant.values())} - {len(self.tokens[chunk])}:
                raise self._unusable(f"step {self._number} does not hold the {name} of its variants")
            for key, values in by_variant.items():
                self._sums.setdefault(name, {}).setdefault(keys[key], {})[chunk] = values

    def need_everywhere(self, title: str, variants: Collection[Variant], kind: str | None = None) -> None:
        """Compute the missing losses of these variants on all chunks, as a step with its own progress bar."""
        self.begin(title, len(variants) * self.num_batches)
        for chunk in range(len(self.chunks)):
            self.need(variants, chunk, kind)
        self.finish()

    def task(self, work: Mapping[str, Work], kind: Any) -> list[Any]:
        """Results of other tasks, each run once by one process.

        Args:
            work: name -> function that returns the result.
            kind: pydantic type of a result, which stored results are checked against.
        """
        names = list(work)
        for at, name in enumerate(names):
            if is_new := self._number == len(self._steps):
                self._record(partial(self._run, names[at : at + self.process.world], work))
            tasks = self._next()["tasks"]
            if not is_new:
                try:
                    pydantic.TypeAdapter(dict[str, kind]).validate_python(tasks, strict=True)
                except pydantic.ValidationError as error:
                    problem = error.errors(include_url=False)[0]
                    raise self._unusable(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
            if list(tasks) != [name]:
                raise self._unusable(f"step {self._number} does not hold {name}")
            self._tasks |= tasks
        return [self._tasks[name] for name in names]

    def discard(self) -> None:
        """Remove the progress file: the search has ended, with a plan or because there is none."""
        if self.path is not None and self.process.is_main:
            self.path.unlink(missing_ok=True)

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

    def _record(self, work: Callable[[], list[Result]]) -> None:
        """Add steps to those of the file: one for each result of `work`, which processes may compute at once."""
        start = time.perf_counter()
        results = work()
        seconds = self.process.agree(time.perf_counter() - start)
        spent = list(self.spent.values())
        for values, *cost in results:
            spent = [before + more for before, more in zip(spent, (*cost, seconds), strict=True)]
            self._steps.append(StoredStep.model_validate({"spent": tuple(spent), **values}).model_dump())
            seconds = 0.0
        if self.path is not None and self.process.is_main:
            document = {
                "schema_version": SCHEMA_VERSION,
                "of": self.fingerprint,
                "steps": self._steps,
                "sha256": _digest(self._steps),
            }
            write_text(self.path, json.dumps(document))

    def _next(self) -> dict[str, Any]:
        """The next step of the search, computed now or before a restart."""
        step = self._steps[self._number]
        self.spent = dict(zip(SPENT, step["spent"], strict=True))
        self._number += 1
        return step

    def _run(self, group: Sequence[str], work: Mapping[str, Work]) -> list[Result]:
        """Run the tasks of a group, one in each process."""
        computed = {name: work[name]() for at, name in enumerate(group) if at == self.process.rank}
        done = {name: result for results in self.process.gather(computed) for name, result in results.items()}
        return [({"tasks": {name: done[name][0]}}, *done[name][1:]) for name in group]

    def _evaluate(self, kind: str, variants: Sequence[Variant], chunk: int) -> list[Result]:
        """Score this process's share of (batch, variant) pairs, in order so that prefixes stay shared; gather all."""
        batches = self.chunks[chunk]
        units = [(number, variant) for number in range(len(batches)) for variant in variants]
        bounds = [round(len(units) * rank / self.process.world) for rank in range(self.process.world + 1)]
        share = units[bounds[self.process.rank] : bounds[self.process.rank + 1]]
        scored: list[tuple[Variant, dict[str, list[float]]]] = []
        for number in sorted({number for number, _ in share}):
            mine = [variant for at, variant in share if at == number]
            batch = batches[number]
            if kind == SCALED:
                fits = {variant: self._tasks[_fit_of(variant)]["scalars"] for variant in mine}
                sums = {v: {SCALED: self.scorer.healed_sums(batch, v, fits[v])[LOSS]} for v in mine}
                self._advance(len(mine))
            else:
                sums = self.scorer.sums(batch, mine, divergence=kind == DIVERGENCE, advance=self._advance)
            scored += [(variant, sums[variant]) for variant in mine]
        self._advance(len(units) - len(share))
        gathered: dict[str, dict[str, list[float]]] = {}
        # In the order of `units`: each process has the next part of them.
        results = [result for part in self.process.gather(scored) for result in part]
        for variant, by_name in results:
            for name, values in by_name.items():
                if not all(map(math.isfinite, values)):
                    raise FulldepthError(
                        f"Without {_key(variant) or 'any change'} the loss is not finite in "
                        f"{self.scorer.anatomy.model.dtype}; use another precision (dtype float32 or bfloat16)."
                    )
                gathered.setdefault(name, {}).setdefault(_key(variant), []).extend(values)
        shapes = [batch.shape for batch in batches]
        costs = self.costs
        if kind == SCALED:
            flops = sum(costs.whole(variant, shape) for variant in variants for shape in shapes)
        else:
            run = [*variants, BASE] if variants and kind == DIVERGENCE else variants
            flops = sum(costs.shared(run, shape) for shape in shapes)
        return [({"sums": gathered}, len(units), flops)]

    def _read(self, resume: bool) -> list[dict[str, Any]]:
        """The steps in the progress file; none if there is no file."""
        if self.path is None or not self.path.exists():
            return []
        if not resume:
            raise FulldepthError(
                f"{self.path} holds an unfinished search. Go on with it (--resume), or choose another output folder."
            )
        try:
            stored = read_document(self.path, StoredProgress, most=MOST_BYTES)
        except FulldepthError as error:
            raise self._unusable(str(error).removeprefix(f"Cannot read {self.path}: ")) from error
        if different := differences(stored.of, self.fingerprint):
            raise FulldepthError(f"{self.path} holds another search: {different}. Choose another output folder.")
        steps = [step.model_dump() for step in stored.steps]
        if stored.sha256 != _digest(steps):
            raise self._unusable("its steps are not those that were written")
        return steps

    def _unusable(self, reason: str) -> FulldepthError:
        """The error for a progress file that the search cannot go on from."""
        return FulldepthError(
            f"The progress in {self.path} cannot be used: {one_line(reason).rstrip('.')}. Remove the file to start "
            "the search again."
        )


def _digest(steps: Sequence[Mapping[str, Any]]) -> str:
    """The SHA-256 of steps."""
    return sha256_of(json.dumps(steps))


def _key(variant: Variant) -> str:
    """The key of a variant in the file."""
    return ",".join(f"{part} {layer}" for layer, part in sorted(variant))


def _fit_of(variant: Variant) -> str:
    """Name of the task that fits a variant's scalars."""
    return f"scaled {_key(variant)}"
