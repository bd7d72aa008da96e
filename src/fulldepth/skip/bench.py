r"""`bench`: time, memory and cache of exports compared with the original model.

All models are in memory at once. After a warm-up they run in rounds, each once a round, in an order that changes from
round to round, so that other load on the machine affects all of them. The time of an export over the original's is

.. math:: r = \operatorname{median}_i\, t_{i,\text{export}} / t_{i,\text{original}}

over the rounds i, with a 95 % interval from the order statistics (`uncertainty.median_ratio`; none for fewer than 9
rounds). An interval that holds 1 is no measurable difference. Over the whole grid, t is the geometric mean over its
cells. If other programs used more than 10 % of the processor, times are not compared.

Rows, by `model`, `batch` and `context`: `prefill_time`, `decode_time` (of one token; median, s), `time_ratio` (sites
`prefill` and `decode`; median, low, high; without batch and context: over the grid), `other_load` (share of the
processor that other programs used), `peak_memory` (weights and all other live tensors), `parameter_bytes`,
`kv_bytes_per_token` (of the cache after the last token), and with data `loss` (`mean`: nats per token on the same
held-out sequences for every model, `count` tokens; `difference_stderr`: standard error of the difference to the
original over `count` documents). The loss of a model is the mean of `-log q(token)` over all labelled tokens.
Differences are paired, on the same tokens; the cluster of their standard error is the document
(`uncertainty.ratio_error`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.execution.latency import PHASES, Runner, check_positions, machine, random_tokens, time_in_rounds
from fulldepth.execution.memory import cache_bytes, parameter_bytes, peak_bytes
from fulldepth.execution.scoring import DEVICE_LOGITS, LOSS, batch_sums, read
from fulldepth.execution.verify import check_task
from fulldepth.hf import Checkpoint, anatomy_candidates, device_of, evaluating, open_model
from fulldepth.hf.model_hash import model_hash
from fulldepth.progress import Watcher
from fulldepth.results import Finding, Results, claimed, finite, provenance, tabulate
from fulldepth.settings.bench import BenchSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.skip.elimination import LEAST, Difference, compare
from fulldepth.skip.exports.export import NOTES, load, read_notes
from fulldepth.skip.fit import make_batches
from fulldepth.skip.outcome import joined
from fulldepth.skip.plan import Plan, overlap
from fulldepth.skip.problem import read_data
from fulldepth.thresholds import BUSY
from fulldepth.uncertainty import FEWEST_CLUSTERS, FEWEST_ROUNDS, Ratio, median_ratio


@takes_settings(BenchSettings)
def bench(
    original: str | Path | PreTrainedModel,
    exports: Sequence[str | Path | PreTrainedModel],
    output: str | Path | None = None,
    *,
    settings: BenchSettings,
    watcher: Watcher,
    overwrite: bool = False,
    data: Any = None,
    heldout: Any = None,
    tokenizer: Any = None,
) -> Results:
    """Time exports against the original model, over batch sizes and contexts; see the docstring of this module.

    Args:
        original: the checkpoint (folder, Hub name) or the loaded model; a loaded model is not moved or changed.
        exports: folders that `export` wrote, other checkpoints, loaded models.
        output: result folder, which also gets the page; None = not saved.
        settings: fields of `BenchSettings` as keywords, or an instance.
        watcher: receives progress.
        overwrite: replace results in the output folder.
        data: as for `search`: losses of all models are computed on its held-out fifth, the one that a search with the
            same seed scores blocks with. None = no losses, unless `heldout` is set.
        heldout: held-out data, used entirely in place of that fifth.
        tokenizer: for data: a tokenizer, its folder or Hub name; None = the original's.

    Raises:
        FulldepthError: if there are no exports, a model cannot be loaded or is no language model, models are on
            different devices or have different vocabularies, a context with its new tokens exceeds their positions, or
            the data cannot be read (as `search`), or the folder holds other results.
    """
    if isinstance(exports, str | Path | PreTrainedModel) or not exports:
        raise FulldepthError("Expected one export or more to compare with the original.")
    with ExitStack() as stack:
        stack.enter_context(claimed(output, overwrite))
        entries = _opened([original, *exports], settings)
        for entry in entries:
            stack.enter_context(evaluating(entry.model))
        anatomy = check_task(anatomy_candidates(entries[0].model)[0])
        if "contexts" not in settings.model_fields_set and anatomy.max_positions is not None:
            longest = max(1, anatomy.max_positions - settings.max_new_tokens)
            shortened = list(dict.fromkeys(min(context, longest) for context in settings.contexts))
            settings = settings.model_copy(update={"contexts": shortened})
        check_positions(anatomy, max(settings.contexts), settings.max_new_tokens)
        for entry in entries[1:]:
            if entry.model.device != entries[0].model.device:
                raise FulldepthError(
                    f"{entry.label} is on {entry.model.device}, the original on {entries[0].model.device}."
                )
            if (size := vocabulary(entry.model)) != anatomy.vocab_size:
                raise FulldepthError(
                    f"{entry.label} has a vocabulary of {size}, the original of {anatomy.vocab_size}: not the same "
                    "model."
                )
        models, examples = {entry.label: entry.model for entry in entries}, None
        measured = Measured(list(models), {label: parameter_bytes(model) for label, model in models.items()})
        if data is not None or heldout is not None:
            checkpoint = Checkpoint(entries[0].model, entries[0].name)
            examples = read_data(checkpoint, anatomy, data, settings, tokenizer=tokenizer, heldout=heldout)
            measured.losses = heldout_losses(models, examples.heldout, settings.batch_size, watcher)[LOSS]
        runs = {label: Runner(model) for label, model in models.items()}
        cells = [Cell(batch, context) for batch in settings.batches for context in settings.contexts]
        watcher.begin("Benchmark", len(cells) * len(runs) * (settings.repeats + settings.warmup))
        for cell in cells:
            ids = random_tokens(anatomy, cell.batch, cell.context + settings.max_new_tokens, settings.seed)
            options = settings.model_dump(include={"repeats", "warmup", "seed"})
            rounds = time_in_rounds(runs, ids, cell.context, **options, advance=watcher.advance)
            measured.other_load[cell] = rounds.other_load
            measured.times |= {(label, cell, phase): seconds for (label, phase), seconds in rounds.seconds.items()}
            for label, runner in runs.items():
                run = partial(runner.run, ids, cell.context)
                peak, cache = peak_bytes(runner.model, ids, run), cache_bytes(run().cache)
                measured.memory[label, cell] = peak, cache / ids.numel()
        results = Results(measured.table(), _document(entries, measured, settings, examples))
        if output is not None:
            results.save(output)
    return results


@dataclass(frozen=True)
class BenchedModel:
    """A model of the benchmark."""

    label: str
    model: PreTrainedModel
    name: str
    notes: dict[str, Any]
    """Notes of an export: `format`, `plan`, ...; empty for other models."""

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that it was exported with; empty if there is none."""
        return self.notes.get("plan") or {}


