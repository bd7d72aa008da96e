r"""`bench`: time, memory and cache of exports compared with the original model.

All models are in memory at once. After a warm-up they run in rounds, each once a round, in an order that changes from
round to round, so that other load on the machine affects all of them. The time of an export over the original's is

.. math:: r = \operatorname{median}_i\, t_{i,\text{export}} / t_{i,\text{original}}

over the rounds i, with a 95 % interval from the order statistics (`uncertainty.median_ratio`; none for fewer than 9
rounds). An interval that holds 1 is no measurable difference. Over the whole grid, t is the geometric mean over its
cells. If other programs used more than 10 % of the processor, times are not compared.

Rows, by `model`, `batch` and `context`; `difference` is the value minus the original's:
`prefill_time`, `decode_time` (of one token; median, min, max, s), `time_ratio` (sites `prefill` and `decode`; median,
low, high; without batch and context: over the grid), `other_load` (share of the processor that other programs used),
`peak_memory` (weights and all other live tensors),
`parameter_bytes`, `kv_bytes_per_token` (of the cache after the last token), with data `loss` (`mean`: nats per
token on the same held-out sequences for every model, `count` tokens; `difference_stderr`: standard error of the
difference to the original over `count` documents), and with `tasks` `task_score` (site: the task; statistic: lm-eval's
metric, and its `_stderr`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.data.examples import Examples
from fulldepth.errors import FulldepthError
from fulldepth.execution.harness import TaskScorer
from fulldepth.execution.language_model import check_task
from fulldepth.execution.latency import Runner, check_positions, machine, random_tokens, time_in_rounds
from fulldepth.execution.memory import cache_bytes, parameter_bytes, peak_bytes
from fulldepth.hf import Anatomy, Checkpoint, anatomy_candidates, evaluating
from fulldepth.hf.model_hash import model_hash
from fulldepth.progress import Watcher
from fulldepth.results import Results, claimed, finite, provenance
from fulldepth.settings import layer as layered
from fulldepth.settings.bench import BenchSettings
from fulldepth.skip.assessment.bench_entries import Entry, open_entries
from fulldepth.skip.assessment.bench_table import Cell, Measured, headline, table_of
from fulldepth.skip.assessment.heldout_loss import heldout_losses, vocabulary
from fulldepth.skip.in_sample import overlap
from fulldepth.skip.plan import Plan
from fulldepth.skip.selection.problem import read_data, tokenizer_of


def bench(
    original: str | Path | PreTrainedModel,
    exports: Sequence[str | Path | PreTrainedModel],
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    data: Any = None,
    heldout: Any = None,
    tokenizer: Any = None,
    batches: Sequence[int] = (1, 4),
    contexts: Sequence[int] | None = None,
    new_tokens: int = 16,
    repeats: int = 9,
    seed: int = 0,
    device: str | None = None,
    dtype: str = "auto",
    watcher: Watcher | None = None,
    **options: Any,
) -> Results:
    """Time exports against the original model, over batch sizes and contexts; see the docstring of this module.

    Args:
        original: the checkpoint (folder, Hub name) or the loaded model; a loaded model is not moved or changed.
        exports: folders that `export` wrote, other checkpoints, loaded models.
        output: result folder, which also gets the page; None = not saved.
        overwrite: replace results in the output folder.
        data: as for `search`: losses of all models are computed on its held-out fifth, the one that a search with the
            same seed scores blocks with. None = no losses, unless `heldout` is set.
        heldout: held-out data, used entirely in place of that fifth.
        tokenizer: for data and tasks: a tokenizer, its folder or Hub name; None = the original's.
        batches: batch sizes.
        contexts: lengths of the prompt in tokens; None = 128 and 512, less if the model has fewer positions.
        new_tokens: number of decoded tokens.
        repeats: number of rounds; with fewer than 9, ratios of times have no interval.
        seed: of tokens and order.
        device: None = the first accelerator, else the CPU.
        dtype: `auto` = each checkpoint's own.
        watcher: receives progress.
        **options: any other field of `BenchSettings`.

    Raises:
        FulldepthError: if there are no exports, a model cannot be loaded or is no language model, models are on
            different devices or have different vocabularies, a context with its new tokens exceeds their positions, or
            the data cannot be read (as `search`), or the folder holds other results.
    """
    fields: dict[str, Any] = {"batches": list(batches), "new_tokens": new_tokens, "repeats": repeats, "seed": seed}
    fields |= {} if contexts is None else {"contexts": list(contexts)}
    settings = layered(BenchSettings, {**fields, "device": device, "dtype": dtype, **options})
    if isinstance(exports, str | Path | PreTrainedModel) or not exports:
        raise FulldepthError("Expected one export or more to compare with the original.")
    watcher = watcher or Watcher()
    with ExitStack() as stack:
        stack.enter_context(claimed(output, overwrite))
        entries = open_entries([original, *exports], settings)
        for entry in entries:
            stack.enter_context(evaluating(entry.model))
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
    anatomy = check_task(anatomy_candidates(first.model)[0])
    if shorten:
        settings = _shortened(settings, anatomy.max_positions)
    _check(entries, anatomy, settings)
    first.hash = model_hash(first.model)
    checkpoint, scorer = Checkpoint(first.model, first.name), None
    examples = None if reader is None else reader(checkpoint, anatomy, settings=settings)
    if settings.tasks:
        tokenizer = tokenizer_of(checkpoint, settings, tokenizer)
        scorer = TaskScorer(settings.tasks, tokenizer, settings.task_limit, max(settings.batches), settings.seed)
    losses = None if examples is None else heldout_losses(models, examples.heldout, settings.batch_size, watcher)
    measured = _measure(entries, anatomy, settings, watcher)
    measured.losses = losses
    if scorer is not None:
        measured.scores = scorer.scores(models, watcher)
    return Results(table_of(measured), _document(entries, measured, settings, examples))


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


def _measure(entries: Sequence[Entry], anatomy: Anatomy, settings: BenchSettings, watcher: Watcher) -> Measured:
    """Run the models, and measure times, memory and cache."""
    runners = {entry.label: Runner(entry.model) for entry in entries}
    runs = {label: (runner, nullcontext) for label, runner in runners.items()}
    sizes = {entry.label: parameter_bytes(entry.model) for entry in entries}
    measured = Measured(list(runners), settings.new_tokens, sizes)
    cells = [Cell(batch, context) for batch in settings.batches for context in settings.contexts]
    watcher.begin("Benchmark", len(cells) * len(runs) * (settings.repeats + settings.warmup))
    for cell in cells:
        ids = random_tokens(anatomy, cell.batch, cell.context + settings.new_tokens, settings.seed)
        for label, runner in runners.items():
            measured.peak[label, cell] = peak_bytes(runner.model, ids, partial(runner.run, ids, cell.context))
            cache = runner.run(ids, cell.context).cache
            measured.kv[label, cell] = cache_bytes(cache) / (cell.batch * ids.shape[1])
        options = settings.model_dump(include={"repeats", "warmup", "seed"})
        rounds = time_in_rounds(runs, ids, cell.context, **options, advance=watcher.advance)
        measured.other_load[cell] = rounds.other_load
        measured.times |= {(label, cell, phase): seconds for (label, phase), seconds in rounds.seconds.items()}
    return measured


def _document(
    entries: Sequence[Entry], measured: Measured, settings: BenchSettings, examples: Examples | None
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
        "warnings": [*_warnings(entries, settings), *data.get("warnings", [])],
        "headline": headline(measured, {} if examples is None else _remarks(entries, examples)),
    }
    return dict(finite(document))


def _warnings(entries: Sequence[Entry], settings: BenchSettings) -> Iterator[str]:
    """Warnings of unfair comparisons."""
    first = entries[0]
    for entry in entries[1:]:
        planned = entry.plan.get("model", {}).get("hash")
        if entry.model.dtype != first.model.dtype:
            yield f"{entry.label} computes in {entry.model.dtype}, the original in {first.model.dtype}."
        elif settings.dtype == "auto" and planned not in (None, first.hash):
            yield f"{entry.label} was made from other weights than those of {first.label}."


def _remarks(entries: Sequence[Entry], examples: Examples) -> dict[str, str]:
    """Label -> the sentence on held-out rows that also chose the blocks of an export."""
    sentences = {entry.label: overlap(Plan.of(entry.plan), examples) for entry in entries[1:] if entry.plan}
    return {label: sentence for label, sentence in sentences.items() if sentence}
