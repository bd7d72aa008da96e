"""`bench`: time, memory and cache of exports compared with the original model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.core.uncertainty import FEWEST_ROUNDS, Ratio, median_ratio
from fulldepth.data.examples import Examples, is_seeded_fifth, units
from fulldepth.data.tokens import plain_ids
from fulldepth.execution import find_anatomy
from fulldepth.execution.heldout import HeldoutLosses, heldout_losses, vocabulary
from fulldepth.execution.latency import (
    PHASES,
    OtherLoad,
    Runner,
    Runs,
    check_prompt_fits,
    random_tokens,
    time_in_rounds,
)
from fulldepth.execution.llama_cpp import LlamaCpp
from fulldepth.execution.memory import cache_bytes, parameter_bytes, peak_bytes
from fulldepth.execution.scoring import LOSS
from fulldepth.hf import (
    Checkpoint,
    device_of,
    evaluating,
    find_gguf,
    open_tokenizer,
    packaged,
)
from fulldepth.hf.model_hash import model_hash
from fulldepth.results import (
    Finding,
    Results,
    claimed,
    difference_finding,
    difference_in_words,
    unique_names,
)
from fulldepth.settings import command_line
from fulldepth.settings.bench import BenchSettings
from fulldepth.settings.keywords import takes_settings
from fulldepth.skip.exports.export import NOTES, load_export, read_notes
from fulldepth.skip.plan import Plan, healed_rows, is_listed, overlap, share_of_rows
from fulldepth.skip.problem import read_data
from fulldepth.skip.timed import Cell, ComparedModel, TableRow, Timings, bench_document, with_fitting_contexts
from fulldepth.skip.under_load import bench_under_load
from fulldepth.subject import Subject, open_checkpoint

TEXTS = 4
"""Held-out texts on which tokenizers are compared."""


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
    r"""Time exports against the original model, over batch sizes and contexts.

    transformers runs all models but exports to GGUF files, which llama.cpp runs. Ratios of times are made within a
    program: of a GGUF file, the original is the original's own GGUF file under llama.cpp, or the first GGUF file if it
    has none.

    All models are in memory at once. After a warm-up they run in rounds, each once a round, in an order that changes
    from round to round, so that other load on the machine affects all of them. The time of an export over the
    original's is

    .. math:: r = \operatorname{median}_i\, t_{i,\text{export}} / t_{i,\text{original}}

    over the rounds i, with a 95 % interval from the order statistics (`uncertainty.median_ratio`; none for fewer than 9
    rounds). An interval that holds 1 is no measurable difference. Over the whole grid, t is the geometric mean over its
    cells; llama.cpp runs those of one sequence. If other programs used more than 10 % of the processor, times are not
    compared.

    With `concurrency` they run in servers with continuous batching instead: GGUF files in llama.cpp's, checkpoint
    folders in vLLM. In a round each model answers the same prompts for every number of clients c: each of c clients
    sends `requests` prompts, one after another, and every answer has `max_new_tokens` tokens. Models are compared with
    the first one of the same program, by

    .. math:: \frac{t_{i,\text{first}}}{t_{i,\text{export}}} \quad\text{and}\quad
        \frac{m_{i,\text{export}}}{m_{i,\text{first}}}

    with t the seconds of round i and m its median time to a first token.

    Args:
        original: the checkpoint (folder, Hub name) or the loaded model; a loaded model is not moved or changed.
        exports: folders that `export` wrote, other checkpoints, loaded models; GGUF files, which llama.cpp runs.
        output: result folder, which also gets the page; None = not saved.
        settings: fields of `BenchSettings` as keywords, or an instance.
        watcher: receives progress.
        overwrite: replace results in the output folder.
        data: as for `search`: losses of all models are computed on its held-out fifth, which is the one that the search
            of the first export with a plan scored blocks with, if it read the same data: its seed, number of rows,
            length of windows and use of the chat template apply unless `settings` give them. None = no losses, unless
            `heldout` is set.
        heldout: held-out data, used entirely in place of that fifth. The length of windows and the use of the chat
            template are those of the same search.
        tokenizer: for data: a tokenizer, its folder or Hub name; None = the original's.

    Returns:
        Rows, by `model`, `batch` and `context`: `prefill_time`, `decode_time` (of one token; median, s), `time_ratio`
        (sites `prefill` and `decode`; median, low, high; without batch and context: over the grid), `other_load` (share
        of the processor that other programs used), `peak_memory` (weights and all other live tensors; not of
        llama.cpp), `parameter_bytes`, `kv_bytes_per_token` (of the cache after the last token), and with data `loss`
        (`mean`: nats per token on the same held-out sequences for every model, `count` tokens; `difference_stderr`:
        standard error of the difference to the original over `count` documents; `difference_groups`: the number of
        groups for Student's t by which it is measurable). The loss of a model is the mean of
        `-log q(token)` over all labelled tokens. Differences are paired, on the same tokens; the cluster of their
        standard error is the document (`uncertainty.ratio_error`).

        With `concurrency`, rows by `model`, `batch` (the number of clients) and `context` (tokens of a prompt):
        `output_rate` (new tokens of all clients per second, prompts included in the time; median over the rounds),
        `first_token_time` (from a request to its first token; `median` and `p95` over all requests of all rounds, s),
        `rate_ratio` and `first_token_ratio` (the ratios above; median, low, high over the rounds) and `other_load`;
        `parameter_bytes` and `kv_bytes_per_token` of GGUF files.

    Raises:
        FulldepthError: if there are no exports, a model cannot be loaded or is no language model, models are on
            different devices or have different vocabularies, a context with its new tokens exceeds their positions, or
            the data cannot be read (as `search`), all held-out rows healed a model, a model has another tokenizer, or
            the folder holds other results; for GGUF files, if llama.cpp cannot run one, or no batch is of one sequence.
    """
    if isinstance(exports, str | Path | PreTrainedModel) or not exports:
        raise FulldepthError("Expected one export or more to compare with the original.")
    settings.check_effect(data=data is not None, heldout=heldout is not None)
    timed = bench_under_load if settings.concurrency else bench_calls
    with claimed(output, overwrite):
        results = timed(original, exports, settings, watcher, data, heldout, tokenizer)
        if output is not None:
            places = {"data": data, "heldout": heldout, "output": output}
            given = [original, *exports, *(place for place in places.values() if place is not None)]
            if "times" in results.headline and all(isinstance(name, str | Path) for name in given):
                again = command_line("skip bench", [original, *exports], places, settings) + " --overwrite"
                results.meta["next"] = {"why": "again:", "command": again}
            results.save(output, overwrite=overwrite, watcher=watcher)
    return results


def bench_calls(
    original: Any,
    exports: Sequence[Any],
    settings: BenchSettings,
    watcher: Watcher,
    data: Any = None,
    heldout: Any = None,
    tokenizer: Any = None,
) -> Results:
    """Time one call after another, over batch sizes and contexts; arguments and errors are those of `bench`."""
    with ExitStack() as stack:
        entries = _opened(original, exports, settings)
        settings = _reading_of_plan(settings, entries, is_split=data is not None and heldout is None)
        for entry in entries[1:]:
            if isinstance(entry.model, PreTrainedModel):
                stack.enter_context(evaluating(entry.model))
        opened = Checkpoint(entries[0].model, entries[0].name)  # type: ignore[arg-type]  # the first runs in transformers
        subject = stack.enter_context(
            Subject.open(opened, None, settings, needs={"language", "plain"}, tokenizer=tokenizer)
        )
        anatomy = subject.anatomy
        settings = with_fitting_contexts(settings, anatomy.max_positions)
        check_prompt_fits(anatomy, max(settings.contexts), settings.max_new_tokens)
        _check_together(entries, settings)
        examples = None
        if data is not None or heldout is not None:
            examples = _unseen(entries, read_data(subject, data, settings, heldout=heldout))
            reading_tokenizer = tokenizer if isinstance(data, Examples) else subject.tokenizer
            is_given = tokenizer is not None or settings.tokenizer is not None
            _check_tokenizers(entries, examples, reading_tokenizer, is_given=is_given)
        positions = max(settings.contexts) + settings.max_new_tokens + 1
        positions = max([positions, *map(len, examples.heldout if examples else ())])
        models = {entry.label: entry.model for entry in entries}
        runs: dict[str, Runs] = {}
        sizes: dict[str, dict[str, int]] = {}
        for label, model in models.items():
            if isinstance(model, LlamaCpp):
                stack.enter_context(model.serving(positions, subject.device))
                runs[label] = model
                sizes[label] = {"parameter_bytes": model.parameter_bytes}
            else:
                runs[label] = Runner(model)
                sizes[label] = {"parameter_bytes": parameter_bytes(model)}
        measured = CallTimes({entry.label: entry.program for entry in entries}, sizes)
        if examples is not None:
            measured.losses = heldout_losses(models, examples.heldout, settings.batch_size, watcher)[LOSS]
        cells = [Cell(batch, context) for batch in settings.batches for context in settings.contexts]
        timed = {
            cell: {label: run for label, run in runs.items() if cell.batch == 1 or isinstance(run, Runner)}
            for cell in cells
        }
        watcher.begin("Benchmark", sum(map(len, timed.values())) * (settings.repeats + settings.warmup))
        rounds = {"repeats": settings.repeats, "warmup": settings.warmup, "seed": settings.seed}
        for cell in cells:
            ids = random_tokens(anatomy, cell.batch, cell.context + settings.max_new_tokens, settings.seed)
            load = OtherLoad()
            times = time_in_rounds(timed[cell], ids, cell.context, **rounds, advance=watcher.advance)
            measured.other_load[cell] = load.share()
            measured.times |= {(label, cell, phase): seconds for (label, phase), seconds in times.items()}
            for label, runner in timed[cell].items():
                measured.memory[label, cell] = memory(runner, ids, cell.context)
        return Results(measured.table(), _document(entries, measured, settings, examples))


def memory(runner: Runs, ids: Tensor, context: int) -> dict[str, float]:
    """Measure -> bytes: peak memory (of transformers' models), and the cache of one token."""
    if isinstance(runner, LlamaCpp):
        return {"kv_bytes_per_token": runner.kv_bytes_per_token}
    assert isinstance(runner, Runner)
    run = partial(runner.run, ids, context)
    peak = peak_bytes(runner.model, ids, run)
    return {"peak_memory": peak, "kv_bytes_per_token": cache_bytes(run().cache) / ids.numel()}


@dataclass(frozen=True)
class BenchedModel(ComparedModel):
    """A model that is loaded, or that llama.cpp runs."""

    model: PreTrainedModel | LlamaCpp
    warnings: tuple[str, ...] = ()
    """Warnings of loading it."""

    def about(self) -> dict[str, Any]:
        """Name, class, depth, size and type of the model."""
        model = self.model
        if isinstance(model, LlamaCpp):
            return {
                "name": self.name,
                "class": model.header.architecture,
                "num_layers": model.header.entries.get("block_count"),
                "parameters": model.header.weights.elements,
            }
        layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
        return {
            "name": self.name,
            "class": type(model).__name__,
            "num_layers": find_anatomy(model).num_layers if self.original else layers,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
        }


def _opened(
    original: str | Path | PreTrainedModel, exports: Sequence[str | Path | PreTrainedModel], settings: BenchSettings
) -> list[BenchedModel]:
    """Every model, those of transformers first, with the shortest distinct endings of the names as labels.

    If the original is a GGUF file, and llama.cpp runs an export, it also runs the original, before its exports.
    """
    opened: list[BenchedModel] = []
    files = [
        None if isinstance(source, PreTrainedModel) else find_gguf(packaged(str(source)))
        for source in (original, *exports)
    ]
    for model, file in zip((original, *exports), files, strict=True):
        if file is not None and opened:
            opened.append(BenchedModel("", str(model), "llama.cpp", {}, False, LlamaCpp(file)))
        elif isinstance(model, str | Path) and (Path(model) / NOTES).is_file():
            exported = load_export(model, dtype=settings.dtype, device=settings.device)
            notes = read_notes(Path(model))
            warnings = exported.warnings
            opened.append(BenchedModel("", str(model), "transformers", notes, not opened, exported.model, warnings))
        else:
            checkpoint = open_checkpoint(model, settings, plain=True)
            name, loaded, warnings = checkpoint.name, checkpoint.model, checkpoint.warnings
            opened.append(BenchedModel("", name, "transformers", {}, not opened, loaded, warnings))
    if files[0] is not None and any(files[1:]):
        name = f"{opened[0].name} (llama.cpp)"
        opened.insert(1, BenchedModel("", name, "llama.cpp", {}, True, LlamaCpp(files[0])))
    opened.sort(key=lambda entry: isinstance(entry.model, LlamaCpp))
    labels = unique_names([Path(entry.name) for entry in opened])
    return [replace(entry, label=label) for label, entry in zip(labels, opened, strict=True)]


def _check_together(entries: Sequence[BenchedModel], settings: BenchSettings) -> None:
    """Check devices and vocabularies of all models against the original's, and that llama.cpp has something to time.

    Raises:
        FulldepthError: see `bench`.
    """
    first: Any = entries[0].model
    for entry in entries[1:]:
        model = entry.model
        if isinstance(model, PreTrainedModel) and device_of(model) != device_of(first):
            raise FulldepthError(f"{entry.label} is on {device_of(model)}, the original on {device_of(first)}.")
        if vocabulary(model) != vocabulary(first):
            raise FulldepthError(
                f"{entry.label} has a vocabulary of {vocabulary(model)}, the original of {vocabulary(first)}: not the "
                "same model."
            )
    tokens = {entry.label: entry.model.tokens for entry in entries if isinstance(entry.model, LlamaCpp)}
    base = next(iter(tokens), "")
    if differing := [label for label, ids in tokens.items() if ids != tokens[base]]:
        raise FulldepthError(f"{differing[0]} has other tokens than {base}: not the same model.")
    if tokens and 1 not in settings.batches:
        raise FulldepthError(f"llama.cpp runs {base} with one sequence at a time: add 1 to the batches.")


def _reading_of_plan(settings: BenchSettings, entries: Sequence[BenchedModel], *, is_split: bool) -> BenchSettings:
    """The settings with those by which the search of the first plan read its data, where they are not given.

    Always the length of windows and the use of the chat template: rows that chose blocks or healed a model are
    recognised by their tokens. If both hold out a seeded fifth of their data (`is_split`: the benchmark does), also
    the seed and the number of rows, which choose that fifth. Held-out data of their own are read entirely.
    """
    plan = next((Plan.of(entry.plan) for entry in entries if entry.plan), None)
    if plan is None:
        return settings
    names = {"sequence_length", "chat"}
    if is_split and is_seeded_fifth(plan.data):
        names |= {"seed", "max_sequences"}
    stored = plan.cost.get("settings", {})
    inherited = {name: stored[name] for name in names - settings.model_fields_set if stored.get(name) is not None}
    return settings.model_copy(update=inherited)


def _unseen(entries: Sequence[BenchedModel], examples: Examples) -> Examples:
    """The examples without the held-out rows that healed one of the models, or are of a document that did, and with a
    warning about them.

    Raises:
        FulldepthError: if no row is left.
    """
    seen = {row for entry in entries if entry.plan for row in healed_rows(Plan.of(entry.plan))}
    unseen = [example for example in examples.heldout if not is_listed(example, seen)]
    if len(unseen) == len(examples.heldout):
        return examples
    known = [example for example in examples.heldout if is_listed(example, seen)]
    warning = f"{share_of_rows(known, examples.heldout, seen)} healed one of the models"
    if not unseen:
        raise FulldepthError(f"{warning}. Give other held-out data.")
    warnings = [*examples.meta.get("warnings", []), f"{warning}, and are left out."]
    return Examples(examples.train, unseen, {**examples.meta, "warnings": warnings})


def _check_tokenizers(entries: Sequence[BenchedModel], examples: Examples, tokenizer: Any, *, is_given: bool) -> None:
    """Refuse a model whose own tokenizer gives the first held-out texts other ids than the one that read them.

    Args:
        entries: the original, and the models that are compared with it.
        examples: the held-out texts.
        tokenizer: that read them.
        is_given: whether it was named, and may be another than the original's own.
    """
    reader = "the given tokenizer" if is_given else f"that of {entries[0].label}"
    advice = "Give that of the exports, or leave it out (--tokenizer)." if is_given else "Not the same model."
    texts = [] if tokenizer is None else [tokenizer.decode(row.input_ids) for row in examples.heldout[:TEXTS]]
    for entry in entries[1:]:
        if isinstance(entry.model, LlamaCpp):  # compared by tokens
            continue
        try:
            tokenizer_of_export = open_tokenizer(Checkpoint(entry.model, entry.name))
        except FulldepthError:  # it holds none
            continue
        if any(plain_ids(tokenizer_of_export, text) != plain_ids(tokenizer, text) for text in texts):
            raise FulldepthError(
                f"{entry.label} has another tokenizer: it gives held-out text other ids than {reader}. {advice}"
            )


@dataclass
class CallTimes(Timings):
    """Measurements of all models; `times` has the seconds of each round by (label, cell, phase)."""

    losses: HeldoutLosses | None = None
    """None without data."""
    memory: dict[tuple[str, Cell], dict[str, float]] = field(default_factory=dict)
    """(label, cell) -> measure -> bytes."""

    refused: ClassVar[str] = "timed"

    def ratio(self, label: str, phase: str, *cells: Cell) -> Ratio:
        """Time over the baseline's; in several cells (none = all), a round's time is the geometric mean of theirs."""
        export_times, base = (
            np.exp(np.mean([np.log(self.times[name, cell, phase]) for cell in cells or self.cells(label)], axis=0))
            for name in (label, self.baseline(label))
        )  # [rounds] each
        return median_ratio(export_times, base)

    def ratio_text(self, label: str, phase: str) -> str:
        """The time over the baseline's over all cells, as the end of a sentence."""
        ratio = self.ratio(label, phase)
        base = self.baseline(label)
        other = "the original" if base == next(iter(self.programs)) else base
        if not math.isfinite(ratio.low):
            enough = f"an interval takes {FEWEST_ROUNDS} rounds, this is {self.rounds}"
            return f"{ratio.value:.3f} times that of {other} ({enough})"
        if not ratio.differs:
            return f"no measurable difference from {other} (at most {max(ratio.high - 1, 1 - ratio.low):.1%})"
        return f"{ratio.value:.3f} times that of {other} (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"

    def whole_rows(self, label: str) -> Iterator[TableRow]:
        """Rows of a model that belong to no cell: its size, its loss, and ratios over the whole grid."""
        yield from super().whole_rows(label)
        if self.losses is not None:
            yield from self.losses.rows(label)
        yield from self.ratio_rows(label, *self.cells(label))

    def measured_rows(self, label: str, cell: Cell) -> Iterator[TableRow]:
        """Rows of a model's memory and times in a cell."""
        for measure, size in self.memory.get((label, cell), {}).items():
            yield measure, "model", None, None, "value", size, None, "bytes"
        for phase in PHASES:
            seconds = self.times[label, cell, phase]
            yield f"{phase}_time", phase, None, None, "median", median(seconds), len(seconds), "s"

    def ratios(self, label: str, *cells: Cell) -> Iterator[tuple[str, str, Ratio]]:
        """Times over the baseline's, by phase."""
        for phase in PHASES:
            yield "time_ratio", phase, self.ratio(label, phase, *cells)


def _document(
    entries: Sequence[BenchedModel], measured: CallTimes, settings: BenchSettings, examples: Examples | None
) -> dict[str, Any]:
    """The entries of `results.json`."""
    first: Any = entries[0].model
    digest = model_hash(first)
    warnings = [f"{entry.label}: {text}" for entry in entries for text in entry.warnings]
    for entry in entries:
        if entry.original or isinstance(entry.model, LlamaCpp):
            continue
        if entry.model.dtype != first.dtype:
            warnings.append(f"{entry.label} computes in {entry.model.dtype}, the original in {first.dtype}.")
        elif settings.dtype == "auto" and entry.plan.get("model", {}).get("hash", digest) != digest:
            warnings.append(f"{entry.label} was made from other weights than those of {entries[0].label}.")
    if files := [entry for entry in entries if isinstance(entry.model, LlamaCpp)]:
        if not files[0].original:
            warnings.append(
                f"{entries[0].label} is no GGUF file, so llama.cpp does not run it: times and sizes under llama.cpp "
                f"are compared with those of {files[0].label}, the first GGUF file."
            )
        if settings.batches != [1]:
            warnings.append("llama.cpp was timed with one sequence at a time, transformers with every batch size.")
    models = [(entry, entry.about() | {"hash": digest if entry is entries[0] else None}) for entry in entries]
    data = None if examples is None else examples.meta or None
    return bench_document(models, settings, first.device, data, warnings, _headline(entries, measured, examples))


def _headline(
    entries: Sequence[BenchedModel], measured: CallTimes, examples: Examples | None
) -> Iterator[tuple[str, Finding]]:
    """Findings by name for each export: the added loss, and for each phase the ratio of times."""
    if (not_compared := measured.busy()) is not None:
        yield "times", not_compared
    for entry in entries[1:]:
        label = entry.label
        cells = len(measured.cells(label))
        baseline = measured.baseline(label)
        where = f" over {cells} combinations of batch and context" if cells > 1 else ""
        if measured.losses is not None and examples is not None:
            losses = measured.losses
            added = losses.added(label)
            held = units(examples.meta)
            loss = f"held-out loss {losses.mean(label):.4f} nats, {difference_in_words(added, entries[0].label, held)}"
            sentence = f"{label}: {loss}; {losses.count} tokens."
            if entry.plan and (remark := overlap(Plan.of(entry.plan), examples)):
                sentence += f" {remark}"
            yield f"loss_added {label}", difference_finding(added, sentence, held)
        for phase in PHASES if not_compared is None and label != baseline else ():
            sentence = f"{label}, {phase} time{where}: {measured.ratio_text(label, phase)}."
            yield f"{phase}_time_ratio {label}", Finding(measured.ratio(label, phase).value, "1", sentence)