def _opened(models: Sequence[str | Path | PreTrainedModel], settings: BenchSettings) -> list[BenchedModel]:
    """Every model loaded, with distinct labels: the last parts of the names if they differ, else numbered names."""
    opened: list[tuple[PreTrainedModel, str, dict[str, Any]]] = []
    options = settings.model_dump(include={"dtype", "device", "revision", "trust_remote_code"})
    for model in models:
        if isinstance(model, str | Path) and (Path(model) / NOTES).is_file():
            exported = load(model, dtype=settings.dtype, device=settings.device)
            opened.append((exported, str(model), read_notes(Path(model))))
        else:
            checkpoint = open_model(model, **options)
            opened.append((checkpoint.model, checkpoint.name, {}))
    labels = [Path(name).name or name for _, name, _ in opened]
    if len(set(labels)) < len(labels):
        labels = [name for _, name, _ in opened]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({labels[: at + 1].count(label)})" for at, label in enumerate(labels)]
    return [BenchedModel(label, *each) for label, each in zip(labels, opened, strict=True)]


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
    """Summed losses of every model on every sequence."""

    sums: Mapping[str, np.ndarray]
    """Label -> `[N]` nats; the first is the original."""
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
    models: Mapping[str, PreTrainedModel],
    examples: Sequence[Example],
    batch_size: int,
    watcher: Watcher,
    kinds: Sequence[str] = (LOSS,),
) -> dict[str, HeldoutLosses]:
    """Compute the loss of every model on every sequence, by ordinary forward passes.

    Args:
        models: label -> a causal language model in evaluation mode; all have the same vocabulary.
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
    batches = make_batches(examples, min(batch_size, max(1, DEVICE_LOGITS // (longest * largest))))
    watcher.begin("Held-out loss", len(batches) * len(models))
    sums: dict[str, dict[str, list[float]]] = {kind: {label: [] for label in models} for kind in kinds}
    for batch in batches:
        base: Tensor | None = None
        for label, model in models.items():
            placed = batch.to(device_of(model))
            logits = model(**placed.inputs, use_cache=False).logits  # [B, T, V]
            rows = logits[placed.where.to(logits.device)]  # [R, V]
            rows = (rows.float() if rows.dtype.itemsize < 4 else rows).log_softmax(-1)
            base = rows if base is None and len(kinds) > 1 else base
            for kind in kinds:
                values = read(kind, rows, placed.targets, None if base is None else base.to(rows.device))
                sums[kind][label] += batch_sums(values, placed)
            watcher.advance(1)
    if broken := [label for label, values in sums[LOSS].items() if not np.isfinite(values).all()]:
        raise FulldepthError(f"The held-out loss of {broken[0]} is NaN or infinite.")
    tokens = np.array([count for batch in batches for count in batch.tokens], dtype=np.float64)
    documents = np.array([document for batch in batches for document in batch.documents])
    return {
        kind: HeldoutLosses({label: np.array(values) for label, values in own.items()}, tokens, documents)
        for kind, own in sums.items()
    }


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

    def busy(self, *cells: Cell) -> Finding | None:
        """The finding in place of comparisons of times, if other programs used more than `BUSY` of the processor."""
        other = max(self.other_load[cell] for cell in cells or self.other_load)
        if other <= BUSY:
            return None
        used = f"other programs used {100 * other:.0f} % of its processor"
        text = f"The machine was busy: {used}. Times are not compared."
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
            for cell, share in self.other_load.items():
                sizes = zip(("peak_memory", "kv_bytes_per_token"), self.memory.get((label, cell), ()), strict=False)
                rows = [(measure, "model", None, None, "value", size, None, "bytes") for measure, size in sizes]
                for phase in PHASES:
                    seconds = self.times[label, cell, phase]
                    rows.append((f"{phase}_time", phase, None, None, "median", median(seconds), len(seconds), "s"))
                if label == self.labels[0]:
                    rows.append(("other_load", "model", None, None, "value", share, None, "1"))
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


def _document(
    entries: Sequence[BenchedModel], measured: Measured, settings: BenchSettings, examples: Examples | None
) -> dict[str, Any]:
    """The entries of `results.json`."""
    first, data, digest = entries[0], {} if examples is None else examples.meta, model_hash(entries[0].model)
    described, warnings = [], []
    for entry in entries:
        model, plan, original = entry.model, entry.plan, entry is first
        layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
        depth = find_anatomy(model).num_layers if original else layers if isinstance(layers, int) else None
        described.append(
            {
                "label": entry.label,
                "baseline": original,
                "model": {
                    "name": entry.name,
                    "class": type(model).__name__,
                    "num_layers": depth,
                    "parameters": sum(parameter.numel() for parameter in model.parameters()),
                    "dtype": str(model.dtype).removeprefix("torch."),
                    "hash": digest if original else None,
                },
                "format": entry.notes.get("format"),
                "granularity": plan.get("granularity"),
                "blocks": plan.get("blocks"),
                "losses": plan.get("losses"),
                "healed_loss": plan.get("healed_loss"),
            }
        )
        if original:
            continue
        if model.dtype != first.model.dtype:
            warnings.append(f"{entry.label} computes in {model.dtype}, the original in {first.model.dtype}.")
        elif settings.dtype == "auto" and plan.get("model", {}).get("hash", digest) != digest:
            warnings.append(f"{entry.label} was made from other weights than those of {first.label}.")
    document = {
        **provenance("bench", settings.model_dump(), seed=settings.seed, machine=machine(first.model.device)),
        "baseline": first.label,
        "model": described[0]["model"],
        "models": described,
        "data": data or None,
        "warnings": [*warnings, *data.get("warnings", [])],
        "headline": dict(_headline(entries, measured, examples)),
    }
    return dict(finite(document))


def _headline(
    entries: Sequence[BenchedModel], measured: Measured, examples: Examples | None
) -> Iterator[tuple[str, Finding]]:
    """Findings by name for each export: the added loss, and for each phase the ratio of times."""
    not_compared, cells = measured.busy(), len(measured.other_load)
    where = f" over {cells} combinations of batch and context" if cells > 1 else ""
    for entry in entries[1:]:
        label = entry.label
        if measured.losses is not None:
            losses, added = measured.losses, measured.losses.added(label)
            loss = f"held-out loss {losses.mean(label):.4f} nats, {in_words(added, entries[0].label)}"
            sentence = f"{label}: {loss}; {losses.count} tokens."
            if examples is not None and entry.plan and (remark := overlap(Plan.of(entry.plan), examples)):
                sentence += f" {remark}"
            yield f"loss_added {label}", gap_finding(added, sentence)
        for phase in PHASES if not_compared is None else ():
            sentence = f"{label}, {phase} time{where}: {measured.ratio_text(label, phase)}."
            yield f"{phase}_time_ratio {label}", Finding(measured.ratio(label, phase).value, "1", sentence)
    if not_compared is not None:
        yield "times", not_compared
