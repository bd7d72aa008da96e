r"""`bench`: time, memory and cache of exports compared with the original model, measured and predicted.

All models are in memory at once. After a warm-up they run in rounds, each once a round, in an order that changes from
round to round, so that other load on the machine affects all of them. A time is the median over rounds; the share
saved is the median of the rounds' own shares,

.. math:: s = 1 - t_{\text{export}} / t_{\text{original}}.

It is predicted twice: `toggled`, by timing the original with the same blocks skipped in place, in the same rounds, and
`flops`, by the operations of both. `time_saved_ratio` is measured over predicted.

Rows, by `model`, `batch` and `context`; `difference` is the value minus the original's:
`prefill_time`, `decode_time` (of one token; median, min, max, s), `time_saved`, `time_saved_per_block`,
`predicted_time_saved`, `time_saved_ratio` (sites `prefill` and `decode`), `attention_share` (of the original's steps:
the share saved when every attention is skipped in place), `peak_memory` (weights and all other live tensors),
`parameter_bytes`, `kv_bytes_per_token` (of the cache after the last token), with data `loss` (`mean`: nats per
token on the same held-out sequences for every model, `count` tokens; `difference_stderr`: standard error of the
difference to the original, summed by document, `count` documents), and with `tasks` `task_score` (site: the task;
statistic: lm-eval's metric, and its `_stderr`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import costs_of
from fulldepth.execution.harness import TaskScorer
from fulldepth.execution.language_model import check_task, prove
from fulldepth.execution.latency import Runner, check_positions, machine, random_tokens, time_in_rounds
from fulldepth.execution.memory import cache_bytes, parameter_bytes, peak_bytes
from fulldepth.hf import Anatomy, Checkpoint, Classifier, anatomy_candidates, evaluating
from fulldepth.hf.model_hash import model_hash
from fulldepth.hf.surgery import skipping
from fulldepth.progress import Watcher
from fulldepth.results import Results, finite, provenance
from fulldepth.settings import layer as layered
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.assessment.bench_entries import Entry, open_entries
from fulldepth.skip.assessment.bench_table import Cell, Measured, SkippedBlocks, headline, noise, table_of
from fulldepth.skip.assessment.heldout_loss import heldout_losses, vocabulary
from fulldepth.skip.selection.problem import read_data, tokenizer_of


def bench(
    original: str | Path | PreTrainedModel,
    exports: Sequence[str | Path | PreTrainedModel],
    output: str | Path | None = None,
    *,
    data: Any = None,
    heldout: Any = None,
    tokenizer: Any = None,
    batches: Sequence[int] = (1, 4),
    contexts: Sequence[int] | None = None,
    new_tokens: int = 16,
    repeats: int = 5,
    seed: int = 0,
    device: str | None = None,
    dtype: str = "auto",
    watcher: Watcher | None = None,
    **options: Any,
) -> Results:
    """Time exports against the original model, over batch sizes and contexts; see the docstring of this module.

    Args:
        original: the checkpoint (folder, Hub name) or the loaded model; a loaded model is not moved or changed.
        exports: folders that `export` wrote; other checkpoints and loaded models are timed too, without predictions
            if it is not known which blocks they lack.
        output: result folder; None = not saved.
        data: as for `search`: losses of all models are computed on its held-out fifth, the one that a search with the
            same seed scores blocks with. None = no losses, unless `heldout` is set.
        heldout: held-out data, used entirely in place of that fifth.
        tokenizer: for data and tasks: a tokenizer, its folder or Hub name; None = the original's.
        batches: batch sizes.
        contexts: lengths of the prompt in tokens; None = 128 and 512, less if the model has fewer positions.
        new_tokens: number of decoded tokens.
        repeats: number of rounds.
        seed: of tokens and order.
        device: None = the first accelerator, else the CPU.
        dtype: `auto` = each checkpoint's own.
        watcher: receives progress.
        **options: any other field of `BenchSettings`.

    Raises:
        FulldepthError: if there are no exports, a model cannot be loaded or is no language model, models are on
            different devices or have different vocabularies, a context with its new tokens exceeds their positions, or
            the data cannot be read (as `search`).
    """
    fields: dict[str, Any] = {"batches": list(batches), "new_tokens": new_tokens, "repeats": repeats, "seed": seed}
    fields |= {} if contexts is None else {"contexts": list(contexts)}
    settings = layered(BenchSettings, {**fields, "device": device, "dtype": dtype, **options})
    if isinstance(exports, str | Path | PreTrainedModel) or not exports:
        raise FulldepthError("Expected one export or more to compare with the original.")
    watcher = watcher or Watcher()
    entries = open_entries([original, *exports], settings)
    with ExitStack() as modes:
        for entry in entries:
            modes.enter_context(evaluating(entry.model))
        read = partial(read_data, data=data, tokenizer=tokenizer, heldout=heldout)
        reader = None if data is None and heldout is None else read
        results = _bench(entries, settings, watcher, reader, tokenizer, shorten=contexts is None)
    if output is not None:
        results.save(output)
    return results


def _bench(
    entries: Sequence[Entry],
    settings: BenchSettings,
    watcher: Watcher,
    reader: Callable[..., Examples] | None,
    tokenizer: Any,
    *,
    shorten: bool,
) -> Results:
    """Results of loaded models; `reader` is `read_data` of the data, None if no losses are computed."""
    first, models = entries[0], {entry.label: entry.model for entry in entries}
    subject = _Original.of(entries)
    if shorten:
        settings = _shortened(settings, subject.anatomy.max_positions)
    _check(entries, subject.anatomy, settings)
    first.hash = model_hash(first.model)
    checkpoint, scorer = Checkpoint(first.model, first.name), None
    examples = None if reader is None else reader(checkpoint, subject.anatomy, settings=settings)
    if settings.tasks:
        tokenizer = tokenizer_of(checkpoint, settings, tokenizer)
        scorer = TaskScorer(settings.tasks, tokenizer, settings.task_limit, max(settings.batches), settings.seed)
    losses = None if examples is None else heldout_losses(models, examples.heldout, settings.batch_size, watcher)
    measured = _measure(entries, subject, settings, watcher)
    measured.losses = losses
    if scorer is not None:
        measured.scores = scorer.scores(models, watcher)
    return Results(table_of(measured), _document(entries, subject, measured, settings, examples))


class _Original(NamedTuple):
    """The verified original, and the blocks that can be skipped in it."""

    anatomy: Anatomy
    classifier: Classifier
    toggles: dict[SkippedBlocks, str]
    """Blocks skipped in place -> key of their times."""
    warnings: list[str]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> _Original:
        """Verify the anatomy of the first entry, and that blocks can be skipped in it."""
        model = entries[0].model
        ids = torch.arange(3, 11).view(2, 4) % (check_task(anatomy_candidates(model)[0]).vocab_size or 1)
        anatomy, classifier = prove(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        toggles, warnings = {}, []
        attention = SkippedBlocks("attention", frozenset(anatomy.layers_with("attention")))
        for blocks in dict.fromkeys([attention, *(entry.skipped_blocks for entry in entries[1:])]):
            if blocks is None or not blocks.layers:
                continue
            try:
                with skipping(anatomy, blocks.layers, blocks.granularity):
                    toggles[blocks] = f"without the {blocks.granularity} of {sorted(blocks.layers)}"
            except FulldepthError as error:
                warnings.append(f"No toggled prediction: {error}")
        return cls(anatomy, classifier, toggles, warnings)


def _shortened(settings: BenchSettings, limit: int | None) -> BenchSettings:
    """The default contexts, no longer than the model's positions allow."""
    longest = max(settings.contexts) if limit is None else max(1, limit - settings.new_tokens)
    contexts = list(dict.fromkeys(min(context, longest) for context in settings.contexts))
    return settings.model_copy(update={"contexts": contexts})


def _check(entries: Sequence[Entry], anatomy: Anatomy, settings: BenchSettings) -> None:
    """Refuse models that cannot run, or cannot be compared."""
    first = entries[0].model
    check_positions(anatomy, max(settings.contexts), settings.new_tokens)
    for entry in entries[1:]:
        if entry.model.device != first.device:
            raise FulldepthError(f"{entry.label} is on {entry.model.device}, the original on {first.device}.")
        size = vocabulary(entry.model)
        if size != anatomy.vocab_size:
            raise FulldepthError(
                f"{entry.label} has a vocabulary of {size}, the original of {anatomy.vocab_size}: not the same model."
            )


def _measure(entries: Sequence[Entry], subject: _Original, settings: BenchSettings, watcher: Watcher) -> Measured:
    """Run the models, and measure times, memory and cache."""
    runners = {entry.label: Runner(entry.model) for entry in entries}
    original = runners[entries[0].label]
    granularities = ["attention", *(e.skipped_blocks.granularity for e in entries if e.skipped_blocks is not None)]
    measured = Measured(
        labels=list(runners),
        skipped_blocks={entry.label: entry.skipped_blocks for entry in entries[1:]},
        toggles=subject.toggles,
        costs={kind: costs_of(subject.anatomy, subject.classifier, kind) for kind in dict.fromkeys(granularities)},
        last_only=original.last_only,
        new_tokens=settings.new_tokens,
        parameter_bytes={entry.label: parameter_bytes(entry.model) for entry in entries},
    )
    runs: dict[str, tuple[Runner, Any]] = {label: (runner, nullcontext) for label, runner in runners.items()}
    for blocks, key in subject.toggles.items():
        runs[key] = original, partial(skipping, subject.anatomy, blocks.layers, blocks.granularity)
    cells = [Cell(batch, context) for batch in settings.batches for context in settings.contexts]
    watcher.begin("Benchmark", len(cells) * len(runs) * (settings.repeats + settings.warmup))
    for cell in cells:
        ids = random_tokens(subject.anatomy, cell.batch, cell.context + settings.new_tokens, settings.seed)
        for label, runner in runners.items():
            measured.peak[label, cell] = peak_bytes(runner.model, ids, partial(runner.run, ids, cell.context))
            cache = runner.run(ids, cell.context).cache
            measured.kv[label, cell] = cache_bytes(cache) / (cell.batch * ids.shape[1])
        rounds = settings.model_dump(include={"repeats", "warmup", "seed"})
        times = time_in_rounds(runs, ids, cell.context, **rounds, advance=watcher.advance)
        measured.times |= {(key, cell, phase): seconds for (key, phase), seconds in times.items()}
    return measured


def _document(
    entries: Sequence[Entry],
    subject: _Original,
    measured: Measured,
    settings: BenchSettings,
    examples: Examples | None,
) -> dict[str, Any]:
    """The entries of `results.json`."""
    first, data = entries[0], {} if examples is None else examples.meta
    described = [entry.describe(entry is first) for entry in entries]
    document = {
        **provenance("bench", settings.model_dump(), seed=settings.seed, machine=machine(first.model.device)),
        "baseline": first.label,
        "model": described[0]["model"],
        "models": described,
        "data": data or None,
        "warnings": [*subject.warnings, *_warnings(entries, settings, data), *noise(measured)],
        "headline": headline(measured),
    }
    return dict(finite(document))


def _warnings(entries: Sequence[Entry], settings: BenchSettings, data: Mapping[str, Any]) -> Iterator[str]:
    """Warnings of unfair comparisons and optimistic losses."""
    first, chosen = entries[0], []
    for entry in entries[1:]:
        planned = entry.plan.get("model", {}).get("hash")
        if entry.model.dtype != first.model.dtype:
            yield f"{entry.label} computes in {entry.model.dtype}, the original in {first.model.dtype}."
        elif settings.dtype == "auto" and planned not in (None, first.hash):
            yield f"{entry.label} was made from other weights than those of {first.label}."
        if data and entry.plan.get("data", {}).get("hash") == data.get("hash"):
            chosen.append(entry.label)
    yield from data.get("warnings", [])
    if chosen:
        yield (
            f"The losses of {', '.join(chosen)} are optimistic: blocks were chosen on the same held-out sequences. "
            "Name other data as held-out data."
        )
